// The page's curves. One request fetches the newer points of all curves that are needed at one moment. Small requests fetch whole curves, so
// that the first ones are visible early.

const LONGEST = 1600; // points; a longer curve is fetched again, which shortens it
const PIECE = 4; // metrics

export function curveStore(ask) {
  const known = new Map(); // "RUN\nMETRIC" -> {steps, mean, low, high}, never changed in place
  const kept = new Map(); // the runs' curves of a metric at the last call, so that an unchanged result is the same object
  const batches = new Map(); // "newer", or the number of a piece -> the request that is being collected
  const place = (run, metric) => `${run}\n${metric}`;

  async function send(name) {
    await new Promise((resolve) => setTimeout(resolve));
    const {wanted} = batches.get(name);
    batches.delete(name);
    const found = await ask(wanted);
    for (const [run, metrics] of Object.entries(found ?? {})) {
      for (const [metric, curve] of Object.entries(metrics)) {
        known.set(place(run, metric), wanted[run][metric] < 0 ? curve : joined(known.get(place(run, metric)), curve));
      }
    }
  }

  function batch(name) {
    if (!batches.has(name)) batches.set(name, {wanted: {}, sent: send(name)});
    return batches.get(name);
  }

  // Adds a metric of some runs to the collected requests. Returns the promises of their responses.
  function want(runs, metric) {
    const steps = Object.fromEntries(runs.map((run) => [run, known.get(place(run, metric))?.steps ?? []]));
    const isNewer = (run) => steps[run].length > 0 && steps[run].length < LONGEST;
    let piece = 0;
    while (Object.values(batches.get(piece)?.wanted ?? {}).some((metrics) => Object.keys(metrics).length >= PIECE)) piece += 1;
    return runs.map((run) => {
      const {wanted, sent} = batch(isNewer(run) ? "newer" : piece);
      (wanted[run] ??= {})[metric] = isNewer(run) ? steps[run].at(-1) : -1;
      return sent;
    });
  }

  // metric -> run -> curve
  async function curves(runs, metrics) {
    await Promise.all(metrics.flatMap((metric) => want(runs, metric)));
    return Object.fromEntries(metrics.map((metric) => [metric, same(metric, runs)]));
  }

  function same(metric, runs) {
    const now = Object.fromEntries(runs.filter((run) => known.has(place(run, metric))).map((run) => [run, known.get(place(run, metric))]));
    const before = kept.get(metric);
    const names = Object.keys(now);
    if (before && names.length === Object.keys(before).length && names.every((run) => before[run] === now[run])) return before;
    kept.set(metric, now);
    return now;
  }

  function forget(run) {
    for (const each of known.keys()) if (each.startsWith(`${run}\n`)) known.delete(each);
  }

  return {curves, forget};
}

// Appends later points to a curve. Points that both have count once.
export function joined(curve, more) {
  if (!curve) return more;
  const start = more.steps.findIndex((step) => step > curve.steps.at(-1));
  if (start < 0) return curve;
  const both = (name) => [...curve[name], ...more[name].slice(start)];
  if (!curve.low && !more.low) return {steps: both("steps"), mean: both("mean")};
  const banded = (each) => ({...each, low: each.low ?? each.mean, high: each.high ?? each.mean});
  const [first, last] = [banded(curve), banded(more)];
  return Object.fromEntries(["steps", "mean", "low", "high"].map((name) => [name, [...first[name], ...last[name].slice(start)]]));
}
