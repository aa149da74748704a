// The figures as plots, model by model. The library for them comes with the first.
import { useEffect, useRef, useState } from "preact/hooks";
import { figures } from "./figures.js";
import { language, number, t } from "./i18n.js";
import { settings } from "./state.js";

let loading = null;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axes(bars) {
  const one = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px Inter, sans-serif" };
  const clock = new Intl.DateTimeFormat(language.value, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  return [{ ...one, grid: { show: false }, space: 90, size: 28, values: (_, list) => list.map((v) => (bars ? v + 1 : clock.format(v * 1000))), incrs: bars ? [1, 2, 4, 8, 16, 32] : [5, 10, 30, 60, 300, 600, 1800, 3600] }, { ...one, size: 44, space: 32, values: (_, list) => list.map((v) => number(v, { notation: "compact" })) }];
}

function Plot({ title, x, y, bars = false, most }) {
  const at = useRef(null), plot = useRef(null), [Kind, setKind] = useState(null);
  useEffect(() => {
    loading ??= import("uplot");
    loading.then((m) => setKind(() => m.default));
  }, []);
  const look = `${settings.value.theme}${document.documentElement.dataset.theme}${language.value}`;
  useEffect(() => {
    if (!Kind) return undefined;
    const width = at.current.clientWidth, accent = color("--accent");
    const line = { label: title, stroke: accent, width: 2, fill: `${accent}22`, points: { show: false }, ...(bars ? { paths: Kind.paths.bars({ size: [0.7, 40] }), fill: accent } : {}) };
    plot.current = new Kind({
      width, height: 150, legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } }, series: [{}, line], axes: axes(bars),
      // From where the data begins, and from zero upwards.
      scales: { x: { time: !bars, ...(bars ? { range: [-0.6, x.length - 0.4] } : {}) }, y: { range: (_, _low, high) => [0, most ?? Math.max(high * 1.1, 1)] } },
    }, [x, y], at.current);
    const watch = new ResizeObserver(() => at.current && plot.current?.setSize({ width: at.current.clientWidth, height: 150 }));
    watch.observe(at.current);
    return () => {
      watch.disconnect();
      plot.current.destroy();
    };
  }, [Kind, look]);
  useEffect(() => plot.current?.setData([x, y]), [x, y]);
  const known = y.filter((v) => v !== null), last = known.at(-1) ?? 0, top = Math.max(0, ...known), round = (n) => number(n, { maximumFractionDigits: n < 10 ? 1 : 0 });
  return <figure><figcaption>{title}<b>{round(bars ? top : last)}</b></figcaption><div class="plot" ref={at} role="img" aria-label={`${title}: ${round(last)}, ≤ ${round(top)}`} /></figure>;
}

export function Metrics() {
  const all = [...figures.value];
  return (
    <main class="metrics" id="metrics" aria-label={t("figures")} tabIndex={0}>
      <h2>{t("figures")}</h2>
      {!all.length && <p class="nothing">{t("no-figures")}</p>}
      {all.map(([name, { times, series, experts }]) => (
        <section key={name}><h3>{name}</h3><div class="plots">
          {Object.entries(series).map(([key, values]) => <Plot key={key} title={t(key)} x={times} y={values} most={key === "cache-used" ? 100 : undefined} />)}
          {experts.length > 0 && <Plot title={t("experts", { n: experts.length })} bars x={experts.map((_, i) => i)} y={experts.map((v) => 100 * v)} />}
        </div></section>
      ))}
    </main>
  );
}
