// Small helpers that know nothing of the page.

// A new name. What browsers have for it is there on https and localhost only.
export const fresh = () => [...crypto.getRandomValues(new Uint8Array(16))].map((n) => n.toString(16).padStart(2, "0")).join("");

export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea"); // for pages that came neither by https nor from this machine
  area.value = text;
  area.className = "hidden";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("refused");
}

// Calls `act` once the page has time, after a second at most. Returns what calls it off.
export function whenIdle(act) {
  if (!window.requestIdleCallback) { // Safari
    const id = setTimeout(act);
    return () => clearTimeout(id);
  }
  const id = requestIdleCallback(act, { timeout: 1000 });
  return () => cancelIdleCallback(id);
}

export function read(key, fallback) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    // full, or forbidden: the page goes on without a memory of it
  }
}

// Scripts may come from two addresses only, whatever else asks for one.
const OURS = new Set(["/sw.js", "/static/pdf.worker.js"]);
const check = (url) => {
  if (!OURS.has(url)) throw new TypeError(`${url} is no script of this page`);
  return url;
};
const policy = globalThis.trustedTypes?.createPolicy("quarrel", { createScriptURL: check });
export const scriptURL = (url) => policy?.createScriptURL(url) ?? check(url);
