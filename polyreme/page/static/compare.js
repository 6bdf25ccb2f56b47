// Two samples side by side, with marked differences.

import {html} from "./vendor/preact.js";
import {link} from "./address.js";
import {Empty, Failure, number, useAnswer} from "./parts.js";
import {source} from "./source.js";

const LONGEST_MILLISECONDS = 2000; // of a comparison, during which the page stands still

// The changes of two responses that are too long and too different to compare: all is changed.
const whole = (a, b) => [{removed: true, value: a.response}, {added: true, value: b.response}];

// The diff library. A report contains it; the page loads it at the first comparison.
function differ() {
  if (globalThis.Diff) return Promise.resolve(globalThis.Diff);
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = new URL("./vendor/diff.js", import.meta.url);
    script.onload = () => resolve(globalThis.Diff);
    script.onerror = () => reject(new Error("the server does not answer"));
    document.head.append(script);
  });
}

function Side({run, sample, changes, keep}) {
  return html`<section class="card"><header><h3><a href=${link("life", [run.name, sample.id])}>Sample ${sample.id}</a></h3>
      <span class="soft">${sample.kind === "eval" ? "version" : "iteration"} ${sample.step}</span><span class="last">${number(sample.score)}</span></header>
    <p class="soft">${number(sample.tokens)} tokens${sample.advantage === null || sample.advantage === undefined ? "" : `, advantage ${number(sample.advantage)}`}</p>
    <pre class="diff">${changes.filter((change) => !change[keep === "added" ? "removed" : "added"])
      .map((change) => (change[keep] ? html`<mark class=${keep}>${change.value}</mark>` : change.value))}</pre></section>`;
}

export function Compare({run, at}) {
  const [, first, second] = at.words;
  const {value, error} = useAnswer(async () => { // once: a comparison of long texts takes a while
    const [a, b, diff] = await Promise.all([source.sample(run.name, first), source.sample(run.name, second), differ()]);
    return [a, b, a && b && (diff.diffWordsWithSpace(a.response, b.response, {timeout: LONGEST_MILLISECONDS}) ?? whole(a, b))];
  }, [run.name, first, second]);
  if (error) return html`<${Failure} error=${error} />`;
  if (!value) return null;
  const [a, b, changes] = value;
  if (!a || !b) return html`<${Empty} title="No such sample">One of ${first} and ${second} is not in this run.<//>`;
  return html`<article><header class="life-head"><h2>Compare</h2></header>
    ${a.prompt === b.prompt ? html`<pre class="prompt-same" tabindex="0">${a.prompt}</pre>` : html`<p class="notice">The prompts differ.</p>`}
    <div class="sides"><${Side} run=${run} sample=${a} changes=${changes} keep="removed" /><${Side} run=${run} sample=${b} changes=${changes} keep="added" /></div></article>`;
}
