// The curves: every metric of the selected runs, the most important ones first, the others in groups by their prefix.

import {html, useEffect, useMemo, useRef, useState} from "./vendor/preact.js";
import {choose} from "./address.js";
import {Chart} from "./chart.js";
import {CsvButton, save} from "./files.js";
import {Empty, Failure, Fold, breakable, bytes, number, useAnswer} from "./parts.js";
import {AXES, axisMetric, chartRows} from "./plot_data.js";
import {source} from "./source.js";

export const WATCHED = ["reward/mean", "accuracy", "score", "response_length/mean", "entropy", "actor/ppo_kl", "mismatch_kl", "grad_norm", "critic/explained_variance", "critic/vf_loss", "critic/grad_norm",
  "episode/turns/mean", "episode/tool_errors", "episode/environment_seconds", "time/iteration", "tokens_per_second", "staleness/mean", "stop/length_fraction", "train/loss", "eval/loss", "train/accuracy", "eval/accuracy",
  "train/grad_norm", "train/lr", "train/tokens_per_second"];

const EARLY = 6; // cards at the top of the page, which fetch their curves before the browser reports them as visible

// Metrics in groups: [title, names]. The important ones are in their own group, unless they are always 0 (not `moving`), and in that of their prefix.
export function grouped(metrics, text, moving) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = metrics.filter((name) => name !== "time" && words.every((word) => name.toLowerCase().includes(word)));
  const groups = words.length ? new Map([["Found", wanted]]) : new Map([["Watched", WATCHED.filter((name) => wanted.includes(name) && moving(name))]]);
  for (const name of words.length ? [] : wanted) {
    const prefix = name.includes("/") ? name.slice(0, name.indexOf("/")) : "other";
    groups.set(prefix, [...(groups.get(prefix) ?? []), name]);
  }
  return [...groups].filter(([, names]) => names.length);
}

function useVisible() {
  const place = useRef(null);
  const [visible, setVisible] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver(([entry]) => setVisible(entry.isIntersecting), {rootMargin: "200px"});
    observer.observe(place.current);
    return () => observer.disconnect();
  }, []);
  return [place, visible];
}

// The names of runs, and of those that they continue.
function withParents(runs) {
  const line = (run) => [run.name, ...(run.parent ? line(run.parent) : [])];
  return [...new Set(runs.flatMap(line))];
}

function Card({metric, early, runs, options, stamp, large, setLarge}) {
  const [place, visible] = useVisible();
  const names = withParents(runs);
  const shown = useRef(early), picture = useRef(null);
  shown.current ||= visible;
  const {value, error} = useAnswer(() => (shown.current ? source.curves(names, [metric]) : Promise.resolve(undefined)), [metric, names.join(), stamp, shown.current]);
  const curves = value?.[metric] ?? {};
  const first = runs.find(({name}) => curves[name]);
  const png = () => picture.current?.().toBlob((blob) => save(`${metric}.png`, blob));
  return html`<section class=${"card chart" + (large ? " large" : "")} ref=${place} aria-label=${metric}>
    <header>
      <h3>${breakable(metric)}</h3>
      ${first && html`<span class="last">${(metric.endsWith("bytes") ? bytes : number)(curves[first.name].mean.at(-1))}</span>
        <${CsvButton} file=${metric} of=${metric} rows=${() => chartRows(metric, runs, curves, options)} />
        <button class="quiet csv" onClick=${png} title="Save as PNG" aria-label=${`Save ${metric} as PNG`}>PNG</button>`}
      <button class="quiet" onClick=${() => setLarge(large ? "" : metric)} aria-pressed=${large} title=${large ? "Smaller" : "Larger"}
        aria-label=${`${large ? "Smaller" : "Larger"}: ${metric}`}>${large ? "−" : "+"}</button>
    </header>
    <${Failure} error=${error} />
    ${value && first ? html`<${Chart} title=${metric} runs=${runs} curves=${curves} options=${options} height=${large ? 420 : 200} handle=${picture} />`
      : html`<div class="plot blank">${value && !first ? "no values yet" : ""}</div>`}
  </section>`;
}

function Toolbar({query, metrics}) {
  const smoothing = Number(query.smoothing ?? 0);
  return html`<div class="toolbar" role="search">
      <label class="grow"><span class="hidden">Find metrics</span>
        <input id="search" type="search" placeholder="Find metrics ( / )" value=${query.find ?? ""} onInput=${(event) => choose({find: event.target.value})} /></label>
      <label>Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${smoothing} onInput=${(event) => choose({smoothing: Number(event.target.value) || ""})} />
        <output>${smoothing.toFixed(2)}</output></label>
      <label><input type="checkbox" checked=${"log" in query} onChange=${(event) => choose({log: event.target.checked ? "1" : ""})} /> log scale</label>
      <label>x axis <select class="axis" value=${query.x ?? ""} onChange=${(event) => choose({x: event.target.value, zoom: ""})}>
        ${AXES.map(([name, text]) => html`<option value=${name}>${text}</option>`)}
        <optgroup label="Metrics">${metrics.filter((name) => name !== "time").map((name) => html`<option value=${name}>${name}</option>`)}</optgroup></select></label>
      ${query.zoom ? html`<button onClick=${() => choose({zoom: ""})}>Whole axis</button>` : null}
    </div>`;
}

// The part of the x axis that an address names; undefined: the whole, also for a part without a length, which cannot be drawn.
function zoomed(text) {
  const [low, high] = (text ?? "").split("~").map(Number);
  return low < high ? [low, high] : undefined;
}

export function Curves({runs, stamp, theme, at}) {
  const {find = "", smoothing = 0, x = "", large = "", zoom} = at.query;
  const metrics = useMemo(() => [...new Set(runs.flatMap((run) => run.metrics))].sort(), [runs.map((run) => run.metrics.length + run.name).join()]);
  const along = axisMetric(x);
  const spent = useAnswer(() => (along ? source.curves(withParents(runs), [along]) : Promise.resolve(undefined)), [along, stamp, withParents(runs).join()]);
  const options = {smoothing: Number(smoothing), log: "log" in at.query, theme, x, along: along ? spent.value?.[along] : undefined, zoom: zoomed(zoom),
    zoomTo: (range) => choose({zoom: range ? range.map((each) => each.toPrecision(9)).join("~") : ""})};
  const moving = (name) => runs.some((run) => run.metrics.includes(name) && !run.zeros.includes(name));
  const groups = grouped(metrics, find, moving);
  if (!runs.length) return html`<${Empty} title="No run selected">Choose a run in the list.<//>`;
  if (!metrics.length) return html`<${Empty} title="No metric yet">The first iteration is still running. Curves appear as soon as it is recorded.<//>`;
  return html`<${Toolbar} query=${at.query} metrics=${metrics} />
    ${along && spent.value && !Object.keys(options.along ?? {}).length ? html`<p class="notice" role="status">These runs do not record what this x axis needs.</p>` : null}
    ${groups.length ? null : html`<${Empty} title="No metric matches">Widen the search.<//>`}
    ${groups.map(([title, names], place) => html`<${Fold} title=${title} count=${names.length} at=${at} open=${place === 0 || Boolean(find)} key=${title}>
      <div class="cards">${names.map((metric, order) => html`<${Card} key=${metric} metric=${metric} early=${place === 0 && order < EARLY} runs=${runs} options=${options} stamp=${stamp}
        large=${large === metric} setLarge=${(name) => choose({large: name})} />`)}</div>
    <//>`)}`;
}
