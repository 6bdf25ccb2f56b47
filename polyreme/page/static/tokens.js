// A response's tokens, coloured by a number or by the version that sampled them.

import {html} from "./vendor/preact.js";
import {choose, useAddress} from "./address.js";
import {number} from "./parts.js";

// The numbers per token of a sample, by kind; null if the run did not record them. Tokens that the environment wrote have none.
function columns(sample) {
  const count = sample.token_ids.length;
  const advantage = Array.isArray(sample.advantages) ? sample.advantages : Array.isArray(sample.advantage) ? sample.advantage
    : typeof sample.advantage === "number" ? Array(count).fill(sample.advantage) : null;
  const version = Array(count).fill(null), turns = sample.turns ?? [];
  for (const [number, start, end] of sample.spans ?? []) version.fill(number, start, end);
  const sampled = Array(count).fill(!turns.length);
  for (const {start, end} of turns) sampled.fill(true, start, end);
  const ofPolicy = (values) => values && values.map((value, place) => (sampled[place] ? value : null));
  return {
    "log-probability": ofPolicy(sample.logprobs ?? null),
    advantage: ofPolicy(advantage),
    version: version.some((each) => each !== null) ? version : null,
    "token reward": sample.token_rewards ?? null,
    teacher: sample.teacher_logprobs ?? null,
  };
}

const largest = (values) => values.reduce((most, value) => Math.max(most, value), -Infinity); // a call takes only so many arguments

// Returns the background of a token by its value: strong if the value is unusual.
function backgrounds(kind, values) {
  const versions = kind === "version" ? [...new Set(values)].sort((a, b) => a - b) : [];
  const likely = kind === "log-probability" || kind === "teacher";
  const top = likely ? 6 : Math.max(1e-9, largest(values.map(Math.abs))); // the absolute value of null is 0
  return (value) => {
    if (value === null || value === undefined) return "";
    if (kind === "version") return `background: color-mix(in srgb, var(--run-${versions.indexOf(value) % 8}) 26%, transparent)`;
    const share = Math.min(1, Math.abs(value) / top);
    return `background: color-mix(in srgb, var(${likely || value < 0 ? "--low" : "--high"}) ${Math.round(share * 55)}%, transparent)`;
  };
}

export function Tokens({sample}) {
  const available = columns(sample);
  const kinds = Object.keys(available).filter((kind) => available[kind]);
  const chosen = useAddress().query.colour;
  const kind = kinds.includes(chosen) ? chosen : kinds[0];
  const values = available[kind] ?? [];
  const background = backgrounds(kind, values);
  const text = (place) => sample.token_texts[place] ?? `#${sample.token_ids[place]}`;
  const title = (place) => [`token ${place}: id ${sample.token_ids[place]}`, ...kinds.map((each) => `${each} ${number(available[each][place])}`)].join("\n");
  return html`<div class="tokens-head"><span>Colour</span>${kinds.map((each) => html`<label><input type="radio" name="colour" checked=${each === kind} onChange=${() => choose({colour: each})} /> ${each}</label>`)}</div>
    <p class="tokens">${sample.token_ids.map((_, place) => html`<span style=${background(values[place])} title=${title(place)}>${visible(text(place))}</span>`)}</p>
    <p class="legend">${legend(kind, values)}</p>`;
}

function legend(kind, values) {
  values = values.filter((value) => value !== null);
  if (!values.length) return "";
  if (kind === "version") return `versions ${[...new Set(values)].join(", ")}`;
  return `${kind}: mean ${number(values.reduce((sum, value) => sum + value, 0) / values.length)}, lowest ${number(-largest(values.map((value) => -value)))}, highest ${number(largest(values))}`;
}

const visible = (text) => text.replaceAll("\n", "⏎\n") || "∅";
