// The pipeline over time: the activity of the learner, each replica and the rewards in some iterations.

import {html, useEffect, useRef, useState} from "./vendor/preact.js";
import {choose} from "./address.js";
import {Empty, Failure, clock, number, seconds, useAnswer} from "./parts.js";
import {severity} from "./events.js";
import {offline, source} from "./source.js";

const LANE = 34, HEAD = 26, LABEL = 132, FOOT = 24;
const KINDS = [["wait", "waits for samples"], ["train", "trains"], ["write", "writes the version"], ["generate", "generates"], ["score", "scores"], ["evaluate", "answers an evaluation"], ["swap", "swaps weights"], ["mark", "evaluation, checkpoint"], ["warning", "restart"], ["error", "alarm"]];

// The lanes: [label, bars], where a bar is {kind, begin, end, title}.
export function lanes({iterations, groups, events}) {
  const learner = iterations.flatMap((each) => {
    const begin = each.end - each.iteration_seconds;
    const waited = begin + each.learner_wait, trained = waited + each.train, written = trained + each.write;
    const name = `iteration ${each.number}`;
    return [{kind: "wait", begin, end: waited, title: `${name}: waits ${seconds(each.learner_wait)}`},
      {kind: "train", begin: waited, end: trained, title: `${name}: trains ${seconds(each.train)}`},
      {kind: "write", begin: trained, end: written, title: `${name}: writes ${seconds(each.write)}`}];
  });
  const replicas = new Map(), scoring = [];
  const lane = (name) => replicas.get(name) ?? replicas.set(name, []).get(name);
  for (const group of groups) {
    const end = group.began + group.generate;
    for (const name of group.replicas.length ? group.replicas : ["replicas"]) {
      lane(name).push({kind: "generate", begin: group.began, end, title: `group ${group.group}: generates ${seconds(group.generate)}`});
    }
    scoring.push({kind: "score", begin: end, end: end + group.score, title: `group ${group.group}: scores ${seconds(group.score)}`});
  }
  for (const event of events) if (event.kind === "commit") lane(event.replica);
  const marks = [];
  for (const event of events) {
    if (event.kind === "commit") {
      lane(event.replica).push({kind: "swap", begin: event.time - event.stall_seconds, end: event.time, title: `takes version ${event.version}: generation pauses ${seconds(event.stall_seconds)}`});
    } else if (event.kind === "eval" && event.seconds) {
      const bar = {kind: "evaluate", begin: event.time - event.seconds, end: event.time, title: `answers the evaluation of version ${event.version} in ${seconds(event.seconds)}`};
      for (const each of replicas.values()) each.unshift(bar); // all replicas answer an evaluation; below their other bars
      marks.push({kind: "mark", begin: event.time - event.seconds, end: event.time, title: `evaluation of version ${event.version}: ${number(event.result?.value ?? event.accuracy ?? event.score)}`});
    } else {
      marks.push({kind: severity(event) || "mark", begin: event.time - (event.kind === "saved" ? event.seconds ?? 0 : 0), end: event.time, title: event.kind === "saved" ? `checkpoint ${event.iteration}` : `${event.kind}${event.text ? ": " + event.text : ""}`});
    }
  }
  return [["learner", learner], ...[...replicas].sort(), ...(scoring.length ? [["rewards", scoring]] : []), ...(marks.length ? [["events", marks]] : [])];
}

const named = (answer) => answer && {...answer, iterations: answer.iterations.map((each) => ({...each, number: each.iteration, iteration_seconds: each.seconds}))};

function useWidth() {
  const place = useRef(null);
  const [width, setWidth] = useState(900);
  useEffect(() => {
    if (!place.current) return undefined;
    const observer = new ResizeObserver(([entry]) => setWidth(Math.max(320, entry.contentRect.width)));
    observer.observe(place.current);
    return () => observer.disconnect();
  }, []);
  return [place, width];
}

// A round number of seconds that is at least `least`.
function step(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((each) => power * each >= least);
}

function Drawing({answer, width}) {
  const rows = lanes(answer);
  const bars = rows.flatMap(([, bars]) => bars); // of many groups: a call takes only so many arguments
  const begin = bars.reduce((first, bar) => Math.min(first, bar.begin), Infinity), end = bars.reduce((last, bar) => Math.max(last, bar.end), begin + 1e-3);
  const label = width < 600 ? 84 : LABEL;
  const beat = step((end - begin) / Math.max(2, (width - label) / 90));
  const beats = Array.from({length: Math.floor((end - begin) / beat) + 1}, (_, place) => place * beat);
  const bottom = HEAD + rows.length * LANE;
  const x = (time) => label + ((time - begin) / (end - begin)) * (width - label - 8);
  const ticks = answer.iterations.map((each) => [x(each.end), each.number]);
  const apart = ticks.filter(([at], place) => place === 0 || at - ticks[place - 1][0] > 26 || place % Math.ceil(30 / Math.max(1, at - ticks[place - 1][0])) === 0);
  return html`<svg width=${width} height=${bottom + FOOT} role="img" aria-label=${`Timeline of ${answer.iterations.length} iterations, ${seconds(end - begin)} in all`}>
    <text class="tick-label" x="0" y="13">iteration</text><text class="tick-label" x="0" y=${bottom + 17}>seconds</text>
    <line class="base" x1=${label} x2=${width - 8} y1=${bottom + 2} y2=${bottom + 2} />
    ${beats.map((each) => html`<g><line class="base" x1=${x(begin + each)} x2=${x(begin + each)} y1=${bottom + 2} y2=${bottom + 6} /><text class="tick-label" x=${Math.min(x(begin + each), width - 16)} y=${bottom + 17} text-anchor="middle">${number(each)}</text></g>`)}
    ${apart.map(([at, each]) => html`<g><line class="tick" x1=${at} x2=${at} y1=${HEAD - 6} y2=${bottom} /><text class="tick-label" x=${at} y="13" text-anchor="middle">${each}</text></g>`)}
    ${rows.map(([name, bars], row) => html`<g transform=${`translate(0 ${HEAD + row * LANE})`}>
      <text class="lane" x="0" y=${LANE / 2 + 4}>${name.length > (label / 7) ? name.slice(0, label / 7 - 1) + "…" : name}<title>${name}</title></text>
      <line class="base" x1=${label} x2=${width - 8} y1=${LANE - 4} y2=${LANE - 4} />
      ${bars.map((bar) => html`<rect class=${`bar-${bar.kind}`} x=${x(bar.begin)} y="5" width=${Math.max(1.5, x(bar.end) - x(bar.begin))} height=${LANE - 10} rx="1.5"><title>${bar.title}</title></rect>`)}
    </g>`)}</svg>`;
}

// Shares of the learner's time, as text and as a bar.
function Shares({iterations}) {
  const total = iterations.reduce((sum, each) => sum + each.iteration_seconds, 0) || 1;
  const parts = [["wait", "waits", "learner_wait"], ["train", "trains", "train"], ["write", "writes", "write"]].map(([kind, text, key]) => [kind, text, iterations.reduce((sum, each) => sum + each[key], 0) / total]);
  return html`<p class="shares">The learner ${parts.map(([kind, text, share], place) => html`${place ? ", " : ""}<span class=${`swatch bar-${kind}`}></span>${text} <b>${(100 * share).toFixed(0)} %</b>`)} of ${seconds(total)}.</p>`;
}

export function Timeline({run, stamp, at}) {
  const count = Number(at.query.count ?? 12), last = at.query.last ? Number(at.query.last) : null;
  const [place, width] = useWidth();
  const until = last ?? run.iteration, first = Math.max(1, until - count + 1);
  const {value, error} = useAnswer(() => source.timeline(run.name, first, until).then(named), [run.name, first, until, last === null ? stamp : ""]);
  const move = (by) => choose({last: Math.min(run.iteration, Math.max(count, until + by))});
  return html`<div class="toolbar">
      ${offline ? null : html`<button onClick=${() => move(-count)} disabled=${first <= 1}>Earlier</button><button onClick=${() => move(count)} disabled=${until >= run.iteration}>Later</button>
      <button onClick=${() => choose({last: ""})} disabled=${last === null}>Newest</button>
      <label>Iterations <select value=${count} onChange=${(event) => choose({count: event.target.value})}>${[3, 6, 12, 25, 50].map((each) => html`<option value=${each}>${each}</option>`)}</select></label>`}
      <span class="soft">${value?.iterations.length ? `iterations ${value.iterations[0].number} to ${value.iterations.at(-1).number}, until ${clock(value.iterations.at(-1).end)}` : ""}</span></div>
    <${Failure} error=${error} />
    <div class="card timeline" ref=${place}>${value?.iterations.length ? html`<${Drawing} answer=${value} width=${width - 2} />`
      : html`<${Empty} title="Nothing to draw yet">The timeline begins with the first iteration.<//>`}</div>
    ${value?.iterations.length ? html`<${Shares} iterations=${value.iterations} />` : null}
    <p class="legend">${KINDS.map(([kind, text]) => html`<span><span class=${`swatch bar-${kind}`}></span>${text}</span>`)}</p>`;
}
