// The servers of a run: replicas and reward servers with version, load and faults.

import {html, useRef} from "./vendor/preact.js";
import {Empty, Table, bytes, clock, number, seconds, useAnswer} from "./parts.js";
import {severity} from "./events.js";
import {source} from "./source.js";

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

// The processor use of each server in cores, from two statuses; by server id.
function useCores(servers) {
  const before = useRef(new Map());
  const cores = {};
  for (const {name, asked, cpu_seconds: spent} of servers ?? []) {
    const [at, from, last] = before.current.get(name) ?? [asked, spent, null];
    const now = asked > at && spent >= from ? (spent - from) / (asked - at) : last;
    if (spent !== undefined) before.current.set(name, [asked, spent, now]);
    cores[name] = now;
  }
  return cores;
}

function Live({run, servers}) {
  const cores = useCores(servers);
  const head = ["Server", "Kind", "Address", "Version", "Load", "Faults", "Processor", "Memory", "Device memory"];
  return html`<section class="card"><header><h3>Registered now</h3><span class="soft">${servers.length}</span></header>
    <${Table} name="Registered servers" file=${`${run.name}-servers`} head=${head} right=${[3, 4, 5, 6, 7, 8]}
      rows=${servers.map((each) => [each.name, each.kind, html`<code>${each.address}</code>`, number(each.version), number(each.load), html`<span class=${each.faults ? "bad" : ""}>${number(each.faults)}</span>`,
        number(cores[each.name], 2), each.memory_bytes ? bytes(each.memory_bytes) : "–", each.device_memory_bytes ? bytes(each.device_memory_bytes) : "–"])}
      raw=${servers.map((each) => [each.name, each.kind, each.address, each.version, each.load, each.faults, cores[each.name], each.memory_bytes, each.device_memory_bytes])} /></section>`;
}

export function Servers({run, stamp}) {
  const details = useAnswer(() => source.details(run.name), [run.name, stamp]);
  const live = useAnswer(() => source.servers(run.name), [run.name, stamp]);
  const known = details.value?.servers ?? [];
  const restarts = (details.value?.events ?? []).filter((event) => event.kind === "restart");
  if (details.value && !known.length && !live.value?.length) return html`<${Empty} title="No server yet">Replicas appear here when they register. A stage has none.<//>`;
  const head = ["Replica", "State", "Version", "Swaps", "Pause per swap", "Weights by", "Newest swap"];
  return html`${live.value?.length ? html`<${Live} run=${run} servers=${live.value} />` : null}
    <section class="card"><header><h3>Replicas in the records</h3><span class="soft">${known.length}</span></header>
      <${Table} name="Replicas" file=${`${run.name}-replicas`} head=${head} right=${[2, 3, 4]}
        rows=${known.map((each) => [html`<span>${each.name}${each.address ? html`<br /><code>${each.address}</code>` : null}</span>`, each.state, number(each.version), number(each.swaps), seconds(mean(each.stall_seconds)),
          each.path === "arena" ? "shared memory" : each.path, clock(each.at)])}
        raw=${known.map((each) => [each.name, each.state, each.version, each.swaps, mean(each.stall_seconds), each.path, each.at])} /></section>
    <section class="card"><header><h3>Restarts</h3><span class="soft">${restarts.length}</span></header>
      ${restarts.length ? html`<ul class="events">${restarts.map((event) => html`<li class=${severity(event)}><time>${clock(event.time)}</time><b>${event.process}</b> ${event.text}</li>`)}</ul>` : html`<p class="soft">No process was restarted.</p>`}</section>`;
}
