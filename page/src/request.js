// What is sent for an answer: the turns before it, as the model is to see them.
import { pathTo } from "./tree.js";
import { split } from "./thinking.js";

export const OPTIONS = [
  { name: "temperature", min: 0, max: 2, step: 0.05, usual: 0.8 },
  { name: "top_k", min: 0, max: 200, step: 1, usual: 40 },
  { name: "top_p", min: 0, max: 1, step: 0.01, usual: 0.95 },
  { name: "min_p", min: 0, max: 1, step: 0.01, usual: 0.05 },
  { name: "max_tokens", min: 1, max: 131072, step: 1, usual: 2048, box: true },
  { name: "seed", min: 0, max: 2 ** 53 - 1, step: 1, usual: "", box: true },
];
export const MORE = [
  { name: "typical_p", min: 0.01, max: 1, step: 0.01, usual: 1 },
  { name: "repetition_penalty", min: 0.5, max: 2, step: 0.01, usual: 1 },
  { name: "presence_penalty", min: -2, max: 2, step: 0.05, usual: 0 },
  { name: "frequency_penalty", min: -2, max: 2, step: 0.05, usual: 0 },
  { name: "dry_multiplier", min: 0, max: 5, step: 0.05, usual: 0 },
  { name: "dry_base", min: 1, max: 4, step: 0.05, usual: 1.75 },
  { name: "dry_allowed_length", min: 1, max: 20, step: 1, usual: 2 },
  { name: "xtc_probability", min: 0, max: 1, step: 0.01, usual: 0 },
  { name: "xtc_threshold", min: 0, max: 0.5, step: 0.01, usual: 0.1 },
  { name: "mirostat", choices: [0, 2], usual: 0 },
  { name: "mirostat_tau", min: 0.1, max: 10, step: 0.1, usual: 5 },
  { name: "mirostat_eta", min: 0.01, max: 1, step: 0.01, usual: 0.1 },
];

const fence = (text) => "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((run) => run.length + 1)));
export function textOf(message) {
  const files = (message.attachments ?? []).map(({ name, text }) => `${name}\n${fence(text)}\n${text}\n${fence(text)}`);
  return [...files, message.text].filter(Boolean).join("\n\n");
}

function turnsOf(path) {
  return path.flatMap((m) => {
    if (m.role === "user") return [{ role: "user", content: textOf(m) }];
    if (m.role === "tool") return [{ role: "tool", content: m.text, name: m.name, tool_call_id: m.call }];
    if (m.error && !m.text) return [];
    const calls = m.calls?.map((c) => ({ id: c.id, type: "function", function: c.function }));
    return [{ role: "assistant", content: split(m.text).answer, ...(calls?.length ? { tool_calls: calls } : {}) }];
  });
}

// For a model without a chat template: what was written so far, as far back as half of its context reaches.
function story(path, model) {
  const whole = path.map((m) => (m.role === "user" ? textOf(m) : m.text).trimEnd()).filter(Boolean)
    .reduce((a, b) => (a && !/^[\s.,;:!?'"’”)]/.test(b) ? `${a} ${b}` : a + b), "");
  const most = Math.max(400, 2 * (model?.n_ctx ?? 2048)), rest = whole.slice(-most);
  return rest.length < whole.length ? rest.replace(/^\S*\s+/, "") : rest;
}

export function requestOf(conversation, messages, parent, model) {
  const whole = pathTo(messages, parent);
  const cut = whole.findIndex((m) => m.id === conversation.cut?.before);
  const path = cut > 0 ? whole.slice(cut) : whole, last = path.at(-1);
  const { stop, ...options } = conversation.options ?? {};
  const payload = { max_tokens: 2048, ...options, ...(stop?.length ? { stop } : {}) };
  if (conversation.schema) payload.response_format = { type: "json_schema", json_schema: { schema: JSON.parse(conversation.schema) } };
  if (!model?.chat) return { ...payload, prompt: story(path, model) };
  const summary = cut > 0 && conversation.cut.summary ? `What was said before, in short:\n${conversation.cut.summary}` : "";
  const system = [conversation.system?.trim(), summary].filter(Boolean).join("\n\n");
  if (system) payload.system = system;
  if (conversation.tools) payload.tools = JSON.parse(conversation.tools);
  const turns = turnsOf(path);
  if (last.role === "tool") return { ...payload, chat: true, prompt: "", messages: turns };
  return { ...payload, chat: true, prompt: turns.at(-1).content, messages: turns.slice(0, -1) };
}
