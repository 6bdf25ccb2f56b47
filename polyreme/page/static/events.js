// Alarms first, then all other events, newest first.

import {html} from "./vendor/preact.js";
import {choose} from "./address.js";
import {CsvButton} from "./files.js";
import {Empty, clock, number, seconds, useAnswer} from "./parts.js";
import {source} from "./source.js";

const SEVERITY = {alarm: "error", eval_failed: "error", restart: "warning", tracker_failed: "warning"};

// How serious an event is: "error", "warning", or "" for what is normal.
export function severity(event) {
  if (event.kind === "gate" && event.value > event.limit) return "error";
  return SEVERITY[event.kind] ?? "";
}

function text(event) {
  switch (event.kind) {
    case "eval": return `version ${event.version ?? event.step}: ${["accuracy", "score", "loss", ...Object.keys(event).filter((name) => name.includes("/"))].filter((name) => name in event).map((name) => `${name} ${number(event[name])}`).join(", ")} (${seconds(event.seconds)})`;
    case "saved": return `checkpoint ${event.iteration ?? event.step} in ${seconds(event.seconds)}: ${event.path}`;
    case "gate": return `${event.name}: ${number(event.value)}, limit ${number(event.limit)}`;
    case "start": return event.start > 1 ? `start ${event.start}: resumed` : "first start";
    case "restart": return `${event.process}: ${event.text}`;
    case "sft_done": return `warm start complete in ${seconds(event.seconds)}`;
    case "done_learning": return "the last iteration is trained";
    default: return [event.service, event.text ?? event.hf_path ?? ""].filter(Boolean).join(": ");
  }
}

export function Events({run, stamp, at}) {
  const {value} = useAnswer(() => source.details(run.name), [run.name, stamp]);
  const kind = at.query.kind ?? "";
  if (!value) return null;
  const kinds = [...new Set(value.events.map((event) => event.kind))].sort();
  const shown = value.events.filter((event) => !kind || event.kind === kind);
  return html`${value.alarms.length ? html`<section class="card alarms"><header><h3>Alarms of the newest iteration</h3></header><ul>${value.alarms.map((each) => html`<li>${each}</li>`)}</ul></section>`
      : html`<p class="calm">No alarm in the newest iteration.</p>`}
    <div class="toolbar" role="group" aria-label="Kinds of events"><button aria-pressed=${kind === ""} onClick=${() => choose({kind: ""})}>all</button>
      ${kinds.map((each) => html`<button aria-pressed=${kind === each} onClick=${() => choose({kind: each})}>${each}</button>`)}
      <${CsvButton} of="the events" file=${`${run.name}-events`} rows=${() => [["time", "kind", "severity", "text"], ...shown.map((event) => [new Date(event.time * 1000).toISOString(), event.kind, severity(event), text(event)])]} /></div>
    ${shown.length ? html`<ul class="events">${shown.map((event) => html`<li class=${severity(event)}><time>${clock(event.time)}</time><span class="tag">${event.kind}</span><span>${text(event)}</span></li>`)}</ul>`
      : html`<${Empty} title="No event yet">Evaluations, checkpoints, notices and alarms appear here.<//>`}`;
}
