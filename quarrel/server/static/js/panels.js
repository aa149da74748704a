// The sidebar's lists and the settings.
import { $, ask, download, element } from "./dom.js";
import { RANGES, conversations, markdownOf, resetSettings, saveSettings, settings } from "./store.js";

export function drawConversations(current, callbacks) {
  const found = conversations.search($("search").value);
  const rows = found.map((c) => {
    const tool = (label, text, act) => element("button", { type: "button", title: label, "aria-label": `${label}: ${c.title}`, textContent: text, onclick: act });
    return element("li", { className: c.id === current.id ? "on" : "" },
      element("button", { type: "button", textContent: c.title, onclick: () => callbacks.open(c) }),
      element("span", { className: "tools" },
        tool("Rename", "✎", async () => callbacks.rename(c, await ask("New name", c.title))),
        tool("Save as Markdown", "⤓", () => download(`${c.title}.md`, markdownOf(c), "text/markdown")),
        tool("Delete", "✕", async () => (await ask(`Delete “${c.title}”?`)) !== null && callbacks.remove(c))));
  });
  if (!rows.length) rows.push(element("li", {}, element("small", { textContent: $("search").value ? "Nothing found." : "Nothing here yet." })));
  $("conversations").replaceChildren(...rows);
}

const count = (n) => (n >= 1e9 ? `${(n / 1e9).toPrecision(2)} B` : `${(n / 1e6).toPrecision(2)} M`);
const size = (bytes) => (bytes > 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${(bytes / 1e6).toFixed(0)} MB`);

export function drawModels(models, chosen, callbacks) {
  const rows = models.map((m) => {
    const facts = m.loaded
      ? [m.architecture, m.quantization, m.parameters && count(m.parameters), size(m.memory_usage), `${m.context_length} tokens`, m.backend]
      : [m.error ?? m.state];
    const act = m.loaded ? ["Unload", "⏏", () => callbacks.unload(m)] : ["Load", "▶", () => callbacks.load(m)];
    return element("li", { className: m.name === chosen ? "on" : "" },
      element("button", { type: "button", "aria-pressed": m.name === chosen, onclick: () => callbacks.choose(m) },
        element("span", { className: `dot ${m.state}` }), m.name, element("small", { textContent: facts.filter(Boolean).join(" · ") })),
      element("span", { className: "tools" }, element("button", { type: "button", title: act[0], "aria-label": `${act[0]}: ${m.name}`, textContent: act[1], onclick: act[2] })));
  });
  $("models").replaceChildren(...rows);
}

export function drawSettings(key, callbacks) {
  const fields = RANGES.map((r) => {
    const shown = element("output", { textContent: settings[r.name] });
    const input = element("input", { type: "range", id: `set-${r.name}`, min: r.min, max: r.max, step: r.step });
    input.value = settings[r.name];
    input.addEventListener("input", () => {
      settings[r.name] = Number(input.value);
      shown.textContent = input.value;
      saveSettings();
    });
    return [element("label", { htmlFor: input.id }, r.label, shown), input];
  });
  const seed = element("input", { id: "set-seed", inputMode: "numeric", placeholder: "a new one each time", value: settings.seed });
  seed.addEventListener("change", () => {
    seed.value = settings.seed = seed.value.replace(/\D/g, "").slice(0, 15);
    saveSettings();
  });
  const system = element("textarea", { id: "set-system", rows: 5, value: settings.system });
  system.addEventListener("change", () => {
    settings.system = system.value;
    saveSettings();
  });
  const secret = element("input", { id: "set-key", type: "password", autocomplete: "off", placeholder: "only if the server asks for one", value: key });
  secret.addEventListener("change", () => callbacks.key(secret.value.trim()));
  const reset = element("button", { type: "button", className: "quiet", textContent: "Reset", onclick: () => { resetSettings(); drawSettings(key, callbacks); } });
  $("settings-form").replaceChildren(...fields.flat(), element("label", { htmlFor: "set-seed" }, "Seed"), seed,
    element("label", { htmlFor: "set-system" }, "System prompt"), system,
    element("label", { htmlFor: "set-key" }, "API key (kept until this tab closes)"), secret, element("p"), reset);
}
