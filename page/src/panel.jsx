// Settings of one conversation: how the model behaves, how it draws tokens, and what its answers may be.
import { useState } from "preact/hooks";
import { Icon, IconButton } from "./controls.jsx";
import { t } from "./i18n.js";
import { MORE, OPTIONS } from "./request.js";
import * as state from "./state.js";

function Option({ option: o, options, set }) {
  const given = options[o.name], id = `set-${o.name}`, value = given ?? "";
  const take = (text) => {
    const n = Number(text);
    set(o.name, text === "" || !Number.isFinite(n) ? undefined : Math.min(o.max ?? n, Math.max(o.min ?? n, Number.isInteger(o.step ?? 1) ? Math.round(n) : n)));
  };
  return (
    <div class={`option ${given === undefined ? "" : "given"} ${o.words ? "wide" : ""}`}>
      <label for={id}>{t(o.name)}</label>
      {given !== undefined && <IconButton icon="close" size={14} label={`${t("reset")}: ${t(o.name)}`} onClick={() => set(o.name, undefined)} />}
      {o.choices
        ? <select id={id} value={given ?? o.usual} onChange={(e) => set(o.name, (o.words ? e.target.value : Number(e.target.value)) || undefined)}>{o.choices.map((c) => <option key={c} value={c}>{o.words ? t(o.words + c) : c || t("off")}</option>)}</select>
        : <input id={id} type="number" inputMode="decimal" min={o.min} max={o.max} step={o.step} value={value} placeholder={o.usual} onChange={(e) => { take(e.target.value); e.target.value = options[o.name] ?? ""; }} />}
      {!o.choices && !o.box && <input type="range" aria-label={t(o.name)} min={o.min} max={o.max} step={o.step} value={given ?? o.usual} onInput={(e) => take(e.target.value)} />}
    </div>
  );
}

// A text of JSON, which is kept once it is one.
function Json({ id, label, hint, value, keep }) {
  const [text, setText] = useState(value ?? ""), [wrong, setWrong] = useState("");
  const leave = () => {
    try {
      if (text.trim()) JSON.parse(text);
      setWrong("");
      keep(text.trim() || undefined);
    } catch (error) {
      setWrong(error.message);
    }
  };
  return <>
    <label for={id}>{label}</label>
    <textarea id={id} class="mono" rows={4} spellcheck={false} placeholder={hint} value={text} aria-invalid={Boolean(wrong)} aria-describedby={wrong ? `${id}-wrong` : undefined} onInput={(e) => setText(e.target.value)} onBlur={leave} />
    {wrong && <p class="wrong" id={`${id}-wrong`}>{t("bad-json", { why: wrong })}</p>}
  </>;
}

function Presets({ now, apply }) {
  const [name, setName] = useState("");
  const save = (event) => {
    event.preventDefault();
    if (!name.trim()) return;
    state.setPresets([...state.presets.value.filter((p) => p.name !== name.trim()), { name: name.trim(), ...now }]);
    setName("");
  };
  return <>
    <h3>{t("presets")}</h3>
    <ul class="chips">
      {state.presets.value.length === 0 && <li class="nothing">{t("preset-none")}</li>}
      {state.presets.value.map((p) => (
        <li key={p.name}><button type="button" aria-label={t("preset-apply", { name: p.name })} onClick={() => apply(p)}>{p.name}</button>
          <IconButton icon="close" size={14} label={t("remove", { name: p.name })} onClick={() => state.setPresets(state.presets.value.filter((x) => x !== p))} /></li>
      ))}
    </ul>
    <form class="inline" onSubmit={save}><input aria-label={t("preset-name")} placeholder={t("preset-name")} value={name} onInput={(e) => setName(e.target.value)} /><button type="submit">{t("save")}</button></form>
  </>;
}

// Those of a text, at most so many; none is nothing.
const lines = (text, most) => {
  const found = text.split("\n").filter(Boolean).slice(0, most);
  return found.length ? found : undefined;
};

export function Panel() {
  const c = state.conversation.value, options = c.options ?? {};
  const keep = (fields) => state.change(c.id, fields);
  const set = (name, value) => {
    const { [name]: _, ...rest } = state.conversation.value.options ?? {};
    keep({ options: value === undefined ? rest : { ...rest, [name]: value } });
  };
  const offer = (name, on) => keep({ without: [...(c.without ?? []).filter((n) => n !== name), ...(on ? [] : [name])] });
  const now = { system: c.system, options: c.options, schema: c.schema, tools: c.tools, without: c.without, overflow: c.overflow };
  const bare = state.model.value?.loaded && !state.model.value.chat;
  return (
    <aside class="panel" id="panel" aria-label={t("conversation-settings")} key={c.id}>
      <header><h2>{t("conversation-settings")}</h2><IconButton icon="close" label={t("close")} onClick={() => (state.panel.value = false)} /></header>
      {bare && <p class="note"><Icon name="book" size={16} />{t("no-template")}</p>}
      <label for="set-system">{t("system-prompt")}</label>
      <textarea id="set-system" rows={4} placeholder={t("system-placeholder")} value={c.system ?? ""} onInput={(e) => keep({ system: e.target.value })} />
      <Presets now={now} apply={({ name: _, ...fields }) => keep(fields)} />
      <h3>{t("sampling")}</h3>
      {OPTIONS.map((o) => <Option key={o.name} option={o} options={options} set={set} />)}
      <details><summary>{t("more-samplers")}</summary>
        {MORE.map((o) => <Option key={o.name} option={o} options={options} set={set} />)}
        <label for="set-dry_sequence_breakers">{t("dry_sequence_breakers")}</label>
        <textarea id="set-dry_sequence_breakers" rows={2} placeholder={t("breakers-hint")} value={(options.dry_sequence_breakers ?? []).map((s) => s.replaceAll("\n", "\\n")).join("\n")} onChange={(e) => set("dry_sequence_breakers", lines(e.target.value, 64)?.map((s) => s.replaceAll("\\n", "\n")))} />
        <label for="set-stop">{t("stop-words")}</label>
        <textarea id="set-stop" rows={2} placeholder={t("stop-words-hint")} value={(options.stop ?? []).join("\n")} onChange={(e) => set("stop", lines(e.target.value, 16))} />
      </details>
      <Json key={`schema-${c.id}-${c.schema}`} id="set-schema" label={t("schema")} hint='{"type": "object", …}' value={c.schema} keep={(schema) => keep({ schema })} />
      <Json key={`tools-${c.id}-${c.tools}`} id="set-tools" label={t("tools")} hint={t("tools-hint")} value={c.tools} keep={(tools) => keep({ tools })} />
      {state.tools.value.length > 0 && <fieldset class="server-tools"><legend>{t("server-tools")}</legend><p class="nothing">{t("server-tools-hint")}</p>
        {state.tools.value.map(({ function: f }) => <label class="check" key={f.name} title={f.description}><input type="checkbox" checked={!c.without?.includes(f.name)} onChange={(e) => offer(f.name, e.target.checked)} />{f.name}</label>)}
      </fieldset>}
      <label for="set-overflow">{t("overflow")}</label>
      <select id="set-overflow" value={c.overflow ?? "stop"} onChange={(e) => keep({ overflow: e.target.value })}>{["stop", "shift", "summary"].map((how) => <option key={how} value={how}>{t(`overflow-${how}`)}</option>)}</select>
      <footer>
        <button type="button" onClick={() => keep({ system: "", options: {}, schema: undefined, tools: undefined, without: undefined, overflow: undefined })}>{t("reset")}</button>
        <button type="button" onClick={() => { state.setDefaults(now); state.toast.value = { text: t("default-made") }; }}>{t("make-default")}</button>
      </footer>
    </aside>
  );
}
