// Small parts that several views share: numbers and times as text, colours of runs, hooks, empty states.

import {html, useEffect, useState} from "./vendor/preact.js";
import {choose} from "./address.js";
import {CsvButton} from "./files.js";

export const COLOURS = 8;

export function colour(place) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--run-${place % COLOURS}`).trim();
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return (value || 0).toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return value.toExponential(2);
  return Number(value.toPrecision(digits)).toLocaleString("en", {maximumFractionDigits: 6});
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const whole = Math.round(value), minutes = Math.round(value / 60); // rounded first: 119.6 s are 2 min 0 s
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const clock = (time) => (time ? new Date(time * 1000).toLocaleString(undefined, {dateStyle: "medium", timeStyle: "medium"}) : "–");

export function bytes(value) {
  const unit = value >= 2 ** 30 ? 3 : value >= 2 ** 20 ? 2 : value >= 2 ** 10 ? 1 : 0;
  return `${Number((value / 1024 ** unit).toPrecision(3))} ${["B", "KiB", "MiB", "GiB"][unit]}`;
}

// A name that a narrow window breaks after its separators, not inside its words.
export const breakable = (name) => name.split(/(?<=[/_.])/).flatMap((part, place) => (place ? [html`<wbr />`, part] : [part]));
export const breakableLabel = (name) => name.replace(/([/_.])/g, "$1\u200b"); // CSS shows it

export function Empty({title, children}) {
  return html`<div class="empty"><p class="empty-title">${title}</p><p>${children}</p></div>`;
}

export function State({run}) {
  return html`<span class="state state-${run.state}" title=${run.reason || run.state}>${run.state}</span>`;
}

// A section that folds. The sections whose state is not `open` are in the address.
export function Fold({title, count, open, at, className = "", children}) {
  const changed = (at.query.fold ?? "").split(",").filter(Boolean);
  const toggle = (event) => {
    event.preventDefault();
    choose({fold: (changed.includes(title) ? changed.filter((each) => each !== title) : [...changed, title]).join()});
  };
  return html`<details class=${`group ${className}`} open=${Boolean(open) !== changed.includes(title)}><summary onClick=${toggle}><h2>${title}</h2><span class="count">${count}</span></summary>${children}</details>`;
}

// A table that stacks its cells in a narrow window. `right`: the columns of numbers. `raw`: the rows for its CSV, if they are not the shown ones.
export function Table({name, file, head, rows, raw, right = [], className = ""}) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${name}><table class=${`plain stacked ${className}`}>
    <thead><tr>${head.map((title, place) => html`<th class=${right.includes(place) ? "right" : ""}>${title}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.map((cell, place) => html`<td class=${right.includes(place) ? "right" : ""} data-label=${breakableLabel(head[place])}>${cell}</td>`)}</tr>`)}</tbody></table>
    ${file && html`<${CsvButton} file=${file} of=${name} rows=${() => [head, ...(raw ?? rows)]} />`}</div>`;
}

// The response to a request, which is repeated when `keys` change. Keeps the old response until then.
export function useAnswer(ask, keys) {
  const [answer, setAnswer] = useState({value: undefined, error: null, asked: null});
  useEffect(() => {
    let current = true;
    ask().then(
      (value) => current && setAnswer({value, error: null, asked: keys}),
      (error) => current && setAnswer((old) => ({...old, error})),
    );
    return () => { current = false; };
  }, keys);
  return answer;
}

export function Failure({error}) {
  return error ? html`<p class="failure" role="alert">The page could not load this: ${error.message || "access denied"}</p>` : null;
}
