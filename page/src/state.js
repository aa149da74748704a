// What the page shows, as signals. Records come from the store; whoever changes one writes it there and here.
import { batch, computed, effect, signal } from "@preact/signals";
import * as db from "./db.js";
import { fresh, read, write } from "./dom.js";
import { endBelow, pathTo } from "./tree.js";

export const view = signal("chat"); // or "metrics"
export const side = signal(!matchMedia("(max-width: 860px)").matches);
export const panel = signal(false);
export const dialog = signal(null); // { kind, ... }
export const toast = signal(null); // { text, action, act }
export const pulling = signal(null); // { name, done: a share }
export const told = signal(""); // to those who hear the page: an answer that is whole
export const connection = signal("connecting");
export const server = signal({ models: [], default: null, version: "", routes: new Set(), refused: false });
export const editing = signal(null); // the message that is being edited
export const tools = signal([]); // of the server, as a request lists them
export const called = signal(null); // the answer of this page that called tools last

export const settings = signal({ theme: "system", language: "", model: "", key: "", ...read("quarrelSettings", {}) });
export function set(changes) {
  settings.value = { ...settings.value, ...changes };
  const { key: _, ...kept } = settings.value;
  write("quarrelSettings", kept);
}

// For this tab, or for this browser where a person said so.
export const secret = signal(sessionStorage.getItem("quarrelKey") ?? read("quarrelKey", ""));
export function setSecret(value, remember) {
  secret.value = value;
  sessionStorage.setItem("quarrelKey", value);
  if (remember) write("quarrelKey", value);
  else localStorage.removeItem("quarrelKey");
}

export const defaults = signal({ system: "", options: {}, ...read("quarrelDefaults", {}) });
export function setDefaults(changes) {
  defaults.value = { ...defaults.value, ...changes };
  write("quarrelDefaults", defaults.value);
}
export const presets = signal(read("quarrelPresets", []));
export function setPresets(list) {
  presets.value = list;
  write("quarrelPresets", list);
}

const blank = () => ({ id: fresh(), title: "", created: Date.now(), changed: Date.now(), leaf: null, draft: true, ...defaults.value });
export const conversations = signal(new Map());
export const messages = signal(new Map()); // of the conversation that is open
export const newConversation = signal(blank());
export const opened = signal(null);
export const conversation = computed(() => conversations.value.get(opened.value) ?? newConversation.value);
export const path = computed(() => pathTo(messages.value, conversation.value.leaf));
const chosen = new Map();
effect(() => path.value.forEach((m) => m.parent && chosen.set(m.parent, m.id)));
export const running = signal(new Map()); // by the message's id: see running.js
export function modelOf(talk) {
  const { models, default: first } = server.value;
  return [talk.model, settings.value.model, first].map((n) => models.find((m) => m.name === n)).find(Boolean) ?? models[0];
}
export const model = computed(() => modelOf(conversation.value));
// Whether the model may be sent images; of one that is not loaded it is not known yet.
export const sees = computed(() => Boolean(model.value && (!model.value.loaded || (model.value.chat && model.value.vision))));
export const searched = signal({ text: "", found: null });

export async function open(id) {
  const found = id ? await db.all("messages", id) : [];
  batch(() => {
    opened.value = id;
    editing.value = null;
    messages.value = new Map(found.map((m) => [m.id, m]));
    if (!id) newConversation.value = blank();
    view.value = "chat";
    if (matchMedia("(max-width: 860px)").matches) side.value = false;
  });
  const hash = id ? `#/c/${id}` : "#/";
  if (location.hash !== hash) history.pushState(null, "", hash);
}

function hold(map, records) {
  const changed = new Map(map.value);
  for (const r of records) changed.set(r.id, { ...changed.get(r.id), ...r });
  map.value = changed;
}

// Changes fields of a conversation; a new one is written with its first message.
export async function change(id, fields) {
  if (newConversation.value.id === id && !conversations.value.has(id)) {
    newConversation.value = { ...newConversation.value, ...fields };
    return;
  }
  hold(conversations, [{ id, ...fields }]);
  await db.put("conversations", { id, ...fields });
}

export async function save(...records) {
  hold(messages, records.filter((r) => r.conversation === conversation.value.id));
  await db.put("messages", ...records);
}

// Adds a message after another, of the conversation that is shown or another one, and shows it there.
export async function append(message, id = conversation.value.id) {
  const { draft, ...record } = conversations.value.get(id) ?? conversation.value;
  const made = { id: fresh(), conversation: record.id, created: Date.now(), text: "", ...message };
  const title = record.title || (made.text.trim() || made.attachments?.[0]?.name || "").split("\n")[0].slice(0, 80);
  const now = { ...record, title, leaf: made.id, changed: Date.now() };
  batch(() => {
    const here = record.id === conversation.value.id;
    hold(conversations, [now]);
    if (!here) return;
    hold(messages, [made]);
    opened.value = record.id;
  });
  if (draft) history.replaceState(null, "", `#/c/${record.id}`);
  await Promise.all([db.put("messages", made), db.put("conversations", draft ? now : { id: now.id, title, leaf: now.leaf, changed: now.changed })]);
  return made;
}

export const showBranch = (id) => change(conversation.value.id, { leaf: endBelow(messages.value, id, chosen) });

export async function remove(id) {
  await change(id, { deleted: Date.now() });
  if (opened.value === id) await open(null);
}
export const restore = (id) => change(id, { deleted: 0 });

export async function start() {
  const found = await db.all("conversations"), week = Date.now() - 7 * 86400000;
  for (const c of found.filter((c) => c.deleted && c.deleted < week)) await db.drop(c.id);
  conversations.value = new Map(found.map((c) => [c.id, c]));
  await adopt();
  const wanted = location.hash.match(/^#\/c\/(\w+)$/)?.[1];
  if (wanted && conversations.value.has(wanted)) await open(wanted);
}

// Conversations as an earlier page left them: a list of messages each, in the browser's small storage.
export function fromList(entry) {
  if (!entry || !Array.isArray(entry.messages)) return null;
  const id = typeof entry.id === "string" ? entry.id : fresh(), changed = Number(entry.changed) || Date.now();
  let parent = null;
  const found = entry.messages.filter((m) => m && ["user", "assistant"].includes(m.role) && typeof m.text === "string").map((m, i) => {
    const made = { id: `${id}-${i}`, conversation: id, parent, role: m.role, text: m.text, created: changed + i };
    parent = made.id;
    return made;
  });
  return { conversation: { id, title: String(entry.title ?? "").slice(0, 200), created: changed, changed, leaf: parent, system: "", options: {} }, messages: found };
}

async function adopt() {
  const old = read("quarrelConversation", []);
  if (!Array.isArray(old) || !old.length) return;
  const found = old.map(fromList).filter((c) => c?.messages.length);
  await db.add("messages", found.flatMap((c) => c.messages));
  await db.add("conversations", found.map((c) => c.conversation));
  hold(conversations, found.map((c) => c.conversation).filter((c) => !conversations.value.has(c.id)));
  localStorage.removeItem("quarrelConversation");
}

db.onChange(async ({ store, ids, conversation: id }) => {
  if (store === "conversations" || !id) {
    const found = await Promise.all((id ? ids : (await db.all("conversations")).map((c) => c.id)).map((i) => db.get("conversations", i)));
    const kept = new Map(conversations.value);
    // Which branch a tab shows is its own affair, until what it shows is gone.
    for (const c of found) if (c) kept.set(c.id, { ...c, leaf: c.id === opened.value && messages.value.has(kept.get(c.id)?.leaf) ? kept.get(c.id).leaf : c.leaf });
    if (store === "conversations" && id && !found[0]) kept.delete(ids[0]);
    conversations.value = kept;
  } else if (id === opened.value) {
    const found = (await Promise.all(ids.map((i) => db.get("messages", i)))).filter(Boolean);
    const here = conversation.value;
    hold(messages, found);
    const next = found.find((m) => m.parent === here.leaf); // another tab went on from what this one shows
    if (next) hold(conversations, [{ id, leaf: endBelow(messages.value, next.id, chosen) }]);
  }
});
