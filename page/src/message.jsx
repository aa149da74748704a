// One message: what was said, its thoughts and calls, and what can be done with it.
import { memo } from "preact/compat";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Calls, Result } from "./calls.jsx";
import { CopyButton, Icon, IconButton } from "./controls.jsx";
import { Files } from "./composer.jsx";
import { number, t } from "./i18n.js";
import { Markdown } from "./markdown.jsx";
import { imagesOf } from "./request.js";
import { ask } from "./running.js";
import { shorten } from "./shorten.js";
import * as state from "./state.js";
import { split } from "./thinking.js";
import { siblings } from "./tree.js";

const rounded = (n) => number(n, { maximumFractionDigits: n < 10 ? 1 : 0 });

function Branches({ message }) {
  const all = siblings(state.messages.value, message), i = all.findIndex((m) => m.id === message.id);
  if (all.length < 2) return null;
  return (
    <span class="branches" role="group" aria-label={t("branch", { i: i + 1, n: all.length })}>
      <IconButton icon="left" size={16} label={t("previous")} disabled={i === 0} onClick={() => state.showBranch(all[i - 1].id)} />
      <span>{i + 1}/{all.length}</span>
      <IconButton icon="right" size={16} label={t("next")} disabled={i === all.length - 1} onClick={() => state.showBranch(all[i + 1].id)} />
    </span>
  );
}

function Edit({ message }) {
  const at = useRef(null), [text, setText] = useState(message.text);
  useLayoutEffect(() => {
    at.current.focus();
    at.current.setSelectionRange(text.length, text.length);
  }, []);
  useEffect(() => {
    at.current.style.height = "auto";
    at.current.style.height = `${at.current.scrollHeight}px`;
  }, [text]);
  const cancel = () => {
    state.editing.value = null;
    document.getElementById("input")?.focus();
  };
  const save = async () => {
    if (!text.trim()) return;
    state.editing.value = null;
    const made = await state.append({ parent: message.parent ?? null, role: "user", text: text.trim(), ...(message.attachments ? { attachments: message.attachments } : {}) });
    ask(made.id);
  };
  const keys = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      save();
    }
  };
  return (
    <form class="edit" onSubmit={(event) => { event.preventDefault(); save(); }}>
      <textarea ref={at} rows={1} aria-label={t("edit")} value={text} onInput={(e) => setText(e.target.value)} onKeyDown={keys} />
      <div><button type="button" onClick={cancel}>{t("cancel")}</button><button type="submit" class="primary">{t("send")}</button></div>
    </form>
  );
}

function Thoughts({ text, open, seconds, report }) {
  const title = open ? t("thinking") : seconds ? t("thought", { n: rounded(seconds) }) : t("thought-some");
  const [shown, show] = useState(false);
  return (
    <details class={`thoughts ${open ? "open" : ""}`} onToggle={(e) => show(e.target.open)}>
      <summary><Icon name="right" size={16} /><span class={open ? "shimmer" : ""}>{title}</span></summary>
      {shown && <Markdown text={text} growing={open} report={open ? report : undefined} />}
    </details>
  );
}

function Phase({ phase }) {
  if (phase === "writing") return null;
  if (typeof phase === "object") {
    return <div class="phase"><span class="shimmer">{t("reading", { read: number(phase.read), of: number(phase.of) })}</span><progress value={phase.read} max={phase.of} aria-label={t("reading", { read: phase.read, of: phase.of })} /></div>;
  }
  return <div class="phase"><span class="shimmer">{t(phase)}</span></div>;
}

// Where models begin to call tools: what follows is for the server to read, and stands in the answer's calls when it is whole.
const CALL = /<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<｜tool▁calls▁begin｜>|<\|tool_call>|<\|tool_call_start\|>|<\|channel\|>commentary to=/;

// What a model wrote. While it still does (`entry`), each count of `seen` draws it anew; what is drawn stays when it is whole.
function Written({ message, entry }) {
  entry?.seen.value;
  const { thoughts, answer: all, open } = split(entry ? entry.text : message.text), at = entry ? all.search(CALL) : -1;
  const answer = at < 0 ? all : all.slice(0, at).trimEnd(), report = entry && ((cost) => { entry.cost = cost; });
  return <>
    {entry && <Phase key="phase" phase={entry.phase.value} />}
    {(thoughts || open) && <Thoughts key="thoughts" text={thoughts} open={Boolean(entry && open)} seconds={entry ? entry.thought : message.stats?.thought} report={report} />}
    {answer && <Markdown key="answer" text={answer} growing={Boolean(entry)} report={report} />}
    {at >= 0 && <div key="calls" class="phase"><span class="shimmer">{t("tools")}</span></div>}
  </>;
}

function Stats({ message }) {
  const { stats, finish } = message, parts = [];
  if (stats?.tokens) parts.push(t("tokens", { n: number(stats.tokens) }));
  if (stats?.rate) parts.push(t("per-second", { n: rounded(stats.rate) }));
  if (stats?.first) parts.push(t("first-after", { n: number(stats.first, { maximumFractionDigits: 2 }) }));
  if (finish === "length") parts.push(t("at-limit"));
  if (finish === "cancelled") parts.push(t("cancelled"));
  return parts.length > 0 && <span class="stats">{parts.join(" · ")}</span>;
}

const Failure = ({ message }) => (
  <div class="failure" role="alert">
    <Icon name="warn" /><p>{["no-connection", "too-long", "no-eyes"].includes(message.error) ? t(message.error) : message.error}</p>
    {/context|too-long/i.test(message.error) && <><button type="button" onClick={() => shorten("drop")}>{t("drop-oldest")}</button><button type="button" onClick={() => shorten("summary")}>{t("summarise")}</button></>}
    <button type="button" onClick={() => ask(message.parent)}>{t("again")}</button>
  </div>
);

const After = ({ message }) => <>
  {message.calls?.length > 0 && <Calls message={message} />}
  {message.error && <Failure message={message} />}
  {message.stats?.dropped > 0 && <p class="lost">{t("left-out", { n: number(message.stats.dropped) })}</p>}
  {message.finish === "lost" && <p class="lost">{t("lost")}</p>}
</>;

const story = () => state.model.value?.loaded && !state.model.value.chat;

export const Message = memo(({ message: m, cut }) => {
  const entry = state.running.value.get(m.id), busy = state.running.value.size > 0 && [...state.running.value.values()].some((r) => r.conversation === m.conversation);
  const line = cut && <div class="cut"><p>{t(cut.summary ? "cut-summary" : "cut-dropped")} <button type="button" onClick={() => state.change(m.conversation, { cut: null })}>{t("cut-undo")}</button></p>{cut.summary && <details><summary>{t("summary")}</summary><p>{cut.summary}</p></details>}</div>;
  if (m.role === "user") {
    const editing = state.editing.value === m.id;
    return <>{line}
      <article class="message user" aria-label={t("you")} data-id={m.id}>
        {m.attachments && <Files list={m.attachments} />}
        {imagesOf(m).length > 0 && !state.sees.value && <p class="unseen">{t("unseen")}</p>}
        {editing ? <Edit message={m} /> : m.text && <div class="bubble">{m.text}</div>}
        {!editing && <div class="actions"><CopyButton text={() => m.text} /><IconButton icon="edit" size={16} label={t("edit")} disabled={busy} onClick={() => (state.editing.value = m.id)} /><Branches message={m} /></div>}
      </article>
    </>;
  }
  if (m.role === "tool") return <Result message={m} />;
  return (
    <article class={`message assistant ${entry ? "live" : ""}`} aria-label={t("answer")} aria-busy={entry ? "true" : undefined} data-id={m.id}>
      <Written message={m} entry={entry} />
      {!entry && <After message={m} />}
      {!entry && !m.running && <div class="actions">
        <CopyButton text={() => split(m.text).answer} /><IconButton icon="again" size={16} label={t("again")} disabled={busy} onClick={() => ask(m.parent)} />
        {story() && <IconButton icon="play" size={16} label={t("continue")} disabled={busy} onClick={() => ask(m.id)} />}<Branches message={m} /><Stats message={m} />
      </div>}
    </article>
  );
});
