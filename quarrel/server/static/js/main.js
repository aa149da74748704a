// Puts the page together: one conversation at a time, one socket, and the controls round them.
import { $, ask, download, element, fresh } from "./dom.js";
import { drawConversations, drawModels, drawSettings } from "./panels.js";
import * as plots from "./plots.js";
import { Socket } from "./socket.js";
import { RANGES, conversations, saveSettings, settings, sound, theme } from "./store.js";
import { Thread } from "./thread.js";

const PRESETS = [
  ["Summarize", "Summarize this text in a few sentences:\n\n"],
  ["Translate", "Translate this text into English:\n\n"],
  ["Code", "Write a short, well-named function that "],
  ["Explain", "Explain step by step and simply: "],
];

let current = conversations.make();
let models = [], running = null, loading = false, editing = null;
let key = sessionStorage.getItem("quarrelKey") ?? "";
const socket = new Socket(key);
const thread = new Thread({ edit, again });

function draw() {
  const figures = !$("metrics").hidden, title = figures ? "Metrics" : current.title;
  $("title").textContent = title;
  document.title = `${title} · Quarrel`;
  $("show-metrics").setAttribute("aria-pressed", figures);
  $("thread").hidden = $("composer").hidden = figures;
  thread.draw(current);
  drawList();
}

function leave() {
  $("side").classList.remove("open");
  $("metrics").hidden = true;
}

function drawList() {
  drawConversations(current, {
    open(c) {
      if (running || loading) return;
      current = c;
      editing = null;
      leave();
      draw();
    },
    rename(c, name) {
      if (!name?.trim()) return;
      c.title = name.trim().slice(0, 200);
      conversations.save();
      draw();
    },
    remove(c) {
      conversations.remove(c.id);
      if (c.id === current.id) current = conversations.make();
      draw();
    },
  });
}

async function api(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: key ? { Authorization: `Bearer ${key}` } : {} });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(body.error?.message ?? `the server answered ${answer.status}`);
  return body;
}

async function loadModels() {
  try {
    const found = await api("/api/models");
    models = found.models;
    if (!models.some((m) => m.name === settings.model)) settings.model = found.default ?? models[0]?.name ?? "";
    drawModels(models, settings.model, {
      choose: (m) => { settings.model = m.name; saveSettings(); loadModels(); },
      load: (m) => change(m, "POST"),
      unload: (m) => change(m, "DELETE"),
    });
  } catch (error) {
    $("models").replaceChildren(element("li", {}, element("small", { textContent: error.message })));
  }
}

async function change(model, method) {
  model.state = "loading";
  drawModels(models, settings.model, {});
  try {
    await api(`/api/models/${encodeURIComponent(model.name)}`, { method });
  } catch (error) {
    $("hint").textContent = error.message;
  }
  await loadModels();
}

function send(text) {
  if (running || loading || !text.trim()) return;
  if (editing !== null) {
    current.messages.length = editing;
    editing = null;
  }
  current.messages.push({ role: "user", text, stats: "" });
  if (current.messages.length === 1) current.title = text.trim().split("\n")[0].slice(0, 60);
  ask_model();
}

async function ask_model() {
  const last = current.messages.at(-1);
  const chosen = models.find((m) => m.name === settings.model);
  if (chosen && !chosen.loaded) { // whether it has a chat template is known once it is loaded
    loading = true;
    draw();
    state("loading");
    await change(chosen, "POST");
    loading = false;
  }
  const options = Object.fromEntries(RANGES.map((r) => [r.name, settings[r.name]]));
  const id = fresh();
  const payload = { ...options, prompt: last.text, model: settings.model || null, stream: true, request_id: id };
  if (settings.seed !== "") payload.seed = Number(settings.seed);
  if (models.find((m) => m.name === settings.model)?.chat) {
    payload.chat = true;
    if (settings.system.trim()) payload.system = settings.system;
    payload.messages = current.messages.slice(0, -1).filter((m) => m.role !== "error").map((m) => ({ role: m.role, content: m.text }));
  }
  current.changed = Date.now();
  conversations.save();
  draw();
  if (!socket.send("inference", payload)) {
    finish({ role: "error", text: "No connection to the server: reconnecting." });
    return;
  }
  running = { id, text: "", began: performance.now(), first: 0, tokens: 0 };
  thread.begin();
  busy(true);
}

function finish(message) {
  running = null;
  current.messages.push({ stats: "", ...message });
  current.changed = Date.now();
  if (!conversations.save()) $("hint").textContent = "This browser's storage is full: this conversation is not saved.";
  busy(false);
  draw();
}

function busy(on) {
  $("stop").hidden = !on;
  $("send").hidden = on;
  state(on ? "generating" : socket.open ? "connected" : "disconnected");
  if (!on) $("input").focus();
}

function state(name) {
  $("state").textContent = name;
  $("state").dataset.state = name;
}

function edit(index) {
  if (running || loading) return;
  editing = index;
  $("input").value = current.messages[index].text;
  fit();
  $("input").focus();
}

function again(index) {
  if (running || loading) return;
  const asked = current.messages.slice(0, index).findLastIndex((m) => m.role === "user");
  if (asked < 0) return;
  current.messages.length = asked + 1;
  ask_model();
}

function stop() {
  if (running) socket.send("stop", { request_id: running.id });
}

function fit() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

socket.addEventListener("state", ({ detail }) => {
  if (detail === "disconnected" && running) {
    const kept = running.text;
    if (kept) current.messages.push({ role: "assistant", text: kept, stats: "cut off" });
    finish({ role: "error", text: "The connection was lost before the answer was complete." });
  }
  state(detail);
  if (detail === "connected") loadModels();
});
socket.addEventListener("inference", ({ detail }) => {
  if (!running || detail.request_id !== running.id) return;
  running.text += detail.token ?? "";
  if (detail.token_id !== null && detail.token_id !== undefined) {
    running.first ||= performance.now();
    running.tokens += 1;
    const rate = detail.tokens_per_sec ?? 0;
    $("speed").textContent = `${rate.toFixed(1)} tokens/s`;
    plots.tookToken(rate);
  }
  if (!detail.complete) {
    thread.add(detail.token ?? "");
    return;
  }
  const stats = [`${running.tokens} tokens`];
  if (detail.tokens_per_sec) stats.push(`${detail.tokens_per_sec.toFixed(1)}/s`);
  if (running.first) stats.push(`first after ${((running.first - running.began) / 1000).toFixed(2)} s`);
  if (detail.finish_reason && detail.finish_reason !== "stop") stats.push(detail.finish_reason === "length" ? "at the limit" : detail.finish_reason);
  finish({ role: "assistant", text: running.text, stats: stats.join(" · ") });
});
socket.addEventListener("error", ({ detail }) => {
  if (running && (!detail.request_id || detail.request_id === running.id)) {
    if (running.text) current.messages.push({ role: "assistant", text: running.text, stats: "cut off" });
    finish({ role: "error", text: detail.message ?? "The server refused the request." });
  }
});
socket.addEventListener("metrics", ({ detail }) => {
  plots.take(detail);
  const changed = detail.models.some((now) => models.find((m) => m.name === now.name)?.state !== now.state);
  if (changed && !loading) loadModels();
});

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value;
  if (running || loading || !text.trim()) return;
  $("input").value = "";
  fit();
  send(text);
});
$("input").addEventListener("input", fit);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  $("side").classList.remove("open");
  stop();
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", () => {
  if (running || loading) return;
  current = conversations.make();
  editing = null;
  leave();
  draw();
  $("input").focus();
});
$("search").addEventListener("input", drawList);
$("open-side").addEventListener("click", () => $("side").classList.add("open"));
for (const id of ["close-side", "scrim"]) $(id).addEventListener("click", () => $("side").classList.remove("open"));
$("open-settings").addEventListener("click", () => ($("settings").hidden = !$("settings").hidden));
$("close-settings").addEventListener("click", () => ($("settings").hidden = true));
$("theme").addEventListener("click", () => {
  const order = ["system", "light", "dark"];
  theme.set(order[(order.indexOf(theme.get()) + 1) % 3]);
  $("theme").title = `Theme: ${theme.get()}`;
});
$("show-metrics").addEventListener("click", () => {
  $("metrics").hidden = !$("metrics").hidden;
  draw();
  if (!$("metrics").hidden) {
    plots.draw();
    $("scroll").scrollTop = 0;
  }
});
$("export-all").addEventListener("click", () => download("quarrel.json", JSON.stringify(conversations.all, null, 1), "application/json"));
$("import").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  try {
    const read = JSON.parse(await $("file").files[0].text());
    const found = (Array.isArray(read) ? read : [read]).map(sound).filter(Boolean);
    const known = new Set(conversations.all.map((c) => c.id));
    conversations.all.push(...found.map((c) => (known.has(c.id) ? { ...c, id: fresh() } : c)));
    conversations.save();
    drawList();
  } catch {
    await ask("That file contains no conversations.");
  }
  $("file").value = "";
});

for (const [name, text] of PRESETS) {
  $("presets").append(element("button", { type: "button", textContent: name, onclick: () => { $("input").value = text; fit(); $("input").focus(); } }));
}
drawSettings(key, {
  key(value) {
    key = value;
    sessionStorage.setItem("quarrelKey", value);
    socket.restart(value);
    loadModels();
  },
});
theme.apply();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme.apply());
draw();
socket.connect();
loadModels();
api("/version").then((v) => ($("version").textContent = `Quarrel ${v.version}`)).catch(() => {});
