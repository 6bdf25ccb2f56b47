// The life of one sample: prompt, generation, scoring, advantage, the step that trained it, its tokens, and the same prompt at other times.

import {html} from "./vendor/preact.js";
import {link} from "./address.js";
import {Branches, Conversation} from "./conversation.js";
import {Empty, Failure, clock, number, seconds, useAnswer} from "./parts.js";
import {Tokens} from "./tokens.js";
import {offline, source} from "./source.js";

function Step({title, when, children}) {
  return html`<li><h3>${title}</h3>${when && html`<span class="when">${when}</span>`}<div>${children}</div></li>`;
}

function Facts({of}) {
  const known = Object.entries(of).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<dl class="facts">${known.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function Spans({sample}) {
  const total = sample.tokens || 1;
  return html`<div class="spans" role="img" aria-label=${`sampled by ${sample.spans.map(([version, start, end]) => `version ${version}: tokens ${start} to ${end}`).join("; ")}`}>
    ${sample.spans.map(([version, start, end], place) => html`<span style=${`flex: ${Math.max((end - start) / total, 0.02)}; --mark: var(--run-${place % 8})`} title=${`tokens ${start} to ${end}`}>version ${version}</span>`)}</div>`;
}

function Parts({parts}) {
  const lines = Object.entries(parts ?? {}).map(([name, value]) => [name, ...(typeof value === "object" ? [value.raw, value.weighted] : [value, value])]);
  return lines.length ? html`<table class="plain"><thead><tr><th>Reward</th><th class="right">value</th><th class="right">weighted</th></tr></thead>
    <tbody>${lines.map(([name, raw, weighted]) => html`<tr><td>${name}</td><td class="right">${number(raw)}</td><td class="right">${number(weighted)}</td></tr>`)}</tbody></table>` : null;
}

function Calls({calls}) {
  return calls?.length ? html`<table class="plain"><thead><tr><th>Call</th><th>server</th><th>status</th><th class="right">time</th></tr></thead>
    <tbody>${calls.map((call, place) => html`<tr><td>${place + 1}</td><td>${call.server}</td><td class=${call.status === "ok" ? "good" : "bad"}>${call.status}${call.message ? html` <span class="soft">${call.message}</span>` : null}</td>
      <td class="right">${seconds(call.seconds)}</td></tr>`)}</tbody></table>` : null;
}

function Peers({run, sample}) {
  if (!sample.peers || sample.peers.length < 2) return null;
  return html`<section class="card"><header><h3>The same prompt ${sample.kind === "eval" ? "in other evaluations" : "in other samples"}</h3><span class="soft">${number(sample.peers_total)}</span>
    ${offline ? null : html`<a href=${link("samples", [], {prompt: sample.prompt_number, order: "oldest"})}>in the list</a>`}</header>
    <div class="scroll" tabindex="0" role="region" aria-label="Samples of the same prompt"><table class="samples small"><tbody>${sample.peers.slice(0, 40).map((peer) => html`<tr class=${peer.id === sample.id ? "marked" : ""}>
      <td class="id"><a href=${link("life", [run.name, peer.id])}>${peer.id}</a></td><td class="right" data-label="iteration">${peer.step}</td>
      <td class="right" data-label="score">${number(peer.score, 3)}</td><td class="text">${peer.response}</td>
      <td>${peer.id === sample.id ? null : html`<a href=${link("compare", [run.name, peer.id, sample.id])}>compare</a>`}</td></tr>`)}</tbody></table></div></section>`;
}

const BOUNDS = {turns: "at the most turns", tokens: "at the most tokens", time: "at the longest time", length: "at the longest length"};

const ended = ({outcome, finish}) => BOUNDS[outcome ?? finish] ?? outcome ?? finish;

// The seconds of turns or tool calls together, as text; null without any.
const spent = (parts) => (parts?.length ? seconds(parts.reduce((sum, part) => sum + part.seconds, 0)) : null);

export function Life({run, at}) {
  const id = at.words[1];
  const {value: sample, error, asked} = useAnswer(() => source.sample(run.name, id), [run.name, id]);
  if (error) return html`<${Failure} error=${error} />`;
  if (sample === undefined || asked?.[1] !== id) return null;
  if (sample === null) return html`<${Empty} title=${`No sample ${id}`}>The id of a sample is GROUP.SAMPLE; that of an evaluation answer is vVERSION.ROW.<//>`;
  const trained = sample.kind === "train";
  const began = sample.began, generated = began && began + sample.generate_seconds, scored = generated && generated + sample.score_seconds;
  const calls = (sample.turns ?? []).flatMap((turn) => turn.tool_calls);
  const staleness = trained && sample.oldest !== null ? sample.step - 1 - sample.oldest : null;
  return html`<article class="life">
    <header><h2>Sample ${sample.id}</h2><span class="score-large">${number(sample.score)}</span>
      <span class="soft">${trained ? `trained in iteration ${sample.step}` : `answer of version ${sample.step}`}</span></header>
    <${Branches} run=${run} sample=${sample} />
    ${sample.messages?.length ? html`<${Conversation} sample=${sample} />${sample.label ? html`<p class="soft">label: <code>${sample.label}</code></p>` : null}`
      : html`<div class="texts"><section><h3>Prompt</h3><pre tabindex="0">${sample.prompt}</pre>${sample.label ? html`<p class="soft">label: <code>${sample.label}</code></p>` : null}</section>
      <section><h3>Response</h3><pre tabindex="0">${sample.response || "(empty)"}</pre></section></div>`}
    <ol class="steps">
      <${Step} title="Generated" when=${clock(began)}>
        <${Facts} of=${{"replica": sample.replicas?.join(", then "), "took": sample.generate_seconds ? `${seconds(sample.generate_seconds)} (its group)` : null, "prompt tokens": sample.prompt_tokens,
          "tokens": number(sample.tokens), "ended": ended(sample), "turns": sample.turns?.length || null, "tool calls": calls.length || null,
          "sampling": spent(sample.turns), "tools": spent(calls), "environment": sample.environment_seconds === undefined ? null : seconds(sample.environment_seconds), "attempt": sample.attempt, "mean log-probability": sample.logprob === null ? null : number(sample.logprob)}} />
        ${sample.spans ? html`<${Spans} sample=${sample} />` : null}
      <//>
      <${Step} title="Scored" when=${clock(generated)}>
        <${Facts} of=${{"score": number(sample.score), "took": sample.score_seconds ? `${seconds(sample.score_seconds)} (its group)` : null}} />
        <${Parts} parts=${sample.parts} /><${Calls} calls=${sample.calls} />
      <//>
      ${trained ? html`<${Step} title="Trained" when=${clock(sample.trained_at)}>
        <${Facts} of=${{"iteration": number(sample.step), "made version": number(sample.step), "advantage": number(sample.advantage), "share of the loss": sample.weight === undefined ? null : number(sample.weight),
          "optimizer steps": sample.optimizer_steps?.join(", "), "staleness": staleness, "waited in the log": scored && sample.trained_at ? seconds(Math.max(0, sample.trained_at - scored)) : null}} />
        ${sample.advantage === 0 ? html`<p class="soft">The advantage is 0: the sample did not move the policy.</p>` : null}
      <//>` : null}
    </ol>
    ${sample.token_ids?.length ? html`<section class="card"><header><h3>Tokens</h3></header><${Tokens} sample=${sample} /></section>` : null}
    <${Peers} run=${run} sample=${sample} />
  </article>`;
}
