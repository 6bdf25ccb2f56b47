// One chart: the curves of one metric, over several runs, drawn by uPlot.

import {html, useEffect, useRef} from "./vendor/preact.js";
import {colour, number} from "./parts.js";

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

// A run's steps as positions on the x axis: themselves, or minutes since the run's first step.
function positions(curve, times) {
  if (!times || !times.steps.length) return curve.steps;
  const start = times.mean[0];
  let at = 0;
  return curve.steps.map((step) => {
    while (at + 1 < times.steps.length && times.steps[at] < step) at += 1;
    return (times.mean[at] - start) / 60;
  });
}

// uPlot's data and series for the curves of `runs`.
function plotted(runs, curves, options) {
  const tables = [], series = [{}], bands = [];
  for (const {name, place} of runs) {
    const curve = curves[name];
    const x = positions(curve, options.times?.[name]);
    const line = smoothed(curve.steps, curve.mean, options.smoothing);
    const stroke = colour(place), dash = place >= 8 ? [6, 3] : undefined;
    const columns = [x, line];
    series.push({label: name, stroke, width: 2, dash, points: {show: curve.steps.length < 2}, spanGaps: true});
    if (curve.low && !options.smoothing) {
      const own = series.length;
      columns.push(curve.high, curve.low);
      series.push({stroke: "transparent", points: {show: false}}, {stroke: "transparent", points: {show: false}});
      bands.push({series: [own, own + 1], fill: stroke + "26"});
    } else if (options.smoothing) {
      columns.push(curve.mean);
      series.push({stroke: stroke + "40", width: 1, points: {show: false}, spanGaps: true});
    }
    tables.push(columns);
  }
  return {data: tables.length ? uPlot.join(tables) : [[]], series, bands};
}

function tooltip(runs) {
  const box = document.createElement("div");
  box.className = "tooltip";
  return {
    hooks: {
      init: (plot) => plot.over.append(box),
      setCursor: (plot) => {
        const place = plot.cursor.idx;
        box.style.display = place === null || place === undefined || plot.cursor.left < 0 ? "none" : "block";
        if (box.style.display === "none") return;
        const lines = plot.series.flatMap((each, index) => (each.label && index && plot.data[index][place] !== null && plot.data[index][place] !== undefined
          ? [[each.label, plot.data[index][place], each._stroke ?? "currentColor"]] : []));
        box.replaceChildren(...[[null, plot.data[0][place]], ...lines].map(([label, value, stroke]) => {
          const row = document.createElement("div");
          const mark = document.createElement("i");
          mark.style.background = label === null ? "transparent" : stroke;
          const text = document.createElement("b");
          text.textContent = number(value);
          row.append(mark, label === null ? "" : `${runs.length > 1 ? label : ""} `, text);
          return row;
        }));
        const right = plot.cursor.left > plot.over.clientWidth / 2;
        box.style.left = right ? "auto" : `${plot.cursor.left + 12}px`;
        box.style.right = right ? `${plot.over.clientWidth - plot.cursor.left + 12}px` : "auto";
      },
    },
  };
}

// Draws curves in an element. Returns a function that removes them.
function draw(place, runs, curves, options, height) {
  const {data, series, bands} = plotted(runs, curves, options);
  const style = getComputedStyle(document.documentElement);
  const axis = {stroke: style.getPropertyValue("--soft"), grid: {stroke: style.getPropertyValue("--grid"), width: 1}, ticks: {show: false}, font: "11px system-ui, sans-serif"};
  const plot = new uPlot({
    width: place.clientWidth, height, series: series.map((each) => ({...each, _stroke: each.stroke})), bands,
    legend: {show: false},
    cursor: {points: {size: 6}, drag: {x: true, y: false}},
    scales: {x: {time: false}, y: {distr: options.log ? 3 : 1, range: options.log ? undefined : padded}},
    axes: [{...axis, size: 26, gap: 4, values: (_, values) => values.map((value) => (options.times ? `${number(value, 3)} min` : number(value)))},
      {...axis, size: 54, gap: 4, values: (_, values) => values.map((value) => (value === null ? "" : number(value, 3)))}],
    plugins: [tooltip(runs)],
  }, data, place);
  const resize = new ResizeObserver(() => plot.setSize({width: place.clientWidth, height}));
  resize.observe(place);
  return () => { resize.disconnect(); plot.destroy(); };
}

// Draws one chart per frame, so that the first ones are visible early. Returns a function that cancels.
const waiting = [];
function drawLater(draw) {
  waiting.push(draw);
  if (waiting.length === 1) requestAnimationFrame(drawNext);
  return () => { if (waiting.includes(draw)) waiting.splice(waiting.indexOf(draw), 1, () => {}); };
}

function drawNext() {
  waiting[0]();
  waiting.shift();
  if (waiting.length) requestAnimationFrame(drawNext);
}

export function Chart({title, runs, curves, options, height = 180}) {
  const place = useRef(null);
  const drawn = runs.filter(({name}) => curves[name]);
  const last = drawn.map(({name}) => `${name} ${number(curves[name].mean.at(-1))}`).join(", ");
  const remove = useRef(() => {});
  useEffect(() => drawLater(() => { // the old curves stay until the new ones are drawn
    remove.current();
    remove.current = draw(place.current, drawn, curves, options, height);
  }), [title, drawn.map(({name, place}) => name + place).join(), curves, options.smoothing, options.log, options.times, options.theme, height]);
  useEffect(() => () => remove.current(), []);
  return html`<div class="plot" ref=${place} role="img" aria-label=${`${title}; newest values: ${last}`}></div>`;
}

// A range with a margin, also around a constant.
function padded(_, low, high) {
  if (low === null) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  return [low - room, high + room];
}
