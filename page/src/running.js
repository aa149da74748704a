// Answers that are being written, of any conversation. The server keeps them when a page goes: they are found again by name.
import { batch, effect, signal } from "@preact/signals";
import * as db from "./db.js";
import { fresh } from "./dom.js";
import { loadModels, loadTools, modelRequest } from "./models.js";
import { imagesOf, requestOf } from "./request.js";
import { Socket } from "./socket.js";
import * as state from "./state.js";
import { split } from "./thinking.js";
import * as figures from "./figures.js";

export const socket = new Socket(state.secret.value);
const SAVE_EVERY = 1500;
const LONGEST = 8000000; // bytes of a message, of which the server takes 8 MiB

// A running answer: `text` grows outside of any signal, and `seen` counts what is to be drawn, once a frame at most.
function entryOf(message) {
  return { id: message.id, request: message.request, conversation: message.conversation, text: message.text ?? "", seen: signal(0), phase: signal("waiting"),
    began: performance.now(), first: 0, thought: 0, tokens: 0, cost: 0, queued: false, saved: performance.now(), found: false };
}
const asked = new Set(); // what this page asked for itself
const byRequest = (id) => [...state.running.value.values()].find((r) => r.request === id);

function track(entry) {
  state.running.value = new Map(state.running.value).set(entry.id, entry);
}
function untrack(entry) {
  const rest = new Map(state.running.value);
  rest.delete(entry.id);
  state.running.value = rest;
}

// Asks for an answer to a message; it is a branch beside other answers to it.
export async function ask(parent, id = state.conversation.value.id) {
  const modelNow = () => state.modelOf(state.conversations.value.get(id) ?? state.conversation.value), request = fresh();
  asked.add(request);
  const message = await state.append({ parent, role: "assistant", request, running: 1, model: modelNow()?.name ?? "" }, id);
  const entry = entryOf(message);
  track(entry);
  try {
    let chosen = modelNow();
    if (chosen && !chosen.loaded) { // whether it has a chat template is known once it is loaded
      entry.phase.value = "loading";
      await modelRequest(chosen.name, "POST");
      await loadModels();
      chosen = modelNow();
    }
    const all = new Map((await db.all("messages", id)).map((m) => [m.id, m]));
    if (!state.running.value.has(entry.id)) return; // stopped meanwhile
    if (imagesOf(all.get(parent)).length && !(chosen?.chat && chosen.vision)) throw new Error("no-eyes");
    const payload = requestOf(state.conversations.value.get(id), all, parent, chosen);
    Object.assign(entry, { began: performance.now() }).phase.value = "waiting";
    const message = { ...payload, model: chosen?.name ?? null, stream: true, keep: true, request_id: request };
    if (new Blob([JSON.stringify(message)]).size > LONGEST) throw new Error("too-long");
    if (!socket.send("inference", message)) throw new Error("no-connection");
  } catch (error) {
    await finish(entry, { error: error.message });
  }
}

export function stop(entry) {
  if (entry.phase.value === "loading" || !socket.send("stop", { request_id: entry.request })) finish(entry, { finish: "cancelled" });
}

async function finish(entry, fields) {
  untrack(entry);
  await state.save({ id: entry.id, conversation: entry.conversation, text: entry.text, running: undefined, ...fields });
  await state.change(entry.conversation, { changed: Date.now() });
  if (entry.conversation === state.conversation.value.id) state.told.value = split(entry.text).answer;
}

function draw(entry) {
  if (entry.queued) return;
  entry.queued = true;
  const show = () => requestAnimationFrame(() => {
    entry.queued = false;
    entry.seen.value += 1;
  });
  // A text that takes long to draw is drawn less often, so that the page stays quick.
  if (entry.cost > 6) setTimeout(show, entry.cost * 2);
  else if (document.hidden) setTimeout(() => { entry.queued = false; entry.seen.value += 1; }, 500);
  else show();
}

function took(entry, row) {
  entry.text += row.token ?? "";
  const now = performance.now();
  if (row.token_id !== null && row.token_id !== undefined) {
    entry.first ||= now;
    entry.tokens += 1;
  }
  if (row.token) entry.phase.value = "writing";
  if (!entry.thought && entry.first && /<\/|\[\/|<\||final/.test(row.token ?? "")) {
    const { thoughts, open } = split(entry.text);
    if (thoughts && !open) entry.thought = (now - entry.first) / 1000;
  }
  if (row.complete) return end(entry, row);
  draw(entry);
  if (now - entry.saved > SAVE_EVERY) {
    entry.saved = now;
    db.put("messages", { id: entry.id, conversation: entry.conversation, text: entry.text });
  }
  return undefined;
}

async function end(entry, row) {
  const stats = { tokens: row.tokens_generated ?? entry.tokens, prompt: row.prompt_tokens, rate: row.tokens_per_sec, dropped: row.dropped };
  if (entry.first && !entry.found) Object.assign(stats, { first: (entry.first - entry.began) / 1000, thought: entry.thought });
  const fields = { finish: row.finish_reason, stats, ...(row.tool_calls ? { calls: row.tool_calls, ...(row.text === undefined ? {} : { text: row.text }) } : {}) };
  await finish(entry, fields);
  if (fields.calls && asked.has(entry.request)) state.called.value = { id: entry.id, conversation: entry.conversation, calls: fields.calls };
}

// What a page before this one, or another tab, has running.
function follow(message) {
  if (!message.running || asked.has(message.request) || state.running.value.has(message.id)) return;
  const entry = { ...entryOf(message), found: true };
  track(entry);
  socket.send("resume", { request_id: entry.request });
}

socket.addEventListener("state", async ({ detail }) => {
  state.connection.value = detail;
  if (detail !== "connected") {
    if (!state.server.value.refused) loadModels(); // says why, where a key is wanted
    return;
  }
  loadModels();
  loadTools();
  for (const entry of state.running.value.values()) {
    if (entry.phase.value === "loading") continue;
    entry.found = true;
    socket.send("resume", { request_id: entry.request });
  }
  for (const message of await db.running()) follow(message);
});
socket.addEventListener("resume", ({ detail }) => {
  const entry = byRequest(detail.request_id);
  if (!entry) return;
  batch(() => {
    entry.text = detail.text;
    entry.phase.value = detail.text ? "writing" : "waiting";
  });
  draw(entry);
});
socket.addEventListener("inference", ({ detail }) => {
  const entry = byRequest(detail.request_id);
  if (entry) took(entry, detail);
});
socket.addEventListener("status", ({ detail }) => {
  const entry = detail.request_id && byRequest(detail.request_id);
  if (entry && ["loading", "summarising"].includes(detail.state)) entry.phase.value = detail.state;
  if (entry && detail.state === "generating" && entry.phase.value === "summarising") entry.phase.value = "waiting";
  if (entry && detail.state === "reading") entry.phase.value = { read: detail.read, of: detail.of };
});
socket.addEventListener("error", ({ detail }) => {
  const entry = detail.request_id && byRequest(detail.request_id);
  if (entry) finish(entry, detail.code === "NOT_RUNNING" ? { finish: "lost" } : { error: detail.message });
});
socket.addEventListener("metrics", ({ detail }) => {
  figures.take(detail);
  const known = state.server.value.models;
  if (detail.models.some((now) => known.find((m) => m.name === now.name)?.state !== now.state)) loadModels();
});
effect(() => state.path.value.filter((m) => m.running).forEach((m) => queueMicrotask(() => follow(m))));
