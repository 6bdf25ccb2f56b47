// The table of runs: their newest metrics and own settings, to sort and filter.

import {html, useState} from "./vendor/preact.js";
import {choose, link} from "./address.js";
import {CsvButton} from "./files.js";
import {WATCHED} from "./curves.js";
import {Empty, Failure, State, breakableLabel, number, seconds, useAnswer} from "./parts.js";
import {source} from "./source.js";

const FIRST_METRICS = 5; // columns until others are chosen
const SETTING = "config.";
const OPERATORS = {">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b, "=": (a, b) => a === b || String(a) === String(b), "!=": (a, b) => a !== b && String(a) !== String(b)};

// The value of a run in a column.
function valueOf(row, column) {
  if (column in row) return row[column];
  return column.startsWith(SETTING) ? row.settings[column.slice(SETTING.length)] : row.metrics[column];
}

const plain = (value) => (value !== null && typeof value === "object" ? JSON.stringify(value) : value);

// Whether a run matches every word: a part of its name, state, tags or note, or a condition such as accuracy>0.5 or config.group_size=8.
export function matches(row, text) {
  return text.split(/\s+/).filter(Boolean).every((word) => {
    const [, column, operator, wanted] = /^([^<>=!]+)(>=|<=|!=|>|<|=)(.+)$/.exec(word) ?? [];
    if (!column) return [row.name, row.state, row.tags, row.note].some((each) => each.toLowerCase().includes(word.toLowerCase()));
    const value = plain(valueOf(row, column));
    return value !== undefined && value !== null && OPERATORS[operator](value, typeof value === "number" ? Number(wanted) : wanted);
  });
}

// Runs by the values of a column; "-" before its name: the largest first. Runs without a value come last.
export function sorted(rows, sort) {
  const down = sort.startsWith("-"), column = down ? sort.slice(1) : sort;
  const missing = (value) => value === undefined || value === null;
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", {numeric: true}));
  return column ? [...rows].sort((a, b) => {
    const [x, y] = [a, b].map((row) => plain(valueOf(row, column)));
    return missing(x) || missing(y) ? missing(x) - missing(y) : (down ? -1 : 1) * order(x, y);
  }) : rows;
}

function Head({column, sort, remove, right}) {
  const down = sort === `-${column}`, up = sort === column;
  return html`<th class=${right ? "right" : ""} aria-sort=${down ? "descending" : up ? "ascending" : undefined}><button onClick=${() => choose({sort: down ? column : `-${column}`})}>${column}${down ? " ↓" : up ? " ↑" : ""}</button>
    ${remove && html`<button onClick=${remove} aria-label=${`Remove the column ${column}`} title="Remove the column">×</button>`}</th>`;
}

// A run's tags or note, as a field on the server's own machine. What is being typed stays while the page moves on.
function Note({row, name, saved}) {
  const [draft, setDraft] = useState(null);
  const [problem, setProblem] = useState("");
  if (!row.writable) return row[name];
  const save = async () => {
    if (draft === null) return;
    try {
      await source.annotate(row.name, {[name]: name === "tags" ? draft.split(",") : draft});
      await saved();
      setDraft(null);
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<span><input class="note" type="text" value=${draft ?? row[name]} onInput=${(event) => setDraft(event.target.value)} onChange=${save} aria-label=${`${name} of ${row.name}`} aria-invalid=${Boolean(problem)} placeholder=${name === "tags" ? "add tags" : "add a note"} />
    ${problem ? html`<small class="bad" role="alert">${problem}</small>` : null}</span>`;
}

export function RunTable({run, all, stamp, at}) {
  const [changed, setChanged] = useState(null); // the values after the newest change of a note
  const {value: asked, error} = useAnswer(async () => {
    const found = await source.finals();
    setChanged(null);
    return found;
  }, [stamp]);
  const value = changed ?? asked;
  const saved = async () => setChanged(await source.finals());
  if (!value) return html`<${Failure} error=${error} />`;
  const {find = "", sort = ""} = at.query;
  const rows = all.filter(({name}) => value[name]).map((each) => ({...each, ...value[each.name], tags: value[each.name].tags.join(", ")}));
  const known = [...new Set(rows.flatMap((row) => [...Object.keys(row.metrics), ...Object.keys(row.settings).map((key) => SETTING + key)]))].sort();
  const columns = at.query.columns?.split(",") ?? WATCHED.filter((name) => rows.some((row) => name in row.metrics && !row.zeros.includes(name))).slice(0, FIRST_METRICS);
  const head = ["name", "state", "tags", "note", "iteration", "seconds", ...columns];
  const shown = sorted(rows.filter((row) => matches(row, find)), sort);
  const numeric = (column) => shown.every((row) => ["number", "undefined"].includes(typeof (valueOf(row, column) ?? undefined)));
  const cell = (row, column) => {
    const each = plain(valueOf(row, column));
    return column === "seconds" ? seconds(each) : typeof each === "number" || each === undefined ? number(each) : String(each);
  };
  return html`<div class="toolbar" role="search">
      <label class="grow"><span class="hidden">Filter runs</span>
        <input id="search" type="search" placeholder="Filter: part of a name, accuracy>0.5 ( / )" value=${find} onInput=${(event) => choose({find: event.target.value})} /></label>
      <label>Column <select class="axis" value="" onChange=${(event) => choose({columns: [...columns, event.target.value].join()})}><option value="">add …</option>
        ${known.filter((name) => !columns.includes(name)).map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
      <span class="soft" aria-live="polite">${shown.length} of ${rows.length}</span>
      <${CsvButton} of="the table of runs" file="runs" rows=${() => [head, ...shown.map((row) => head.map((column) => plain(valueOf(row, column))))]} />
    </div><${Failure} error=${error} />
    ${shown.length ? html`<div class="card scroll" tabindex="0" role="region" aria-label="Table of runs"><table class="plain stacked table-runs">
      <thead><tr>${head.map((column, place) => html`<${Head} column=${column} sort=${sort} right=${place > 3 && numeric(column)} remove=${place > 5 && (() => choose({columns: columns.filter((each) => each !== column).join()}))} />`)}</tr></thead>
      <tbody>${shown.map((row) => html`<tr key=${row.name} class=${row.name === run.name ? "marked" : ""}>
        <td data-label="name"><a href=${link("curves", [], {run: row.name, runs: [...new Set([...(at.query.runs ?? "").split("/").filter(Boolean), row.name])].join("/")})}>${row.name}</a></td>
        <td data-label="state"><${State} run=${row} /></td>${["tags", "note"].map((name) => html`<td data-label=${name}><${Note} row=${row} name=${name} saved=${saved} /></td>`)}${head.slice(4).map((column) => html`<td class=${numeric(column) ? "right" : ""} data-label=${breakableLabel(column)}>${cell(row, column)}</td>`)}</tr>`)}</tbody></table></div>`
      : html`<${Empty} title="No run matches">Widen the filter.<//>`}`;
}
