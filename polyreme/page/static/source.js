// The source of the page's data: the server, or the values embedded in an offline report. Both answer the same requests.

import {curveStore} from "./curve_store.js";

const embedded = document.getElementById("embedded");

export const offline = embedded !== null;

export class Unauthorized extends Error {}

const TOKEN = "polyreme-token";
export const setToken = (token) => sessionStorage.setItem(TOKEN, token);

async function get(path, parameters = [], options = {}) {
  const query = new URLSearchParams(parameters.filter(([, value]) => value !== "" && value !== undefined && value !== null));
  const token = sessionStorage.getItem(TOKEN);
  const answer = await fetch(`api/${path}${query.size ? "?" + query : ""}`, {...options, headers: {...options.headers, ...(token ? {authorization: `Bearer ${token}`} : {})}});
  if (answer.status === 401) throw new Unauthorized();
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error((await answer.json()).detail ?? `the server answered ${answer.status}`);
  return answer.json();
}

const run = encodeURIComponent;

const store = curveStore((wanted) => get("curves", [], {method: "POST", body: JSON.stringify(wanted)}));
const ids = new Map();

let first = offline ? null : get("runs"); // requested while the rest of the page is loading
first?.catch(() => {}); // `listed` awaits it, and its caller shows a failure; until then it must not count as unhandled

// The list of runs. A directory may contain a new run, whose curves then start again.
async function listed() {
  const asked = first ?? get("runs");
  first = null;
  const runs = await asked;
  for (const each of runs) {
    if (ids.has(each.name) && ids.get(each.name) !== each.run) store.forget(each.name);
    ids.set(each.name, each.run);
  }
  return runs;
}

const server = {
  runs: listed,
  finals: () => get("finals"),
  annotate: (name, notes) => get(`runs/${run(name)}/notes`, [], {method: "POST", body: JSON.stringify(notes), headers: {"content-type": "application/json"}}),
  curves: store.curves,
  details: (name) => get(`runs/${run(name)}`),
  samples: (name, filter) => get(`runs/${run(name)}/samples`, Object.entries(filter)),
  sample: (name, id) => get(`runs/${run(name)}/samples/${run(id)}`),
  timeline: (name, first, last) => get(`runs/${run(name)}/timeline`, [["first", first], ["last", last]]),
  servers: (name) => get(`runs/${run(name)}/servers`),
};

function report(data) {
  const pick = (names, metric) => Object.fromEntries(names.filter((name) => metric in data.curves[name]).map((name) => [name, data.curves[name][metric]]));
  return {
    runs: async () => data.runs,
    curves: async (runs, metrics) => Object.fromEntries(metrics.map((metric) => [metric, pick(runs, metric)])),
    details: async (name) => data.details[name] ?? null,
    samples: async (name, filter) => filtered(data.samples[name] ?? [], filter),
    sample: async (name, id) => (data.samples[name] ?? []).find((each) => each.id === id) ?? null,
    finals: async () => data.finals,
    timeline: async (name) => data.timelines[name],
    servers: async () => [],
  };
}

const ORDERS = {
  newest: (a, b) => b.step - a.step || a.number - b.number,
  oldest: (a, b) => a.step - b.step || a.number - b.number,
};

function order(name) {
  if (ORDERS[name]) return ORDERS[name];
  const down = name.startsWith("-");
  const field = down ? name.slice(1) : name;
  return (a, b) => (down ? -1 : 1) * ((a[field] ?? 0) - (b[field] ?? 0)) || b.step - a.step;
}

// The same filter as SampleQuery's, over a report's samples.
export function filtered(samples, filter) {
  const bounds = [["first", "step", 1], ["last", "step", -1], ["score_min", "score", 1], ["score_max", "score", -1],
    ["tokens_min", "tokens", 1], ["tokens_max", "tokens", -1]];
  const text = (filter.text ?? "").toLowerCase();
  const found = samples.filter((each) =>
    ["kind", "finish"].every((field) => !filter[field] || each[field] === filter[field]) &&
    bounds.every(([key, field, sign]) => !filter[key] || sign * (each[field] - Number(filter[key])) >= 0) &&
    (!filter.prompt || each.prompt_number === Number(filter.prompt)) &&
    (!text || [each.prompt, each.response, each.label].some((part) => part.toLowerCase().includes(text))));
  found.sort(order(filter.order || "newest"));
  const offset = Number(filter.offset ?? 0);
  return {total: found.length, offset, samples: found.slice(offset, offset + Number(filter.limit ?? 50))};
}

export const source = offline ? report(JSON.parse(embedded.textContent)) : server;
