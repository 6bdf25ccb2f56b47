// The samples browser: filters, a list with keyboard navigation, and two selected samples to compare.

import {html, useEffect, useLayoutEffect, useState} from "./vendor/preact.js";
import {choose, go, link, own} from "./address.js";
import {CsvButton} from "./files.js";
import {Empty, Failure, number, useAnswer} from "./parts.js";
import {source} from "./source.js";

const LIMIT = 50, LARGEST_PAGE = 500, MOST_SAMPLES = 50000;
const ORDERS = [["newest", "newest first"], ["oldest", "oldest first"], ["-score", "highest score"], ["score", "lowest score"], ["-tokens", "longest"],
  ["tokens", "shortest"], ["-advantage", "highest advantage"], ["advantage", "lowest advantage"], ["logprob", "least likely"]];

function Field({label, name, filter, change, ...rest}) {
  return html`<label class="field"><span>${label}</span><input name=${name} value=${filter[name] ?? ""} onInput=${(event) => change(name, event.target.value)} ...${rest} /></label>`;
}

function Choice({label, name, options, filter, change}) {
  return html`<label class="field"><span>${label}</span><select name=${name} value=${filter[name] ?? options[0][0]} onChange=${(event) => change(name, event.target.value)}>
    ${options.map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></label>`;
}

// A text that is applied when typing pauses.
function useSettled(value, milliseconds) {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), milliseconds);
    return () => clearTimeout(timer);
  }, [value]);
  return settled;
}

// All samples that match a filter, with their whole texts, as rows: those up to now, since later ones would move the pages.
async function everySample(run, {offset: _, ...filter}) {
  const found = [];
  for (let total = 1; found.length < total;) {
    const page = await source.samples(run.name, {...filter, last: filter.last || run.iteration, offset: found.length, limit: LARGEST_PAGE, whole: 1});
    if (page.total > MOST_SAMPLES) throw new Error(`${page.total} samples match; a file has at most ${MOST_SAMPLES}. Narrow the filter.`);
    if (!page.samples.length) break;
    found.push(...page.samples);
    total = page.total;
  }
  const names = ["id", "kind", "step", "score", "tokens", "finish", "advantage", "logprob", "prompt", "label", "response"];
  return [names, ...found.map((sample) => names.map((name) => sample[name]))];
}

function Row({sample, run, marked, chosen, toggle, scores}) {
  const width = scores.high > scores.low ? (sample.score - scores.low) / (scores.high - scores.low) : sample.score > 0 ? 1 : 0;
  return html`<tr class=${marked ? "marked" : ""} data-id=${sample.id}>
    <td class="choose"><input type="checkbox" checked=${chosen} onChange=${toggle} aria-label=${`Choose sample ${sample.id} to compare`} /></td>
    <td class="id"><a href=${link("life", [run.name, sample.id])}>${sample.id}</a></td>
    <td class="right" data-label="iteration">${sample.step}</td>
    <td class="score" data-label="score"><span style=${`--share: ${width}`}>${number(sample.score, 3)}</span></td>
    <td class="right" data-label="tokens">${number(sample.tokens)}</td>
    <td class="right" data-label="advantage">${number(sample.advantage, 3)}</td>
    <td class="text prompt" title=${sample.prompt}>${sample.prompt}</td>
    <td class="text" title=${sample.response}>${sample.response || html`<em>empty</em>`}${sample.finish === "length" ? html` <span class="tag">cut off</span>` : null}</td>
  </tr>`;
}

export function Samples({run, at}) {
  const {sample: markedId, chosen: chosenIds = "", ...filter} = own(at);
  const settled = useSettled(JSON.stringify(filter), 150);
  const chosen = chosenIds.split("~").filter(Boolean);
  const offset = Number(filter.offset ?? 0);
  const {value, error} = useAnswer(() => source.samples(run.name, {...JSON.parse(settled), limit: LIMIT}), [settled, run.name, run.samples]);
  const change = (name, text) => choose({[name]: text, offset: "", sample: ""});
  const found = value?.samples ?? [];
  const marked = Math.max(0, found.findIndex(({id}) => id === markedId));
  const mark = (place) => found[place] && choose({sample: found[place].id});
  const toggle = (id) => choose({chosen: (chosen.includes(id) ? chosen.filter((each) => each !== id) : [...chosen, id].slice(-2)).join("~")});
  const compare = () => chosen.length === 2 && go("compare", [run.name, ...chosen]);
  useLayoutEffect(() => { // before the list is shown, so that no key applies to the previous list
    const pressed = (event) => {
      if (/^(input|select)$/i.test(event.target.tagName) && event.target.type !== "checkbox") return;
      if (event.key === "j") mark(marked + 1);
      else if (event.key === "k") mark(marked - 1);
      else if (event.key === "Enter" && found[marked] && event.target === document.body) go("life", [run.name, found[marked].id]);
      else if (event.key === "x" && found[marked]) toggle(found[marked].id);
      else if (event.key === "c") compare();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
  useEffect(() => { document.querySelector("tr.marked")?.scrollIntoView({block: "nearest"}); }, [marked]);
  const values = found.map((sample) => sample.score);
  const scores = {low: Math.min(0, ...values), high: Math.max(1, ...values)};
  const props = {filter, change};
  return html`
    <form class="filters" role="search" onSubmit=${(event) => event.preventDefault()}>
      <label class="field grow"><span>Text in prompt, label or response</span>
        <input id="search" type="search" value=${filter.text ?? ""} onInput=${(event) => change("text", event.target.value)} placeholder="Search ( / )" /></label>
      <details class="more" open=${matchMedia("(min-width: 40rem)").matches}><summary>More filters</summary><div>
      <${Choice} label="Kind" name="kind" options=${[["", "all"], ["train", "trained"], ["eval", "evaluation"]]} ...${props} />
      <${Field} label="From iteration" name="first" type="number" min="0" ...${props} />
      <${Field} label="To" name="last" type="number" min="0" ...${props} />
      <${Field} label="Score from" name="score_min" type="number" step="any" ...${props} />
      <${Field} label="To" name="score_max" type="number" step="any" ...${props} />
      <${Field} label="Tokens from" name="tokens_min" type="number" min="0" ...${props} />
      <${Field} label="To" name="tokens_max" type="number" min="0" ...${props} />
      <${Choice} label="End" name="finish" options=${[["", "any"], ["stop", "stopped"], ["length", "cut off"]]} ...${props} />
      <${Choice} label="Order" name="order" options=${ORDERS} ...${props} />
      </div></details>
    </form>
    <div class="summary" aria-live="polite">
      <span>${value ? `${number(value.total)} sample${value.total === 1 ? "" : "s"}` : "…"}</span>
      ${filter.prompt ? html`<button class="tag" onClick=${() => change("prompt", "")}>one prompt ×</button>` : null}
      <span class="grow"></span>
      <${CsvButton} of="the samples" file=${`${run.name}-samples`} rows=${() => everySample(run, filter)} />
      <button onClick=${compare} disabled=${chosen.length !== 2}>Compare${chosen.length ? ` (${chosen.join(", ")})` : ""}</button>
      <button disabled=${offset === 0} onClick=${() => choose({offset: Math.max(0, offset - LIMIT) || "", sample: ""})}>Previous</button>
      <button disabled=${!value || offset + LIMIT >= value.total} onClick=${() => choose({offset: offset + LIMIT, sample: ""})}>Next</button>
    </div>
    <${Failure} error=${error} />
    ${value && !value.total ? html`<${Empty} title=${run.samples ? "Nothing matches" : "No sample yet"}>
        ${run.samples ? "Widen the filter." : "Samples appear when the first iteration is recorded. Stages have none."}<//>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Samples"><table class="samples"><thead><tr><th><span class="hidden">Choose</span></th><th>Sample</th><th class="right">Iteration</th><th>Score</th>
        <th class="right">Tokens</th><th class="right">Advantage</th><th>Prompt</th><th>Response</th></tr></thead>
        <tbody>${found.map((sample, place) => html`<${Row} key=${sample.id} sample=${sample} run=${run} marked=${place === marked} scores=${scores}
          chosen=${chosen.includes(sample.id)} toggle=${() => toggle(sample.id)} />`)}</tbody></table></div>`}`;
}
