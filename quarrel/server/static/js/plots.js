// The metrics page: a few minutes of figures, drawn on canvases.
import { $, element } from "./dom.js";

const KEPT = 120, LEAST = 24, WIDTH = 800, HEIGHT = 130;
const history = new Map(), experts = new Map(), before = new Map();

function record(name, value) {
  const values = history.get(name) ?? history.set(name, []).get(name);
  values.push(value);
  if (values.length > KEPT) values.shift();
}

function rate(name, total) {
  const now = performance.now(), last = before.get(name);
  before.set(name, { now, total });
  // A count that is smaller than before is that of a model that was loaded anew.
  if (last && total >= last.total) record(name, ((total - last.total) * 1000) / (now - last.now));
}

export function take(payload) {
  for (const model of payload.models ?? []) {
    if (model.running === undefined) continue;
    rate(`${model.name}: tokens written a second`, model.tokens_generated);
    rate(`${model.name}: prompt tokens read a second`, model.tokens_prompt);
    record(`${model.name}: requests running`, model.running);
    record(`${model.name}: requests waiting`, model.waiting);
    record(`${model.name}: cache in use (%)`, model.kv_blocks ? (100 * (model.kv_blocks - model.kv_blocks_free)) / model.kv_blocks : 0);
    if (model.experts?.length) experts.set(model.name, model.experts);
  }
  if (!$("metrics").hidden) draw();
}

export function tookToken(value) {
  record("this page: tokens a second", value);
  if (!$("metrics").hidden) draw();
}

const short = (n) => (Number.isInteger(n) || n >= 100 ? n.toFixed(0) : n.toFixed(1));

function canvas(label) {
  const style = getComputedStyle(document.documentElement);
  const made = element("canvas", { width: WIDTH, height: HEIGHT, role: "img" });
  made.setAttribute("aria-label", label);
  const pen = made.getContext("2d");
  pen.strokeStyle = pen.fillStyle = style.getPropertyValue("--accent");
  pen.lineWidth = 2;
  return [made, pen];
}

const plot = (title, made) => element("figure", {}, element("h2", { textContent: title }), made);

function line(name, values) {
  const last = values.at(-1), top = Math.max(1e-9, ...values), places = Math.max(LEAST, values.length) - 1;
  const [made, pen] = canvas(`${name}: now ${short(last)}, at most ${short(Math.max(...values))}`);
  pen.beginPath();
  // The newest value is at the right edge.
  values.forEach((v, i) => pen.lineTo(WIDTH - 4 - ((values.length - 1 - i) / places) * (WIDTH - 8), 122 - (v / top) * 112));
  pen.stroke();
  if (values.length === 1) pen.fillRect(WIDTH - 8, 120 - (last / top) * 112, 4, 4);
  return plot(`${name}: ${short(last)} (top ${short(Math.max(...values))})`, made);
}

// Each expert's share of all choices, over all layers, against an even share.
function bars(name, shares) {
  const top = Math.max(...shares), even = 1 / shares.length, step = (WIDTH - 8) / shares.length;
  const [made, pen] = canvas(`${name}: the busiest of ${shares.length} experts takes ${(100 * top).toFixed(1)} % of the choices, an even share is ${(100 * even).toFixed(1)} %`);
  shares.forEach((share, i) => pen.fillRect(4 + i * step, 126 - (share / top) * 116, Math.max(1, step - 1), (share / top) * 116));
  pen.globalAlpha = 0.5;
  pen.setLineDash([6, 6]);
  pen.beginPath();
  pen.moveTo(0, 126 - (even / top) * 116);
  pen.lineTo(WIDTH, 126 - (even / top) * 116);
  pen.stroke();
  return plot(`${name}: load of ${shares.length} experts, the busiest ${(top / even).toFixed(1)} times an even share`, made);
}

export function draw() {
  const host = $("metrics");
  if (!history.size) {
    host.replaceChildren(element("p", { className: "empty", textContent: "Figures appear here within a few seconds." }));
    return;
  }
  const shown = [...[...history].map(([name, values]) => line(name, values)), ...[...experts].map(([name, shares]) => bars(name, shares))];
  host.replaceChildren(...shown);
}
