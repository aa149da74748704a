// Makes room in a model's context: the oldest turns are left out, or a summary stands for them. The thread says so.
import { fresh } from "./dom.js";
import { t } from "./i18n.js";
import { api } from "./models.js";
import { textOf } from "./request.js";
import { split } from "./thinking.js";
import * as state from "./state.js";

// The first of the turns that stay: half of those that the model sees now, beginning with a person's.
function firstToStay(path, cut) {
  const from = Math.max(0, path.findIndex((m) => m.id === cut?.before)), rest = path.slice(from);
  const users = rest.map((m, i) => (m.role === "user" ? i : -1)).filter((i) => i > 0);
  const middle = users.find((i) => i >= rest.length / 2) ?? users.at(-1);
  return middle === undefined ? null : { before: rest[middle].id, gone: rest.slice(0, middle), keep: cut?.summary };
}

export async function shorten(how) {
  const conversation = state.conversation.value, found = firstToStay(state.path.value, conversation.cut);
  if (!found) {
    state.toast.value = { text: t("too-short") };
    return;
  }
  let summary = "";
  if (how === "summary") {
    state.toast.value = { text: t("summarising") };
    const told = [found.keep, ...found.gone.map((m) => `${m.role}: ${m.role === "assistant" ? split(m.text).answer : textOf(m)}`)].filter(Boolean).join("\n\n");
    const body = { model: state.model.value.name, request_id: fresh(), chat: true, max_tokens: 512, temperature: 0, prompt: `Summarise this conversation in at most 200 words. Keep names, numbers, decisions and open questions.\n\n${told}` };
    try {
      const answer = await api("/api/stream", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
      const rows = (await answer.text()).split("\n\n").filter((l) => l.startsWith("data: ")).map((l) => JSON.parse(l.slice(6)));
      const failure = rows.find((r) => r.error);
      if (failure) throw new Error(failure.error.message);
      summary = split(rows.map((r) => r.token ?? "").join("")).answer.trim();
    } catch (error) {
      state.toast.value = { text: error.message };
      return;
    }
  }
  await state.change(conversation.id, { cut: { before: found.before, summary } });
  state.toast.value = { text: t(summary ? "cut-summary" : "shortened"), action: t("undo"), act: () => state.change(conversation.id, { cut: conversation.cut ?? null }) };
}
