// The conversations, by day, and the way to everything that is not one.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { useSignal } from "@preact/signals";
import * as db from "./db.js";
import { IconButton, Icon, MenuItem, Popover } from "./controls.jsx";
import { download } from "./dom.js";
import { language, t } from "./i18n.js";
import { importFile, markdownOf, wholeExport } from "./files.js";
import * as state from "./state.js";
import { dayOf, pathTo } from "./tree.js";

const monthName = (day) => (/^\d/.test(day) ? new Intl.DateTimeFormat(language.value, { month: "long", year: "numeric" }).format(new Date(`${day}-02`)) : t(day));

async function search(text) {
  const wanted = text.trim().toLowerCase();
  state.searched.value = { text, found: wanted ? state.searched.value.found : null }; // what was found stays until more is known
  if (!wanted) return;
  const found = new Map();
  for (const c of state.conversations.value.values()) if (c.title.toLowerCase().includes(wanted)) found.set(c.id, "");
  for (const m of await db.all("messages")) {
    const at = m.text.toLowerCase().indexOf(wanted);
    if (at >= 0 && !found.get(m.conversation)) found.set(m.conversation, m.text.slice(Math.max(0, at - 24), at + 60).replace(/\s+/g, " "));
  }
  if (state.searched.value.text === text) state.searched.value = { text, found };
}

async function saveMarkdown(c) {
  const found = new Map((await db.all("messages", c.id)).map((m) => [m.id, m]));
  download(`${c.title || t("untitled")}.md`, markdownOf(c, pathTo(found, c.leaf)), "text/markdown");
}

async function remove(c) {
  await state.remove(c.id);
  state.toast.value = { text: t("deleted", { title: c.title || t("untitled") }), action: t("undo"), act: () => state.restore(c.id) };
}

function Name({ c, done }) {
  const at = useRef(null), ended = useRef(false);
  useLayoutEffect(() => {
    at.current.focus(); // not every browser does it with the next line
    at.current.select();
  }, []);
  const end = (title) => {
    if (ended.current) return;
    ended.current = true;
    if (title?.trim() && title !== c.title) state.change(c.id, { title: title.trim().slice(0, 200) });
    done();
  };
  const keys = (event) => {
    event.stopPropagation();
    if (event.key === "Enter" && !event.isComposing) end(at.current.value);
    if (event.key === "Escape") end(null);
  };
  return <input ref={at} class="rename" aria-label={t("new-name")} defaultValue={c.title} onKeyDown={keys} onBlur={() => end(at.current?.value)} />;
}

function Row({ c, found }) {
  const naming = useSignal(false), on = c.id === state.opened.value, title = c.title || t("untitled");
  const busy = [...state.running.value.values()].some((r) => r.conversation === c.id);
  if (naming.value) return <li class="on"><Name c={c} done={() => (naming.value = false)} /></li>;
  return (
    <li class={on ? "on" : ""}>
      <a href={`#/c/${c.id}`} aria-current={on ? "page" : undefined} onDblClick={() => (naming.value = true)} onKeyDown={(e) => e.key === "F2" && (naming.value = true)}
        onClick={(event) => { event.preventDefault(); state.open(c.id); }}>
        <span class="title">{title}</span>{found && <small>{found}</small>}
        {busy && <span class="busy" role="img" aria-label={t("writing")} />}
      </a>
      <Popover align="end" label={title} button={(p) => <IconButton {...p} icon="more" size={16} label={t("more")} aria-label={`${t("more")}: ${title}`} />}>
        {(close) => <>
          <MenuItem close={close} icon="edit" onClick={() => (naming.value = true)}>{t("rename")}</MenuItem>
          <MenuItem close={close} icon="download" onClick={() => saveMarkdown(c)}>{t("export")}</MenuItem>
          <MenuItem close={close} icon="trash" danger onClick={() => remove(c)}>{t("delete")}</MenuItem>
        </>}
      </Popover>
    </li>
  );
}

function Conversations() {
  const { found } = state.searched.value;
  const kept = [...state.conversations.value.values()].filter((c) => !c.deleted && (!found || found.has(c.id))).sort((a, b) => b.changed - a.changed);
  if (!kept.length) return <p class="nothing">{found ? t("nothing-found") : t("nothing-yet")}</p>;
  const days = Map.groupBy ? Map.groupBy(kept, (c) => dayOf(c.changed)) : kept.reduce((m, c) => m.set(dayOf(c.changed), [...(m.get(dayOf(c.changed)) ?? []), c]), new Map());
  return [...days].map(([day, list]) => (
    <section key={day}>
      <h2>{monthName(day)}</h2>
      <ul>{list.map((c) => <Row key={c.id} c={c} found={found?.get(c.id)} />)}</ul>
    </section>
  ));
}

async function bring(event) {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const n = await importFile(await file.text());
    state.toast.value = { text: t("imported", { n }) };
  } catch {
    state.toast.value = { text: t("import-bad") };
  }
}

export function Sidebar() {
  const [text, setText] = useState(""), chosen = useRef(null);
  const look = (value) => {
    setText(value);
    search(value);
  };
  return (
    <nav class="side" id="side" aria-label={t("conversations")} inert={!state.side.value}>
      <header>
        <span class="brand"><img src="/static/icon.svg" alt="" width="24" height="24" />Quarrel</span>
        <IconButton icon="side" label={t("close-side")} onClick={() => (state.side.value = false)} />
      </header>
      <button type="button" class="new" onClick={() => state.open(null).then(() => document.getElementById("input")?.focus())}><Icon name="write" />{t("new")}</button>
      <label class="find"><Icon name="search" size={16} /><input id="search" type="search" placeholder={t("search")} aria-label={t("search")} value={text} onInput={(e) => look(e.target.value)}
        onKeyDown={(e) => e.key === "Escape" && (e.stopPropagation(), look(""))} /></label>
      <div class="list"><Conversations /></div>
      <footer>
        <Popover label={t("settings")} button={(p) => <button type="button" class="row" {...p}><Icon name="tune" />{t("settings")}</button>}>
          {(close) => <>
            <MenuItem close={close} icon="theme" onClick={() => (state.dialog.value = { kind: "look" })}>{t("theme")} · {t("language")}</MenuItem>
            <MenuItem close={close} icon="key" onClick={() => (state.dialog.value = { kind: "key" })}>{t("key")}</MenuItem>
            <MenuItem close={close} icon="upload" onClick={() => chosen.current.click()}>{t("import")}</MenuItem>
            <MenuItem close={close} icon="download" onClick={async () => download("quarrel.json", await wholeExport(), "application/json")}>{t("export-all")}</MenuItem>
            <MenuItem close={close} icon="keyboard" onClick={() => (state.dialog.value = { kind: "help" })}>{t("help")}</MenuItem>
            <MenuItem close={close} icon="code" onClick={() => open("/static/api.html")}>{t("api")}</MenuItem>
          </>}
        </Popover>
        <IconButton icon="chart" label={t("figures")} aria-pressed={state.view.value === "metrics"} onClick={() => {
          state.view.value = state.view.value === "metrics" ? "chat" : "metrics";
          if (matchMedia("(max-width: 860px)").matches) state.side.value = false;
        }} />
        <input ref={chosen} id="import-file" type="file" accept="application/json" hidden onChange={bring} />
      </footer>
    </nav>
  );
}
