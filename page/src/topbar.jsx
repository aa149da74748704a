// The model, the state of things, and the settings of this conversation.
import { useState } from "preact/hooks";
import { Icon, IconButton, Popover } from "./controls.jsx";
import { number, t } from "./i18n.js";
import { api, loadModels, modelRequest } from "./models.js";
import * as state from "./state.js";

const count = (n) => (n >= 1e9 ? `${(n / 1e9).toPrecision(2)} B` : `${(n / 1e6).toPrecision(2)} M`);
const size = (bytes) => (bytes > 1e9 ? `${number(bytes / 1e9, { maximumFractionDigits: 1 })} GB` : `${number(Math.round(bytes / 1e6))} MB`);

const choose = (m) => {
  state.set({ model: m.name });
  state.change(state.conversation.value.id, { model: m.name });
};
const act = (m, method) => modelRequest(m.name, method).catch((error) => (state.toast.value = { text: error.message }));

function Model({ m, close }) {
  const facts = m.loaded ? [m.architecture, m.parameters && count(m.parameters), m.quantization, size(m.memory_usage), m.device ?? m.backend, m.vision && t("sees")] : [m.error ?? t(m.state)];
  return (
    <li class={m.name === state.model.value?.name ? "on" : ""}>
      <button type="button" class="choose" aria-pressed={m.name === state.model.value?.name} onClick={() => { choose(m); close(); }}>
        <span class={`dot ${m.state}`} /><span class="title">{m.name}</span><small>{facts.filter(Boolean).join(" · ")}</small>
      </button>
      <IconButton icon={m.loaded ? "eject" : "play"} size={16} label={`${t(m.loaded ? "unload" : "load")}: ${m.name}`} onClick={() => act(m, m.loaded ? "DELETE" : "POST")} />
    </li>
  );
}

// Downloads go on when the menu closes; the server says how far they are, a line of JSON at a time.
async function pull(name) {
  const model = name.trim();
  state.pulling.value = { name: model, done: 0 };
  try {
    const answer = await api("/api/pull", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ model, stream: true }) });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines.filter(Boolean)) {
        const row = JSON.parse(line);
        if (row.error) throw new Error(row.error);
        if (row.total) state.pulling.value = { name: model, done: (row.completed ?? 0) / row.total };
      }
    }
    await loadModels();
    state.toast.value = { text: t("pulled", { name: model }) };
  } catch (error) {
    state.toast.value = { text: error.message };
  }
  state.pulling.value = null;
}

function Pull() {
  const [name, setName] = useState(""), now = state.pulling.value;
  if (now) return <label class="pull">{t("pulling", { name: now.name })}<progress value={now.done || undefined} /></label>;
  return (
    <form class="pull" onSubmit={(event) => { event.preventDefault(); if (name.trim()) pull(name); }}>
      <label>{t("pull")}<input value={name} placeholder="hf://owner/repository:Q4_K_M" onInput={(e) => setName(e.target.value)} /></label>
      <IconButton icon="download" label={t("download")} type="submit" />
    </form>
  );
}

function Models() {
  const now = state.model.value, { models, routes } = state.server.value;
  return (
    <Popover class="models" role="dialog" label={t("models")} button={(p) => (
      <button type="button" class="model" {...p}><span class={`dot ${now?.state ?? ""}`} /><span class="title">{now?.name ?? t("no-models")}</span><Icon name="chevron-down" size={16} /></button>)}>
      {(close) => <>
        <ul class="model-list" aria-label={t("models")}>{models.map((m) => <Model key={m.name} m={m} close={close} />)}</ul>
        {routes.has("/api/pull") && <Pull />}
      </>}
    </Popover>
  );
}

export function TopBar() {
  const connection = state.connection.value;
  return (
    <header class="bar">
      {!state.side.value && <IconButton icon="side" label={t("open-side")} aria-controls="side" onClick={() => (state.side.value = true)} />}
      {!state.side.value && <IconButton icon="write" label={t("new")} onClick={() => state.open(null)} />}
      <Models />
      <h1 class="hidden">{state.view.value === "metrics" ? t("figures") : state.conversation.value.title || t("untitled")}</h1>
      <span class="state" role="status" data-state={connection}>{connection === "connected" ? <span class="hidden">{t(connection)}</span> : t(connection)}</span>
      <IconButton icon="tune" class="tune" label={t("conversation-settings")} aria-controls="panel" aria-expanded={state.panel.value} onClick={() => (state.panel.value = !state.panel.value)} />
    </header>
  );
}
