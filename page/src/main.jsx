// Puts the page together.
import "./style.css";
import { signal } from "@preact/signals";
import { render } from "preact";
import { useEffect } from "preact/hooks";
import "./calls.js";
import { Composer, take, text } from "./composer.jsx";
import { Icon, IconButton } from "./controls.jsx";
import * as db from "./db.js";
import { Dialogs, applyTheme } from "./dialogs.jsx";
import { scriptURL } from "./dom.js";
import { speak, t } from "./i18n.js";
import { Metrics } from "./metrics.jsx";
import { Panel } from "./panel.jsx";
import { socket, stop } from "./running.js";
import { Sidebar } from "./sidebar.jsx";
import * as state from "./state.js";
import { Thread } from "./thread.jsx";
import { TopBar } from "./topbar.jsx";
import { siblings } from "./tree.js";

// Models as small as the bundled one know little, and that in English.
const tiny = (model) => model?.loaded && model.chat && model.parameters < 1e8;
const SIMPLE = [["book", "Tell me a story about a fox and a lamp."], ["idea", "How much is 7 + 5?"], ["languages", "What is the capital of France?"], ["text", "How do I use a larger model?"]];

function Greeting() {
  const hour = new Date().getHours(), model = state.model.value, story = model && model.loaded && !model.chat;
  return <div class="greeting"><p class="hello">{t(hour < 5 || hour >= 18 ? "greet-evening" : hour < 12 ? "greet-morning" : "greet-day")}</p><p>{t(story ? "what-story" : tiny(model) ? "what-tiny" : "what")}</p></div>;
}

const write = (words) => {
  text.value = words;
  const input = document.getElementById("input");
  input?.focus();
  requestAnimationFrame(() => input?.setSelectionRange(words.length, words.length));
};

function Suggestions() {
  const model = state.model.value;
  if (!model || model.state === "loading") return null; // what it is for is known in a moment
  if (model.loaded && !model.chat) return <ul class="suggestions">{["story-1", "story-2", "story-3", "story-4"].map((k) => <li key={k}><button type="button" onClick={() => write(t(k))}><Icon name="book" size={16} />{t(k)}</button></li>)}</ul>;
  if (tiny(model)) return <ul class="suggestions">{SIMPLE.map(([icon, words]) => <li key={words}><button type="button" onClick={() => write(words)}><Icon name={icon} size={16} />{words}</button></li>)}</ul>;
  const kinds = [["try-explain", "idea"], ["try-code", "code"], ["try-summarise", "text"], ["try-translate", "languages"]];
  return <ul class="suggestions">{kinds.map(([k, icon]) => <li key={k}><button type="button" onClick={() => write(t(`${k}-text`))}><Icon name={icon} size={16} />{t(k)}</button></li>)}</ul>;
}

function Toast() {
  const now = state.toast.value;
  useEffect(() => {
    if (!now) return undefined;
    const over = setTimeout(() => (state.toast.value = null), 6000);
    return () => clearTimeout(over);
  }, [now]);
  return <div class="toasts" role="status">{now && <div class="toast"><span>{now.text}</span>{now.action && <button type="button" onClick={() => { now.act(); state.toast.value = null; }}>{now.action}</button>}
    <IconButton icon="close" size={16} label={t("close")} onClick={() => (state.toast.value = null)} /></div>}</div>;
}

const lastAnswer = () => state.path.value.findLast((m) => m.role === "assistant");

function turn(step) {
  const last = lastAnswer(), all = last ? siblings(state.messages.value, last) : [], next = all[all.findIndex((m) => m.id === last?.id) + step];
  if (next) state.showBranch(next.id);
}

function keys(event) {
  const held = event.ctrlKey || event.metaKey, act = {
    "ctrl+k": () => {
      const look = () => document.getElementById("search").focus();
      if (state.side.value) look();
      else requestAnimationFrame(look); // once it can have the focus
      state.side.value = true;
    },
    "ctrl+shift+o": () => state.open(null).then(() => document.getElementById("input")?.focus()),
    "ctrl+shift+s": () => (state.side.value = !state.side.value), "ctrl+.": () => (state.panel.value = !state.panel.value),
    "ctrl+/": () => (state.dialog.value = state.dialog.value ? null : { kind: "help" }), "shift+escape": () => document.getElementById("input")?.focus(),
    "alt+arrowleft": () => turn(-1), "alt+arrowright": () => turn(1),
  }[`${held ? "ctrl+" : ""}${event.altKey ? "alt+" : ""}${event.shiftKey ? "shift+" : ""}${event.key.toLowerCase()}`];
  if (act) {
    event.preventDefault();
    act();
  } else if (event.key === "Escape" && !state.dialog.value) {
    const running = [...state.running.value.values()].find((r) => r.conversation === state.conversation.value.id);
    if (running) stop(running);
    else if (matchMedia("(max-width: 860px)").matches) state.side.value = state.panel.value = false;
  }
}

const dragging = signal(false);
const dragged = (event) => {
  event.preventDefault();
  dragging.value = event.dataTransfer.types.includes("Files");
};
const dropped = (event) => {
  event.preventDefault();
  dragging.value = false;
  take([...event.dataTransfer.files]);
};

function App() {
  const empty = state.path.value.length === 0, figures = state.view.value === "metrics";
  useEffect(() => {
    document.title = figures ? `${t("figures")} · Quarrel` : empty ? "Quarrel" : `${state.conversation.value.title} · Quarrel`;
  });
  const small = matchMedia("(max-width: 860px)").matches;
  return <>
    <a class="skip" href="#input" onClick={(e) => { e.preventDefault(); document.getElementById("input")?.focus(); }}>{t("skip")}</a>
    <div class={`app ${state.side.value ? "with-side" : ""} ${state.panel.value ? "with-panel" : ""}`}>
      <Sidebar />
      {(state.side.value || state.panel.value) && <div class="scrim" onClick={() => { if (small || innerWidth <= 860) state.side.value = false; if (innerWidth <= 1100) state.panel.value = false; }} />}
      <div class="main">
        <TopBar />
        {figures ? <Metrics /> : (
          <main class={`talk ${empty ? "empty" : ""}`} onDragOver={dragged} onDragLeave={(e) => e.currentTarget.contains(e.relatedTarget) || (dragging.value = false)} onDrop={dropped}>
            {dragging.value && <p class="drop">{t("drop")}</p>}
            {empty ? <Greeting /> : <Thread />}
            <Composer />
            {empty && <Suggestions />}
          </main>
        )}
      </div>
      {state.panel.value && <Panel />}
    </div>
    <Dialogs />
    <Toast />
    <div class="hidden" role="status">{state.told.value}</div>
  </>;
}

applyTheme();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
document.addEventListener("keydown", keys);
addEventListener("popstate", () => {
  const wanted = location.hash.match(/^#\/c\/(\w+)$/)?.[1] ?? null;
  if (wanted !== state.opened.value) state.open(state.conversations.value.has(wanted) ? wanted : null);
});
await Promise.all([speak(state.settings.value.language), state.start()]);
db.onTrouble((error) => (state.toast.value = { text: t("not-kept", { why: error.message }) }));
if (db.keepsNothing()) state.toast.value = { text: t("keeps-nothing") };
render(<App />, document.getElementById("root"));
socket.connect();
if ("serviceWorker" in navigator) navigator.serviceWorker.register(scriptURL("/sw.js")).catch(() => {});
