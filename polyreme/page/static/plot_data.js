// The points of a chart: curves of one metric over an x axis, as uPlot's columns and as rows for a file. Pure.

// The x axes: [name, title, metric that holds the positions]. Any metric is one too.
export const AXES = [["", "step", null], ["seconds", "time", "axis/seconds"], ["tokens", "tokens", "axis/tokens"], ["samples", "samples", "axis/samples"]];
const UNITS = [[/^online\//, "sessions"], [/tokens_per_second$/, "tokens/s"], [/samples_per_second$/, "samples/s"], [/_tps$/, "tokens/s per device"], [/^(time|timing)\/|(^|[/_])seconds$/, "s"], [/bytes$/, "bytes"], [/\/cores$/, "cores"],
  [/^(response|prompt)_length\/|^tokens\/|carried_tokens$/, "tokens"], [/_samples$|staleness\/samples/, "samples"], [/_groups$/, "groups"], [/_prompts$/, "prompts"], [/^episode\/turns/, "turns"], [/^episode\/tool_(calls|errors)$/, "calls"],
  [/(^|[/_])kl(_loss)?$|mismatch_kl_|entropy$|logps|^sft_.*loss$|^ptx_loss$|canary_difference$/, "nats"], [/^reward(_weighted)?\/|^critic\/(score|rewards|returns|values)|_rewards\/mean$|(^|[/_])score$|\/(margin|mean_reward)$/, "score"], [/^staleness\/(mean|max)/, "iterations"]];

export const axisMetric = (x) => (x ? AXES.find(([name]) => name === x)?.[2] ?? x : null);
const grows = (x) => AXES.some(([name]) => name === x);

// A metric's name with its unit, for an axis; where that is longer than `most` characters, its unit or the last part of its name.
export function title(metric, most = Infinity) {
  const unit = UNITS.find(([pattern]) => pattern.test(metric))?.[1];
  const whole = unit ? `${metric} (${unit})` : metric;
  return whole.length <= most ? whole : unit ?? metric.slice(metric.lastIndexOf("/") + 1);
}

// The title and the unit's size of an x axis whose largest value is `largest`.
export function axisOf(x, largest, isStage) {
  if (!x) return {title: isStage ? "step" : "iteration", unit: 1};
  if (x !== "seconds") return {title: grows(x) ? AXES.find(([name]) => name === x)[1] : title(x), unit: 1};
  const [unit, name] = largest > 4 * 3600 ? [3600, "hours"] : largest > 600 ? [60, "minutes"] : [1, "seconds"];
  return {title: name, unit};
}

// An exponential moving average over steps, without bias at the start. `weight` 0: none.
export function smoothed(steps, values, weight) {
  if (!weight) return values;
  let sum = 0, mass = 0, last = steps[0];
  return values.map((value, place) => {
    const decay = weight ** Math.max(1, steps[place] - last);
    sum = sum * decay + (1 - decay) * value;
    mass = mass * decay + (1 - decay);
    last = steps[place];
    return place === 0 ? value : sum / mass;
  });
}

// The x of each step: what was spent by then, between two steps in proportion; or the other metric at the step, and for curves that were
// reduced to few points, in the points that contain the step. Nothing was spent at the step `start`. null: unknown.
export function positions(steps, along, x, start = 0) {
  if (!x) return steps;
  let at = 0;
  return steps.map((step) => {
    if (!along) return null;
    while (at < along.steps.length && along.steps[at] < step) at += 1;
    if (at === along.steps.length) return null;
    if (along.steps[at] === step || !grows(x)) return along.steps[at] === step || along.low ? along.mean[at] : null;
    const [from, spent] = at ? [along.steps[at - 1], along.mean[at - 1]] : [Math.min(start, step), 0];
    return spent + (along.mean[at] - spent) * (step - from) / (along.steps[at] - from || 1);
  });
}

// The points that a fork continues, of its parent and the parent's parents: {steps, mean, x}, and what was `spent` by then.
function past({parent, origin}, curves, along, x) {
  if (!parent) return {steps: [], mean: [], x: [], spent: 0};
  const older = past(parent, curves, along, x), curve = curves[parent.name] ?? {steps: [], mean: []};
  const at = positions(curve.steps, along[parent.name], x, parent.origin?.iteration);
  const kept = curve.steps.map((step, place) => place).filter((place) => curve.steps[place] <= origin.iteration && at[place] !== null);
  const spent = x && grows(x) ? older.spent + (positions([origin.iteration], along[parent.name], x, parent.origin?.iteration)[0] ?? 0) : 0;
  return {spent, steps: [...older.steps, ...kept.map((place) => curve.steps[place])], mean: [...older.mean, ...kept.map((place) => curve.mean[place])],
    x: [...older.x, ...kept.map((place) => at[place] + older.spent)]};
}

// The curves with their x, one for each run: {run, steps, x, line, mean, low, high, before}. Points without an x are left out.
export function lines(runs, curves, {smoothing, x, along = {}}) {
  return runs.filter(({name}) => curves[name]).map((run) => {
    const curve = curves[run.name], before = past(run, curves, along, x);
    const at = positions(curve.steps, along[run.name], x, run.origin?.iteration);
    const kept = curve.steps.map((step, place) => place).filter((place) => at[place] !== null);
    const pick = (values) => values && kept.map((place) => values[place]);
    return {run, before, steps: pick(curve.steps), x: pick(at).map((value) => value + before.spent), line: pick(smoothed(curve.steps, curve.mean, smoothing)),
      mean: pick(curve.mean), low: pick(curve.low), high: pick(curve.high)};
  });
}

// uPlot's columns for tables [x, values, ...]. A growing x is shared; any other is one row per point, ordered by x.
export function columns(tables, x) {
  if (!tables.length) return [[]];
  if (grows(x)) return uPlot.join(tables);
  const width = tables.reduce((sum, table) => sum + table.length - 1, 1);
  const rows = [];
  let first = 1;
  for (const table of tables) {
    table[0].forEach((value, place) => {
      const row = Array(width).fill(null);
      row[0] = value;
      table.slice(1).forEach((column, offset) => { row[first + offset] = column[place]; });
      rows.push(row);
    });
    first += table.length - 1;
  }
  rows.sort((a, b) => a[0] - b[0]);
  return Array.from({length: width}, (_, column) => rows.map((row) => row[column]));
}

// A chart's rows for a file, the names of the columns first.
export function chartRows(metric, runs, curves, options) {
  const own = options.x ? [axisMetric(options.x)] : [];
  const rows = lines(runs, curves, options).flatMap(({run, steps, x, mean, low, high}) =>
    steps.map((step, place) => [run.name, step, ...(own.length ? [x[place]] : []), mean[place], (low ?? mean)[place], (high ?? mean)[place]]));
  return [["run", "step", ...own, metric, "low", "high"], ...rows];
}
