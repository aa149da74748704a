// What is sent for an answer: the turns before it, as the model is to see them.
import { pathTo } from "./tree.js";
import { split } from "./thinking.js";
import * as state from "./state.js";

export const OPTIONS = [
  { name: "temperature", min: 0, max: 2, step: 0.05, usual: 0.8 },
  { name: "top_k", min: 0, max: 200, step: 1, usual: 40 },
  { name: "top_p", min: 0, max: 1, step: 0.01, usual: 0.95 },
  { name: "min_p", min: 0, max: 1, step: 0.01, usual: 0.05 },
  { name: "max_tokens", min: 1, max: 131072, step: 1, usual: 2048, box: true },
  { name: "reasoning_effort", choices: ["", "none", "low", "medium", "high"], usual: "", words: "effort-" },
  { name: "thinking_token_budget", min: 0, max: 131072, step: 1, usual: "", box: true },
  { name: "seed", min: 0, max: 2 ** 53 - 1, step: 1, usual: "", box: true },
];
export const MORE = [
  { name: "typical_p", min: 0.01, max: 1, step: 0.01, usual: 1 },
  { name: "repetition_penalty", min: 0.5, max: 2, step: 0.01, usual: 1 },
  { name: "presence_penalty", min: -2, max: 2, step: 0.05, usual: 0 },
  { name: "frequency_penalty", min: -2, max: 2, step: 0.05, usual: 0 },
  { name: "penalty_last_n", min: -1, max: 131072, step: 1, usual: 64, box: true },
  { name: "dry_multiplier", min: 0, max: 5, step: 0.05, usual: 0 },
  { name: "dry_base", min: 1, max: 4, step: 0.05, usual: 1.75 },
  { name: "dry_allowed_length", min: 1, max: 20, step: 1, usual: 2 },
  { name: "dry_last_n", min: -1, max: 131072, step: 1, usual: -1, box: true },
  { name: "xtc_probability", min: 0, max: 1, step: 0.01, usual: 0 },
  { name: "xtc_threshold", min: 0, max: 0.5, step: 0.01, usual: 0.1 },
  { name: "top_n_sigma", min: 0, max: 5, step: 0.05, usual: 0 },
  { name: "dynatemp_range", min: 0, max: 5, step: 0.05, usual: 0 },
  { name: "dynatemp_exponent", min: 0, max: 10, step: 0.1, usual: 1 },
  { name: "adaptive_target", min: -1, max: 1, step: 0.01, usual: -1 },
  { name: "adaptive_decay", min: 0, max: 0.99, step: 0.01, usual: 0.9 },
  { name: "mirostat", choices: [0, 1, 2], usual: 0 },
  { name: "mirostat_tau", min: 0.1, max: 10, step: 0.1, usual: 5 },
  { name: "mirostat_eta", min: 0.01, max: 1, step: 0.01, usual: 0.1 },
];

const fence = (text) => "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((run) => run.length + 1)));
const shown = ({ name, text, image }) => (image ? `(${name})` : `${name}\n${fence(text)}\n${text}\n${fence(text)}`);
const asText = (attachments, text) => [...attachments.map(shown), text].filter(Boolean).join("\n\n");
// A message as text: of images, their names.
export const textOf = (message) => asText(message.attachments ?? [], message.text);
export const imagesOf = (message) => (message?.attachments ?? []).filter((a) => a.image);

function contentOf(message, model) {
  const images = model?.vision ? imagesOf(message) : [];
  if (!images.length) return textOf(message);
  const text = asText(message.attachments.filter((a) => !a.image), message.text);
  return [...images.map(({ image }) => ({ type: "image_url", image_url: { url: image } })), ...(text ? [{ type: "text", text }] : [])];
}

function turnsOf(path, model) {
  return path.flatMap((m) => {
    if (m.role === "user") return [{ role: "user", content: contentOf(m, model) }];
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

// The server's tools that this conversation may ask for.
const offered = (conversation) => state.tools.value.filter((tool) => !conversation.without?.includes(tool.function.name));

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
  const tools = [...(conversation.tools ? JSON.parse(conversation.tools) : []), ...offered(conversation)];
  if (tools.length) payload.tools = tools;
  if (conversation.overflow) payload.overflow = conversation.overflow;
  const turns = turnsOf(path, model);
  if (last.role === "tool" || typeof turns.at(-1).content !== "string") return { ...payload, chat: true, prompt: "", messages: turns };
  return { ...payload, chat: true, prompt: turns.at(-1).content, messages: turns.slice(0, -1) };
}
