// What the page keeps, in IndexedDB. A conversation and each of its messages are records of their own, and a change writes
// only the fields that changed: two tabs that write at once add to each other. Each write is told to the other tabs.
import { openDB } from "idb";

const channel = new BroadcastChannel("quarrel");
const listeners = new Set();
channel.onmessage = ({ data }) => listeners.forEach((f) => f(data));

let memory = null; // where the browser keeps nothing, as some do in private windows: the page goes on without
const opened = openDB("quarrel", 1, {
  upgrade(db) {
    db.createObjectStore("conversations", { keyPath: "id" });
    const messages = db.createObjectStore("messages", { keyPath: "id" });
    messages.createIndex("conversation", "conversation");
    messages.createIndex("running", "running");
  },
  blocking: (_old, _new, event) => event.target.close(),
}).catch(() => {
  memory = { conversations: new Map(), messages: new Map() };
  return null;
});

const troubles = new Set();
export const onTrouble = (f) => troubles.add(f);

// Waits for a change; one that the browser does not take (its storage is full) is told, never lost in silence.
async function done(change) {
  try {
    await change.done;
    if (!asked) {
      asked = true;
      navigator.storage?.persist?.(); // what is kept here is not for the browser to clear away
    }
  } catch (error) {
    troubles.forEach((f) => f(error));
  }
}
let asked = false;

export const keepsNothing = () => memory !== null;
export const onChange = (f) => listeners.add(f);
const tell = (store, ids, conversation) => channel.postMessage({ store, ids, conversation });

export async function all(store, conversation) {
  const db = await opened;
  if (!db) return [...memory[store].values()].filter((r) => conversation === undefined || r.conversation === conversation);
  return conversation === undefined ? db.getAll(store) : db.getAllFromIndex(store, "conversation", conversation);
}

// Messages whose answer had not ended when they were written last.
export async function running() {
  const db = await opened;
  return db ? db.getAllFromIndex("messages", "running") : [];
}

export async function get(store, id) {
  const db = await opened;
  return db ? db.get(store, id) : memory[store].get(id);
}

// Writes these records; `fields` of one that is there already go over it, and others stay as another tab left them.
export async function put(store, ...records) {
  if (!records.length) return;
  const db = await opened;
  if (!db) for (const r of records) memory[store].set(r.id, { ...memory[store].get(r.id), ...r });
  else {
    const change = db.transaction(store, "readwrite");
    for (const record of records) change.store.get(record.id).then((known) => change.store.put({ ...known, ...record })).catch(() => {});
    await done(change);
  }
  tell(store, records.map((r) => r.id), records[0].conversation ?? records[0].id);
}

// Adds those whose id is new, and returns how many there were.
export async function add(store, records) {
  const db = await opened;
  const known = new Set(db ? await db.getAllKeys(store) : memory[store].keys());
  const found = records.filter((r) => !known.has(r.id));
  if (db) {
    const change = db.transaction(store, "readwrite");
    for (const r of found) change.store.put(r).catch(() => {});
    await done(change);
  } else for (const r of found) memory[store].set(r.id, r);
  tell(store, found.map((r) => r.id), null);
  return found.length;
}

export async function drop(conversation) {
  const gone = (await all("messages", conversation)).map((m) => m.id), db = await opened;
  if (db) {
    const change = db.transaction(["conversations", "messages"], "readwrite");
    await Promise.all([...gone.map((id) => change.objectStore("messages").delete(id)), change.objectStore("conversations").delete(conversation)]);
    await change.done;
  } else {
    memory.conversations.delete(conversation);
    for (const id of gone) memory.messages.delete(id);
  }
  tell("conversations", [conversation], conversation);
}
