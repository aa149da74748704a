// What is asked for in the middle of the page.
import { useState } from "preact/hooks";
import { Dialog } from "./controls.jsx";
import { LANGUAGES, speak, t } from "./i18n.js";
import { api, loadModels } from "./models.js";
import { socket } from "./running.js";
import * as state from "./state.js";

const close = () => (state.dialog.value = null);

function Key() {
  const [value, setValue] = useState(state.secret.value), [remember, setRemember] = useState(false), [wrong, setWrong] = useState(false);
  const use = async (event) => {
    event.preventDefault();
    state.setSecret(value.trim(), remember);
    try {
      await api("/api/models");
      close();
      socket.restart(value.trim());
      loadModels();
    } catch {
      setWrong(true);
    }
  };
  return (
    <Dialog title={t("key-title")} onClose={close}>
      <form onSubmit={use}>
        {state.server.value.refused && <p>{t("key-text")}</p>}
        <label for="set-key">{t("key")}</label>
        <input id="set-key" type="password" autocomplete="off" value={value} aria-invalid={wrong} onInput={(e) => setValue(e.target.value)} />
        {wrong && <p class="wrong" role="alert">{t("key-wrong")}</p>}
        <label class="check"><input type="checkbox" checked={remember} onChange={(e) => setRemember(e.target.checked)} />{t("key-remember")}</label>
        <footer><button type="submit" class="primary">{t("key-use")}</button></footer>
      </form>
    </Dialog>
  );
}

function Look() {
  const { theme, language } = state.settings.value;
  return (
    <Dialog title={`${t("theme")} · ${t("language")}`} onClose={close}>
      <fieldset><legend>{t("theme")}</legend><div class="segments">
        {["system", "light", "dark"].map((name) => <label key={name}><input type="radio" name="theme" value={name} checked={theme === name} onChange={() => { state.set({ theme: name }); applyTheme(); }} /><span>{t(name)}</span></label>)}
      </div></fieldset>
      <label for="set-language">{t("language")}</label>
      <select id="set-language" value={language} onChange={(e) => { state.set({ language: e.target.value }); speak(e.target.value); }}>
        <option value="">{t("same-as-browser")}</option>
        {Object.entries(LANGUAGES).map(([code, name]) => <option key={code} value={code} lang={code}>{name}</option>)}
      </select>
    </Dialog>
  );
}

export const KEYS = [
  ["keys-send", "Enter"], ["keys-line", "Shift Enter"], ["keys-stop", "Esc"], ["keys-edit", "↑"], ["keys-new", "Ctrl Shift O"], ["keys-search", "Ctrl K"], ["keys-side", "Ctrl Shift S"],
  ["keys-settings", "Ctrl ."], ["keys-branch", "Alt ← →"], ["keys-focus", "Shift Esc"], ["rename", "F2"], ["keys-help", "Ctrl /"],
];

const Help = () => (
  <Dialog title={t("help")} onClose={close}>
    <dl class="keys">{KEYS.map(([what, keys]) => <div key={what}><dt>{t(what)}</dt><dd>{keys.split(" ").map((k) => <kbd key={k}>{k}</kbd>)}</dd></div>)}</dl>
  </Dialog>
);

const Image = ({ name, image }) => <Dialog title={name} class="large" onClose={close}><img src={image} alt={name} /></Dialog>;

export function Dialogs() {
  const kind = state.dialog.value?.kind;
  if (kind === "image") return <Image {...state.dialog.value} />;
  return kind === "key" ? <Key /> : kind === "look" ? <Look /> : kind === "help" ? <Help /> : null;
}

export function applyTheme() {
  const { theme } = state.settings.value, dark = theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.querySelector("meta[name=theme-color]").content = dark ? "#191816" : "#faf9f6";
}
