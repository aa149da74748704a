// Conversations and settings, in this browser only.
import { fresh } from "./dom.js";

const CONVERSATIONS = "quarrelConversation", SETTINGS = "quarrelSettings", THEME = "quarrelTheme";
const LIMIT = 500;

export const RANGES = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, value: 0.8 },
  { name: "top_k", label: "Top K", min: 1, max: 100, step: 1, value: 40 },
  { name: "top_p", label: "Top P", min: 0, max: 1, step: 0.01, value: 0.95 },
  { name: "min_p", label: "Min P", min: 0, max: 1, step: 0.01, value: 0.05 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.01, value: 1 },
  { name: "max_tokens", label: "Max tokens", min: 1, max: 4096, step: 1, value: 1024 },
];
const DEFAULTS = { ...Object.fromEntries(RANGES.map((r) => [r.name, r.value])), system: "", seed: "", model: "" };

function read(key, fallback) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or forbidden: the page goes on without a memory
  }
}

const isMessage = (m) => m && ["user", "assistant", "error"].includes(m.role) && typeof m.text === "string";

// What a file or an older page left, cut down to what this page understands.
export function sound(entry) {
  if (!entry || !Array.isArray(entry.messages)) return null;
  return {
    id: typeof entry.id === "string" ? entry.id : fresh(),
    title: String(entry.title ?? "Conversation").slice(0, 200),
    changed: Number(entry.changed) || Date.now(),
    messages: entry.messages.filter(isMessage).map((m) => ({ role: m.role, text: m.text, stats: String(m.stats ?? "") })),
  };
}

export const conversations = {
  all: (Array.isArray(read(CONVERSATIONS, [])) ? read(CONVERSATIONS, []) : []).map(sound).filter(Boolean),
  save() {
    this.all.sort((a, b) => b.changed - a.changed);
    this.all.length = Math.min(this.all.length, LIMIT);
    return write(CONVERSATIONS, this.all.filter((c) => c.messages.length));
  },
  make() {
    const made = { id: fresh(), title: "New conversation", changed: Date.now(), messages: [] };
    this.all.unshift(made);
    return made;
  },
  remove(id) {
    this.all = this.all.filter((c) => c.id !== id);
    this.save();
  },
  search(text) {
    const wanted = text.trim().toLowerCase();
    const has = (c) => c.title.toLowerCase().includes(wanted) || c.messages.some((m) => m.text.toLowerCase().includes(wanted));
    return this.all.filter((c) => c.messages.length && (!wanted || has(c)));
  },
};

export const settings = {
  ...DEFAULTS,
  ...Object.fromEntries(Object.entries(read(SETTINGS, {})).filter(([k, v]) => k in DEFAULTS && typeof v === typeof DEFAULTS[k])),
};
export const saveSettings = () => write(SETTINGS, settings);
export function resetSettings() {
  Object.assign(settings, DEFAULTS, { model: settings.model });
  saveSettings();
}

export const theme = {
  get: () => read(THEME, "system"),
  set(value) {
    write(THEME, value);
    this.apply();
  },
  apply() {
    const dark = this.get() === "dark" || (this.get() === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
  },
};

export function markdownOf(conversation) {
  const names = { user: "You", assistant: "Model", error: "Error" };
  return `# ${conversation.title}\n\n` + conversation.messages.map((m) => `**${names[m.role]}**\n\n${m.text}\n`).join("\n");
}
