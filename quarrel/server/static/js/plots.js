// The metrics page: a few minutes of figures, drawn on canvases.
import { $, element } from "./dom.js";

const KEPT = 120;
const history = new Map();

function record(name, value) {
  const values = history.get(name) ?? history.set(name, []).get(name);
  values.push(value);
  if (values.length > KEPT) values.shift();
}

export function take(payload) {
  for (const model of payload.models ?? []) {
    if (model.running === undefined) continue;
    record(`${model.name}: running`, model.running);
    record(`${model.name}: waiting`, model.waiting);
    record(`${model.name}: cache in use (%)`, model.kv_blocks ? (100 * (model.kv_blocks - model.kv_blocks_free)) / model.kv_blocks : 0);
  }
  if (!$("metrics").hidden) draw();
}

export function tookToken(rate) {
  record("tokens per second", rate);
  if (!$("metrics").hidden) draw();
}

export function draw() {
  const host = $("metrics");
  if (!history.size) {
    host.replaceChildren(element("p", { className: "empty", textContent: "Figures appear here within a few seconds." }));
    return;
  }
  const style = getComputedStyle(document.documentElement);
  const shown = [...history].map(([name, values]) => {
    const canvas = element("canvas", { width: 800, height: 130, role: "img" });
    const last = values.at(-1), top = Math.max(1e-9, ...values);
    canvas.setAttribute("aria-label", `${name}: now ${last.toFixed(1)}, at most ${top.toFixed(1)}`);
    const pen = canvas.getContext("2d");
    pen.strokeStyle = style.getPropertyValue("--accent");
    pen.lineWidth = 2;
    pen.beginPath();
    values.forEach((v, i) => pen.lineTo((i / (KEPT - 1)) * 800, 122 - (v / top) * 112));
    pen.stroke();
    return [element("h2", { textContent: `${name}: ${last.toFixed(1)} (top ${top.toFixed(1)})` }), canvas];
  });
  host.replaceChildren(...shown.flat());
}
