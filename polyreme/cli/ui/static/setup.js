// A run's configuration and summary, and the differences from the other selected runs.

import {html, useState} from "./vendor/preact.js";
import {useAnswer} from "./parts.js";
import {source} from "./source.js";

export function flat(tree, prefix = "") {
  if (tree === null || typeof tree !== "object" || Array.isArray(tree)) return {[prefix.slice(0, -1)]: JSON.stringify(tree)};
  return Object.assign({}, ...Object.entries(tree).map(([key, value]) => flat(value, `${prefix}${key}.`)));
}

export function Setup({run, runs, stamp}) {
  const names = [...new Set([run.name, ...runs.map(({name}) => name)])];
  const [differing, setDiffering] = useState(names.length > 1);
  const {value} = useAnswer(() => Promise.all(names.map((name) => source.details(name))), [names.join(), stamp]);
  if (!value || value.length !== names.length) return null;
  const tables = ["summary", "config"].map((part) => [part, value.map((details) => flat(details?.[part] ?? {}))]);
  return html`<div class="toolbar"><label><input type="checkbox" checked=${differing && names.length > 1} disabled=${names.length < 2} onChange=${(event) => setDiffering(event.target.checked)} /> only differences between the selected runs</label></div>
    ${tables.map(([title, columns]) => {
      const keys = [...new Set(columns.flatMap(Object.keys))].filter((key) => !differing || names.length < 2 || new Set(columns.map((column) => column[key])).size > 1);
      return html`<section class="card"><header><h3>${title === "config" ? "Configuration" : "Summary"}</h3></header><div class="scroll" tabindex="0" role="region" aria-label=${title}><table class="plain keys">
        <thead><tr><th>Key</th>${names.map((name) => html`<th>${name}</th>`)}</tr></thead>
        <tbody>${keys.map((key) => html`<tr><td><code>${key}</code></td>${columns.map((column) => html`<td><code>${column[key] ?? "–"}</code></td>`)}</tr>`)}</tbody></table></div></section>`;
    })}`;
}
