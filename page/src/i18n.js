// Words of the page in six languages. English is there at once, and stands in for what another one lacks.
import { signal } from "@preact/signals";
import en from "./lang/en.js";

export const LANGUAGES = { en: "English", de: "Deutsch", es: "Español", fr: "Français", ja: "日本語", zh: "中文" };
const LOAD = {
  de: () => import("./lang/de.js"), es: () => import("./lang/es.js"), fr: () => import("./lang/fr.js"), ja: () => import("./lang/ja.js"), zh: () => import("./lang/zh.js"),
};
const words = signal(en);
export const language = signal("en");

export async function speak(wanted) {
  const asked = wanted ? [wanted] : navigator.languages, chosen = asked.map((l) => l.slice(0, 2)).find((l) => l in LANGUAGES) ?? "en";
  const found = chosen === "en" ? en : await LOAD[chosen]().then((m) => m.default).catch(() => en);
  words.value = { ...en, ...found };
  language.value = chosen;
  document.documentElement.lang = chosen;
}

// The words for a key; {name} in them is replaced.
export function t(key, values = {}) {
  return (words.value[key] ?? key).replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}
export const number = (n, options) => new Intl.NumberFormat(language.value, options).format(n);
