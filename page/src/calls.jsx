// What the model wants to call, and what came of it.
import { useState } from "preact/hooks";
import { allowAlways, give, ofServer, refuse, run, working } from "./calls.js";
import { Icon } from "./controls.jsx";
import { t } from "./i18n.js";
import { ask } from "./running.js";
import * as state from "./state.js";

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return String(text);
  }
}

function Question({ message, call }) {
  const name = call.function.name;
  if (working.value.has(call.id)) return <p class="shimmer" role="status">{t("call-runs")}</p>;
  return <>
    <p>{t("call-asks", { name })}</p>
    <div class="choices">
      <button type="button" class="primary" onClick={() => run(message, call)}>{t("allow")}</button>
      <button type="button" onClick={() => refuse(message, call)}>{t("refuse")}</button>
      <button type="button" onClick={() => allowAlways(message, call)}>{t("allow-always", { name })}</button>
    </div>
  </>;
}

function Answer({ message, call }) {
  const [text, setText] = useState("");
  const send = (event) => {
    event.preventDefault();
    give(message, call, { text });
  };
  return <form onSubmit={send}>
    <label>{t("result")}<textarea rows={2} placeholder={t("result-hint")} onInput={(e) => setText(e.target.value)} /></label>
    <button class="primary" type="submit">{t("give-result")}</button>
  </form>;
}

export function Calls({ message }) {
  const results = [...state.messages.value.values()].filter((m) => m.role === "tool"), answered = new Set(results.map((m) => m.call));
  const last = state.path.value.at(-1), busy = [...state.running.value.values()].some((r) => r.conversation === message.conversation);
  const stuck = message.calls.every((c) => answered.has(c.id)) && last?.role === "tool" && message.calls.some((c) => c.id === last.call);
  return (
    <div class="calls">
      {message.calls.map((call) => (
        <div class="call" key={call.id}>
          <header><Icon name="tool" size={16} /><b>{call.function.name}</b></header>
          <pre tabIndex={0}>{pretty(call.function.arguments)}</pre>
          {!answered.has(call.id) && (ofServer(call) ? <Question message={message} call={call} /> : <Answer message={message} call={call} />)}
        </div>
      ))}
      {stuck && !busy && <button type="button" class="primary" onClick={() => ask(last.id)}>{t("continue")}</button>}
    </div>
  );
}

export const Result = ({ message: m }) => (
  <article class="message tool" aria-label={t("result-of", { name: m.name })}>
    <details><summary><Icon name={m.failed || m.refused ? "warn" : "tool"} size={16} /><span>{t(m.refused ? "refused-call" : m.failed ? "call-failed" : "result-of", { name: m.name })}</span>
      {!m.refused && <small class="title">{m.text.slice(0, 200)}</small>}</summary><pre tabIndex={0}>{pretty(m.text)}</pre></details>
  </article>
);
