// The curves: every metric of the selected runs, the most important ones first, the others in groups by their prefix.

import {html, useEffect, useMemo, useRef, useState} from "./vendor/preact.js";
import {Chart} from "./chart.js";
import {Empty, Failure, number, useAnswer} from "./parts.js";
import {source} from "./source.js";

const WATCHED = ["reward/mean", "accuracy", "score", "response_length/mean", "entropy", "actor/ppo_kl", "mismatch_kl", "grad_norm",
  "time/iteration", "tokens_per_second", "staleness/mean", "stop/length_fraction", "train/loss", "eval/loss", "train/accuracy", "eval/accuracy",
  "train/grad_norm", "train/lr", "train/tokens_per_second"];

const EARLY = 6; // cards at the top of the page, which fetch their curves before the browser reports them as visible

// Metrics in groups: [title, names]. The important ones are in their own group and in that of their prefix.
export function grouped(metrics, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = metrics.filter((name) => name !== "time" && words.every((word) => name.toLowerCase().includes(word)));
  if (words.length) return [["Found", wanted]];
  const groups = new Map([["Watched", WATCHED.filter((name) => wanted.includes(name))]]);
  for (const name of wanted) {
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

function Card({metric, early, runs, options, stamp, large, setLarge}) {
  const [place, visible] = useVisible();
  const names = runs.map(({name}) => name);
  const shown = useRef(early);
  shown.current ||= visible;
  const {value, error} = useAnswer(() => (shown.current ? source.curves(names, [metric]) : Promise.resolve(undefined)), [metric, names.join(), stamp, shown.current]);
  const curves = value?.[metric] ?? {};
  const first = runs.find(({name}) => curves[name]);
  return html`<section class=${"card chart" + (large ? " large" : "")} ref=${place} aria-label=${metric}>
    <header>
      <h3>${metric}</h3>
      ${first && html`<span class="last">${number(curves[first.name].mean.at(-1))}</span>`}
      <button class="quiet" onClick=${() => setLarge(large ? null : metric)} aria-pressed=${large} title=${large ? "Smaller" : "Larger"}
        aria-label=${`${large ? "Smaller" : "Larger"}: ${metric}`}>${large ? "−" : "+"}</button>
    </header>
    <${Failure} error=${error} />
    ${value && first ? html`<${Chart} title=${metric} runs=${runs} curves=${curves} options=${options} height=${large ? 420 : 180} />`
      : html`<div class="plot blank">${value && !first ? "no values yet" : ""}</div>`}
  </section>`;
}

export function Curves({runs, stamp, theme}) {
  const [text, setText] = useState("");
  const [smoothing, setSmoothing] = useState(0);
  const [log, setLog] = useState(false);
  const [wall, setWall] = useState(false);
  const [large, setLarge] = useState(null);
  const metrics = useMemo(() => [...new Set(runs.flatMap((run) => run.metrics))].sort(), [runs.map((run) => run.metrics.length + run.name).join()]);
  const times = useAnswer(() => (wall ? source.curves(runs.map(({name}) => name), ["time"]) : Promise.resolve(undefined)), [wall, stamp, runs.length]);
  const options = {smoothing, log, theme, times: wall ? times.value?.time : undefined};
  if (!runs.length) return html`<${Empty} title="No run selected">Choose a run in the list.<//>`;
  if (!metrics.length) return html`<${Empty} title="No metric yet">The first iteration is still running. Curves appear as soon as it is recorded.<//>`;
  return html`
    <div class="toolbar" role="search">
      <label class="grow"><span class="hidden">Find metrics</span>
        <input id="search" type="search" placeholder="Find metrics ( / )" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
      <label>Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${smoothing} onInput=${(event) => setSmoothing(Number(event.target.value))} />
        <output>${smoothing.toFixed(2)}</output></label>
      <label><input type="checkbox" checked=${log} onChange=${(event) => setLog(event.target.checked)} /> log scale</label>
      <label><input type="checkbox" checked=${wall} onChange=${(event) => setWall(event.target.checked)} /> wall time</label>
    </div>
    ${grouped(metrics, text).map(([title, names], place) => html`<details class="group" open=${place === 0 || Boolean(text)} key=${title}>
      <summary><h2>${title}</h2><span class="count">${names.length}</span></summary>
      <div class="cards">${names.map((metric, order) => html`<${Card} key=${metric} metric=${metric} early=${place === 0 && order < EARLY} runs=${runs} options=${options} stamp=${stamp}
        large=${large === metric} setLarge=${setLarge} />`)}</div>
    </details>`)}`;
}
