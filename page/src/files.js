// Conversations as files: one as Markdown, all as JSON, and back without doubles.
import * as db from "./db.js";
import { t } from "./i18n.js";
import { textOf } from "./request.js";
import * as state from "./state.js";

export function markdownOf(conversation, path) {
  const names = { user: t("you"), assistant: t("answer"), tool: t("result") };
  return `# ${conversation.title || t("untitled")}\n\n${path.map((m) => `**${names[m.role]}**\n\n${textOf(m)}\n`).join("\n")}`;
}

export async function wholeExport() {
  const [conversations, messages] = await Promise.all([db.all("conversations"), db.all("messages")]);
  const kept = conversations.filter((c) => !c.deleted), ids = new Set(kept.map((c) => c.id));
  return JSON.stringify({ quarrel: 1, conversations: kept, messages: messages.filter((m) => ids.has(m.conversation)) }, null, 1);
}

const isText = (value) => typeof value === "string";
const isConversation = (c) => c && isText(c.id) && isText(c.title) && Number.isFinite(c.changed) && (c.leaf === null || isText(c.leaf));
const isFile = (f) => f && isText(f.name) && (isText(f.text) || (isText(f.image) && f.image.startsWith("data:image/")));
const isCall = (c) => c && isText(c.id) && isText(c.function?.name) && ["string", "undefined"].includes(typeof c.function.arguments);
const isMessage = (m) => m && isText(m.id) && isText(m.conversation) && isText(m.text) && ["user", "assistant", "tool"].includes(m.role) && Number.isFinite(m.created)
  && (m.attachments ?? []).every?.(isFile) && (m.calls ?? []).every?.(isCall);

// Adds what is not there yet, and returns how many conversations were new. Also reads what an earlier page exported.
export async function importFile(text) {
  const read = JSON.parse(text);
  let { conversations = [], messages = [] } = read ?? {};
  if (!read?.quarrel) {
    const found = (Array.isArray(read) ? read : [read]).map(state.fromList).filter((c) => c?.messages.length);
    conversations = found.map((c) => c.conversation);
    messages = found.flatMap((c) => c.messages);
  }
  conversations = conversations.filter(isConversation);
  if (!conversations.length) throw new Error("no conversations");
  const ids = new Set(conversations.map((c) => c.id));
  await db.add("messages", messages.filter((m) => isMessage(m) && ids.has(m.conversation)).map(({ running: _, ...m }) => m));
  const added = await db.add("conversations", conversations.map(({ draft: _, ...c }) => c));
  state.conversations.value = new Map((await db.all("conversations")).map((c) => [c.id, c]));
  return added;
}
