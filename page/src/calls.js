// Calls of tools: those of the server run when a person has allowed them, and answers of any tool go back to the model.
import { effect, signal } from "@preact/signals";
import * as db from "./db.js";
import { api } from "./models.js";
import { ask } from "./running.js";
import * as state from "./state.js";

const REFUSED = "The user did not allow this call."; // what the model reads
export const working = signal(new Set()); // ids of calls that run
export const ofServer = (call) => state.tools.value.some((tool) => tool.function.name === call.function.name);

// Keeps the result of a call; with the last one of a message the model goes on.
export async function give(message, call, result) {
  const all = (await db.all("messages", message.conversation)).filter((m) => m.role === "tool");
  let last = message;
  for (let next = last; next; next = all.find((m) => m.parent === last.id)) last = next;
  const made = await state.append({ parent: last.id, role: "tool", call: call.id, name: call.function.name, ...result }, message.conversation);
  const answered = new Set([...all, made].map((m) => m.call));
  if (message.calls.every((c) => answered.has(c.id))) await ask(made.id, message.conversation);
}

export const refuse = (message, call) => give(message, call, { text: REFUSED, refused: true });

function argumentsOf(call) {
  try {
    const given = JSON.parse(call.function.arguments || "{}");
    return given && typeof given === "object" && !Array.isArray(given) ? given : {};
  } catch {
    return {};
  }
}

export async function run(message, call) {
  if (working.value.has(call.id)) return;
  working.value = new Set(working.value).add(call.id);
  let result;
  try {
    const body = JSON.stringify({ arguments: argumentsOf(call) }), path = `/api/tools/${encodeURIComponent(call.function.name)}`;
    const { text, failed } = await (await api(path, { method: "POST", headers: { "Content-Type": "application/json" }, body })).json();
    result = { text, failed };
  } catch (error) {
    result = { text: `The tool failed: ${error.message}`, failed: true };
  }
  await give(message, call, result);
  working.value = new Set([...working.value].filter((id) => id !== call.id));
}

// One after the other, as each result follows the one before it.
async function runAllowed(message) {
  const { allowed = [] } = state.conversations.value.get(message.conversation) ?? {};
  for (const call of message.calls) if (allowed.includes(call.function.name) && ofServer(call)) await run(message, call);
}

export async function allowAlways(message, call) {
  const { allowed = [] } = state.conversations.value.get(message.conversation) ?? {};
  await state.change(message.conversation, { allowed: [...new Set([...allowed, call.function.name])] });
  await run(message, call);
}

effect(() => state.called.value && queueMicrotask(() => state.called.peek() && runAllowed(state.called.peek())));
