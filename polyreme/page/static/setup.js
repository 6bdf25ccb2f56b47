// A run's configuration and summary in sections, and the differences from the other selected runs.

import {html} from "./vendor/preact.js";
import {choose} from "./address.js";
import {CsvButton} from "./files.js";
import {Fold, Table, breakable, clock, useAnswer} from "./parts.js";
import {source} from "./source.js";

const TIMES = /(^|[._])(time|updated|started|began|ended)$/; // the last part of keys that hold Unix times

export function flat(tree, prefix = "") {
  const isValue = tree === null || typeof tree !== "object" || (Array.isArray(tree) && !(tree.length && tree.every((each) => each !== null && typeof each === "object")));
  if (isValue) return {[prefix.slice(0, -1)]: JSON.stringify(tree)};
  return Object.assign({}, ...Object.entries(tree).map(([key, value]) => flat(value, `${prefix}${key}.`)));
}

const shownValue = (key, text) => (TIMES.test(key) && Number(text) > 1e9 ? clock(Number(text)) : text ?? "–");

// Keys by the section that they are in: their first part, or `rest`.
function sections(keys, rest) {
  const found = new Map();
  for (const key of keys) {
    const title = key.includes(".") ? key.slice(0, key.indexOf(".")) : rest;
    found.set(title, [...(found.get(title) ?? []), key]);
  }
  return [...found];
}

// Whether the value of a key is not the default. `changed` has the keys of such values, or of sections that contain them; null: unknown.
const isChanged = (changed, key) => !changed || changed.some((each) => key === each || key.startsWith(`${each}.`));

export function Setup({run, runs, stamp, at}) {
  const names = [...new Set([run.name, ...runs.map(({name}) => name)])];
  const several = names.length > 1, all = "all" in at.query, differing = several && at.query.same !== "1";
  const {value} = useAnswer(() => Promise.all(names.map((name) => source.details(name))), [names.join(), stamp]);
  if (!value || value.length !== names.length) return null;
  const columns = (part) => value.map((details) => flat(details?.[part] ?? {}));
  const config = columns("config"), summary = columns("summary");
  const unlike = (key, of) => !differing || new Set(of.map((each) => each[key])).size > 1;
  const keys = (of) => [...new Set(of.flatMap(Object.keys))].filter((key) => unlike(key, of));
  const chosen = keys(config).filter((key) => all || value.some((details) => isChanged(details?.changed, key)));
  const groups = [...sections(chosen, "run").map((each) => [...each, config]), ["summary", keys(summary), summary]];
  const head = ["key", ...names];
  const row = (key, of) => [key, ...of.map((column) => shownValue(key, column[key]))];
  return html`<div class="toolbar">
      <label><input type="checkbox" checked=${all} onChange=${(event) => choose({all: event.target.checked ? "1" : ""})} /> also defaults</label>
      <label><input type="checkbox" checked=${differing} disabled=${!several} onChange=${(event) => choose({same: event.target.checked ? "" : "1"})} /> only differences between the selected runs</label>
      <${CsvButton} of="the configuration" file=${`${run.name}-configuration`} rows=${() => [head, ...chosen.map((key) => row(key, config))]} /></div>
    ${groups.map(([title, found, of]) => html`<${Fold} className="card" key=${title} title=${title} count=${found.length} at=${at} open=${differing || (!all && title !== "summary")}>
      ${found.length ? html`<${Table} name=${title} className="keys" head=${head} rows=${found.map((key) => [breakable(key), ...row(key, of).slice(1)])} />` : html`<p class="soft">No difference.</p>`}<//>`)}`;
}
