// What the server tells of itself every few seconds: the newest minutes of it.
import { signal } from "@preact/signals";

const KEPT = 720;
// By model: { times, series: { name: values }, experts }.
export const figures = signal(new Map());
const before = new Map();

function rate(model, name, total, now) {
  const id = `${model}\n${name}`, last = before.get(id);
  before.set(id, { now, total });
  // A count that is smaller than before is that of a model that was loaded anew.
  return last && total >= last.total ? ((total - last.total) * 1000) / (now - last.now) : null;
}

export function take({ models = [] }) {
  const now = Date.now(), all = new Map(figures.value);
  for (const m of models) {
    if (m.running === undefined) continue;
    const row = {
      generated: rate(m.name, "generated", m.tokens_generated ?? 0, now), prompts: rate(m.name, "prompts", m.tokens_prompt ?? 0, now), "requests-running": m.running,
      "requests-waiting": m.waiting, "cache-used": m.kv_blocks ? (100 * (m.kv_blocks - m.kv_blocks_free)) / m.kv_blocks : 0,
    };
    const { times = [], series = {} } = all.get(m.name) ?? {};
    all.set(m.name, {
      times: [...times, now / 1000].slice(-KEPT),
      series: Object.fromEntries(Object.entries(row).map(([name, value]) => [name, [...(series[name] ?? []), value].slice(-KEPT)])),
      experts: m.experts ?? [],
    });
  }
  figures.value = all;
}
