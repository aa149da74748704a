// The figures: a few minutes of them, drawn on canvases, model by model.
import { $, element } from "./dom.js";

const KEPT = 120, LEAST = 24, WIDTH = 720, HEIGHT = 220, PAGE = "This page";
// By model and name: how it is called, its values, its unit.
const history = new Map(), experts = new Map(), before = new Map();
let queued = false;

function record(model, name, value, unit = "", top = 0) {
  const names = history.get(model) ?? history.set(model, new Map()).get(model);
  const kept = names.get(name) ?? names.set(name, { values: [], unit, top }).get(name);
  kept.values.push(value);
  if (kept.values.length > KEPT) kept.values.shift();
}

function rate(model, name, total) {
  const id = `${model}\n${name}`, now = performance.now(), last = before.get(id);
  before.set(id, { now, total });
  // A count that is smaller than before is that of a model that was loaded anew.
  record(model, name, last && total >= last.total ? ((total - last.total) * 1000) / (now - last.now) : 0, "/s");
}

export function take(payload) {
  for (const model of payload.models ?? []) {
    if (model.running === undefined) continue;
    rate(model.name, "Generated tokens", model.tokens_generated ?? 0);
    rate(model.name, "Prompt tokens", model.tokens_prompt ?? 0);
    record(model.name, "Requests running", model.running);
    record(model.name, "Requests waiting", model.waiting);
    record(model.name, "Cache in use", model.kv_blocks ? (100 * (model.kv_blocks - model.kv_blocks_free)) / model.kv_blocks : 0, " %", 100);
    if (model.experts?.length) experts.set(model.name, model.experts);
  }
  if (!$("metrics").hidden) draw();
}

export function tookToken(value) {
  record(PAGE, "Generation speed", value, "/s");
  if ($("metrics").hidden || queued) return;
  queued = true; // once a frame, however fast tokens come
  requestAnimationFrame(() => { queued = false; draw(); });
}

const short = (n) => (n >= 1e4 ? `${(n / 1e3).toFixed(0)}k` : Number.isInteger(n) || n >= 100 ? n.toFixed(0) : n.toFixed(1));

// The next of 1, 2, 5, 10, 20 ... so that an axis does not change with each value.
function round(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= value);
}

function canvas(label) {
  const style = getComputedStyle(document.documentElement);
  const made = element("canvas", { width: WIDTH, height: HEIGHT, role: "img" });
  made.setAttribute("aria-label", label);
  const pen = made.getContext("2d");
  pen.strokeStyle = style.getPropertyValue("--line");
  for (const y of [26, HEIGHT - 12]) {
    pen.beginPath();
    pen.moveTo(0, y);
    pen.lineTo(WIDTH, y);
    pen.stroke();
  }
  pen.strokeStyle = pen.fillStyle = style.getPropertyValue("--accent");
  pen.lineWidth = 3;
  return [made, pen, (share) => HEIGHT - 12 - share * (HEIGHT - 38)];
}

const plot = (title, now, most, made) => element("figure", {},
  element("figcaption", {}, title, element("b", { textContent: now })),
  element("div", { className: "plot" }, made, element("span", { className: "most", textContent: most })));

function line(model, name, { values, unit, top: least }) {
  const last = values.at(-1), top = round(Math.max(least, ...values)), places = Math.max(LEAST, values.length) - 1;
  const [made, pen, y] = canvas(`${model}: ${name.toLowerCase()}: now ${short(last)}${unit}, at most ${short(Math.max(...values))}${unit}`);
  // The newest value is at the right edge.
  const x = (i) => WIDTH - 6 - ((values.length - 1 - i) / places) * (WIDTH - 12);
  pen.beginPath();
  values.forEach((v, i) => pen.lineTo(x(i), y(v / top)));
  pen.stroke();
  pen.lineTo(x(values.length - 1), y(0));
  pen.lineTo(x(0), y(0));
  pen.globalAlpha = 0.14;
  pen.fill();
  pen.globalAlpha = 1;
  pen.beginPath();
  pen.arc(x(values.length - 1), y(last / top), 5, 0, 7);
  pen.fill();
  return plot(name, `${short(last)}${unit}`, `${short(top)}${unit}`, made);
}

// Each expert's share of all choices, over all layers, against an even share.
function bars(model, shares) {
  const top = Math.max(...shares), even = 1 / shares.length, step = WIDTH / shares.length;
  const [made, pen, y] = canvas(`${model}: the busiest of ${shares.length} experts takes ${(100 * top).toFixed(1)} % of the choices, an even share is ${(100 * even).toFixed(1)} %`);
  shares.forEach((share, i) => pen.fillRect(i * step, y(share / top), Math.max(1, step - Math.min(6, step / 4)), y(0) - y(share / top)));
  pen.globalAlpha = 0.5;
  pen.setLineDash([10, 10]);
  pen.beginPath();
  pen.moveTo(0, y(even / top));
  pen.lineTo(WIDTH, y(even / top));
  pen.stroke();
  return plot(`Load of ${shares.length} experts, the busiest against an even share`, `${(top / even).toFixed(1)} ×`, `${(100 * top).toFixed(0)} %`, made);
}

export function draw() {
  const host = $("metrics");
  if (!history.size) {
    host.replaceChildren(element("p", { className: "empty" }, element("strong", { textContent: "No metrics yet" }), "Metrics appear here within a few seconds."));
    return;
  }
  const shown = [];
  for (const [model, names] of history) {
    shown.push(element("h2", { textContent: model }), ...[...names].map(([name, kept]) => line(model, name, kept)));
    if (experts.has(model)) shown.push(bars(model, experts.get(model)));
  }
  host.replaceChildren(...shown);
}
