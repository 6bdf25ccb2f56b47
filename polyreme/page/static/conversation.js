// An episode as a conversation: the environment's messages are shaded; a turn of the policy has its reward, times and tool calls.

import {html} from "./vendor/preact.js";
import {link} from "./address.js";
import {number, seconds} from "./parts.js";

// A message's content as text: a string, or parts as in chat requests.
function text(content) {
  if (!Array.isArray(content)) return content ?? "";
  return content.map((part) => part.text ?? `[${part.type}]`).join("\n");
}

function ToolCall({call}) {
  return html`<div class="tool-call"><code>${call.name}(${call.arguments})</code> <span class="soft">${seconds(call.seconds)}</span>
    ${call.error ? html`<p class="bad">${call.error}</p>` : null}${call.result ? html`<pre tabindex="0">${call.result}</pre>` : null}</div>`;
}

function Turn({turn, place}) {
  return html`<span class="soft">turn ${place + 1}</span><span class=${turn.reward > 0 ? "good" : turn.reward < 0 ? "bad" : "soft"}>reward ${number(turn.reward)}</span>
    <span class="soft">${number(turn.end - turn.start)} tokens, ${seconds(turn.seconds)}</span>`;
}

// `Conversation` has one entry per message of the episode. Turns of its other trajectories are dimmed.
export function Conversation({sample}) {
  const own = sample.trajectory ?? 0;
  return html`<ol class="conversation" aria-label="Conversation">${sample.messages.map((message) => {
    const turn = message.trajectory === own ? sample.turns[message.turn] : null, other = message.trajectory !== undefined && !turn;
    return html`<li class=${turn ? "sampled" : "written"}><header><h3>${message.role}</h3>${turn ? html`<${Turn} turn=${turn} place=${message.turn} />` : null}
      ${other ? html`<span class="soft">in trajectory ${message.trajectory + 1}</span>` : null}${message.withdrawn ? html`<span class="soft">withdrawn</span>` : null}</header>
      <pre tabindex="0">${text(message.content) || "(empty)"}</pre>${turn?.tool_calls.map((call) => html`<${ToolCall} call=${call} />`)}</li>`;
  })}</ol>`;
}

// Links to the other trajectories of the episode.
export function Branches({run, sample}) {
  const others = sample.kind === "train" ? (sample.trajectories ?? []).filter((position) => position !== sample.position) : [];
  return others.length ? html`<p class="soft">This episode has ${others.length + 1} trajectories, since its context was rewritten. Others: ${others.map((position) => {
    const id = `${sample.group}.${position}`;
    return html`<a href=${link("life", [run.name, id])}>${id}</a> (<a href=${link("compare", [run.name, sample.id, id])}>side by side</a>) `;
  })}</p>` : null;
}
