// Where a person writes: files, the context that is left, and one round button to send or stop.
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { signal } from "@preact/signals";
import { attach, isImage } from "./attach.js";
import { Icon, IconButton, MenuItem, Popover } from "./controls.jsx";
import { read, write } from "./dom.js";
import { number, t } from "./i18n.js";
import { ask, stop } from "./running.js";
import * as state from "./state.js";
import { shorten } from "./shorten.js";

const drafts = read("quarrelDrafts", {}), files = signal([]);
const draftFiles = new Map(); // of conversations that are not shown
export const text = signal("");

function keep(id, value) {
  if (value) drafts[id] = value;
  else delete drafts[id];
  write("quarrelDrafts", drafts);
}

export async function send(words, attachments = []) {
  const now = [...state.running.value.values()].some((r) => r.conversation === state.conversation.value.id);
  if (now || (!words.trim() && !attachments.length)) return false;
  const message = await state.append({ parent: state.conversation.value.leaf, role: "user", text: words.trim(), ...(attachments.length ? { attachments } : {}) });
  ask(message.id);
  return true;
}

export async function take(list) {
  for (const file of list) {
    try {
      if (isImage(file) && !state.sees.value) throw new Error(t("no-eyes"));
      const made = await attach(file);
      files.value = [...files.value, made]; // as they are now: others may be read meanwhile
    } catch (error) {
      state.toast.value = { text: error.message };
    }
  }
}

const show = ({ name, image }) => (state.dialog.value = { kind: "image", name, image });

export const Files = ({ list, drop }) => (
  <ul class="files">
    {list.map((f, i) => (
      <li key={i} class={f.image ? "picture" : ""}>
        {f.image
          ? <button type="button" aria-label={t("show-image", { name: f.name })} onClick={() => show(f)}><img src={f.image} alt={f.name} /></button>
          : <><Icon name="file" size={16} /><span class="title">{f.name}</span><small>{t("characters", { n: number(f.text.length) })}</small></>}
        {drop && <IconButton icon="close" size={14} label={t("remove", { name: f.name })} onClick={() => drop(i)} />}
      </li>
    ))}
  </ul>
);

const OVERFLOWS = ["stop", "shift", "summary"];

function Context() {
  const last = state.path.value.findLast((m) => m.stats?.prompt), of = state.model.value?.n_ctx;
  if (!last || !of || !state.model.value.chat) return null; // without a chat template the oldest words are left out as it goes
  const used = Math.min(of, last.stats.prompt + last.stats.tokens), share = used / of;
  const { id, overflow: now = "stop" } = state.conversation.value;
  const label = t("context", { used: number(used), of: number(of) });
  return (
    <Popover label={label} align="end" button={(p) => (
      <button type="button" class={`icon meter ${share > 0.8 ? "full" : ""}`} aria-label={label} data-tip={label} {...p}>
        <svg width="20" height="20" viewBox="0 0 20 20" aria-hidden="true"><circle cx="10" cy="10" r="7.5" /><circle class="now" cx="10" cy="10" r="7.5" pathLength="100" stroke-dasharray={`${100 * share} 100`} /></svg>
      </button>)}>
      {(close) => <>
        <p class="note">{t("context-full", { used: number(used), of: number(of) })}</p>
        <MenuItem close={close} icon="cut" onClick={() => shorten("drop")}>{t("drop-oldest")}</MenuItem>
        <MenuItem close={close} icon="text" onClick={() => shorten("summary")}>{t("summarise")}</MenuItem>
        <p class="note" id="when-full">{t("overflow")}</p>
        {OVERFLOWS.map((how) => <MenuItem key={how} close={close} icon={how === now ? "check" : "blank"} checked={how === now} onClick={() => state.change(id, { overflow: how })}>{t(`overflow-${how}`)}</MenuItem>)}
      </>}
    </Popover>
  );
}

export function Composer() {
  const at = useRef(null), chosen = useRef(null), camera = useRef(null), id = state.conversation.value.id, draftId = state.opened.value ?? "new";
  const running = [...state.running.value.values()].find((r) => r.conversation === id);
  useEffect(() => {
    text.value = drafts[draftId] ?? "";
    files.value = draftFiles.get(draftId) ?? [];
    if (matchMedia("(hover: hover)").matches) at.current?.focus();
    return () => draftFiles.set(draftId, files.peek());
  }, [draftId]);
  useLayoutEffect(() => {
    at.current.style.height = "auto";
    at.current.style.height = `${at.current.scrollHeight}px`;
  }, [text.value]);
  const submit = async () => {
    const words = text.value, list = files.value;
    if (running || (!words.trim() && !list.length)) return;
    text.value = "";
    files.value = [];
    keep(draftId, "");
    await send(words, list);
  };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    } else if (event.key === "ArrowUp" && !text.value) {
      const mine = state.path.value.findLast((m) => m.role === "user");
      if (mine && !running) {
        event.preventDefault();
        state.editing.value = mine.id;
      }
    }
  };
  const paste = (event) => {
    const { files: pasted, types } = event.clipboardData;
    // Words from an office program come with a picture of themselves.
    if (pasted.length && !(types.includes("text/html") && types.includes("text/plain"))) {
      event.preventDefault();
      take([...pasted]);
    }
  };
  const took = (event) => {
    take([...event.target.files]);
    event.target.value = "";
  };
  const story = state.model.value && state.model.value.loaded && !state.model.value.chat;
  return (
    <form class="composer" id="composer" aria-label={t("message")} onSubmit={(event) => { event.preventDefault(); submit(); }}>
      <div class="box" onClick={(event) => event.target === event.currentTarget && at.current.focus()}>
        {files.value.length > 0 && <Files list={files.value} drop={(i) => (files.value = files.value.filter((_, n) => n !== i))} />}
        <textarea id="input" ref={at} rows={1} aria-label={t("message")} enterkeyhint="send" placeholder={t(story ? "write-story" : "write-here")} autocomplete="off" value={text.value} onKeyDown={keys} onPaste={paste}
          onInput={(event) => { text.value = event.target.value; keep(draftId, text.value); }} />
        <div class="under">
          <IconButton icon="attach" label={t("attach")} onClick={() => chosen.current.click()} />
          <input ref={chosen} id="files" type="file" multiple hidden aria-label={t("attach")} onChange={took} />
          {state.sees.value && <>
            <IconButton icon="camera" class="camera" label={t("camera")} onClick={() => camera.current.click()} />
            <input ref={camera} id="camera" type="file" accept="image/*" capture="environment" hidden aria-label={t("camera")} onChange={took} />
          </>}
          <span class="hint">{t("hint")}</span>
          <Context />
          {running
            ? <IconButton class="round" icon="stop" size={14} label={t("stop")} id="stop" onClick={() => stop(running)} />
            : <IconButton class="round" icon="up" size={20} label={t("send")} id="send" type="submit" disabled={!text.value.trim() && !files.value.length} />}
        </div>
      </div>
    </form>
  );
}
