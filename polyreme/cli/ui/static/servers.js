// The servers of a run: replicas and reward servers with version, load and faults.

import {html} from "./vendor/preact.js";
import {Empty, bytes, clock, number, seconds, useAnswer} from "./parts.js";
import {source} from "./source.js";

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

function Live({servers}) {
  return html`<section class="card"><header><h3>Registered now</h3><span class="soft">${servers.length}</span></header><div class="scroll" tabindex="0" role="region" aria-label="Registered servers"><table class="plain">
    <thead><tr><th>Server</th><th>Kind</th><th>Address</th><th class="right">Version</th><th class="right">Load</th><th class="right">Faults</th><th class="right">Memory</th></tr></thead>
    <tbody>${servers.map((each) => html`<tr><td>${each.name}</td><td>${each.kind}</td><td><code>${each.address}</code></td><td class="right">${number(each.version)}</td>
      <td class="right">${number(each.load)}</td><td class=${"right" + (each.faults ? " bad" : "")}>${number(each.faults)}</td><td class="right">${each.memory_bytes ? bytes(each.memory_bytes) : "–"}</td></tr>`)}</tbody></table></div></section>`;
}

export function Servers({run, stamp}) {
  const details = useAnswer(() => source.details(run.name), [run.name, stamp]);
  const live = useAnswer(() => source.servers(run.name), [run.name, stamp]);
  const known = details.value?.servers ?? [];
  const restarts = (details.value?.events ?? []).filter((event) => event.kind === "restart");
  if (details.value && !known.length && !live.value?.length) return html`<${Empty} title="No server yet">Replicas appear here when they register. A stage has none.<//>`;
  return html`${live.value?.length ? html`<${Live} servers=${live.value} />` : null}
    <section class="card"><header><h3>Replicas in the records</h3><span class="soft">${known.length}</span></header><div class="scroll" tabindex="0" role="region" aria-label="Replicas"><table class="plain">
      <thead><tr><th>Replica</th><th>State</th><th class="right">Version</th><th class="right">Swaps</th><th class="right">Pause per swap</th><th>Weights by</th><th>Newest swap</th></tr></thead>
      <tbody>${known.map((each) => html`<tr><td>${each.name}${each.address ? html`<br /><code>${each.address}</code>` : null}</td><td>${each.registered ? "registered" : "gone"}</td><td class="right">${number(each.version)}</td>
        <td class="right">${number(each.swaps)}</td><td class="right">${seconds(mean(each.stall_seconds))}</td><td>${each.path === "arena" ? "shared memory" : each.path}</td><td>${clock(each.at)}</td></tr>`)}</tbody></table></div></section>
    <section class="card"><header><h3>Restarts</h3><span class="soft">${restarts.length}</span></header>
      ${restarts.length ? html`<ul class="events">${restarts.map((event) => html`<li><time>${clock(event.time)}</time><b>${event.process}</b> ${event.text}</li>`)}</ul>` : html`<p class="soft">No process was restarted.</p>`}</section>`;
}
