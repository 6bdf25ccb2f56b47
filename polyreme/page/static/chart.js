// One chart: the curves of one metric, over several runs, drawn by uPlot.

import {html, useEffect, useRef} from "./vendor/preact.js";
import {bytes, colour, number} from "./parts.js";
import {AXES, axisOf, columns, lines, title} from "./plot_data.js";

const POWERS = Array.from({length: 50}, (_, power) => 2 ** power); // steps of an axis of bytes

// uPlot's data and series for the curves of `runs`.
function plotted(runs, curves, options) {
  const tables = [], series = [{}], bands = [];
  const scatter = options.x !== "" && !AXES.some(([name]) => name === options.x);
  for (const {run, x, line, mean, low, high, before} of lines(runs, curves, options)) {
    const stroke = colour(run.place), dash = run.place >= 8 ? [6, 3] : undefined;
    const table = [x, line], dots = {show: true, size: 5, fill: stroke};
    const hidden = {stroke: "transparent", points: {show: false}};
    series.push({label: run.name, stroke, width: 2, dash, points: scatter ? dots : {show: x.length < 2}, spanGaps: true, ...(scatter ? {paths: () => null} : {})});
    if (scatter) {
      tables.push(table);
      continue;
    }
    if (low && !options.smoothing) {
      const own = series.length;
      table.push(high, low);
      series.push(hidden, hidden);
      bands.push({series: [own, own + 1], fill: stroke + "26"});
    } else if (options.smoothing) {
      table.push(mean);
      series.push({stroke: stroke + "40", width: 1, points: {show: false}, spanGaps: true});
    }
    tables.push(table);
    if (before.x.length) { // drawn on from its parent
      tables.push([[...before.x, ...x.slice(0, 1)], [...before.mean, ...line.slice(0, 1)]]);
      series.push({stroke: stroke + "a0", width: 1.5, dash: [3, 4], points: {show: false}, spanGaps: true});
    }
  }
  return {data: columns(tables, options.x), series, bands};
}

function tooltip(metric, runs, axis) {
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
        box.replaceChildren(...[[null, plot.data[0][place] / axis.unit], ...lines].map(([label, value, stroke]) => {
          const row = document.createElement("div");
          const mark = document.createElement("i");
          mark.style.background = label === null ? "transparent" : stroke;
          const text = document.createElement("b");
          text.textContent = label !== null && metric.endsWith("bytes") ? bytes(value) : number(value);
          row.append(mark, label === null ? `${axis.title} ` : `${runs.length > 1 ? label : ""} `, text);
          return row;
        }));
        const right = plot.cursor.left > plot.over.clientWidth / 2;
        box.style.left = right ? "auto" : `${plot.cursor.left + 12}px`;
        box.style.right = right ? `${plot.over.clientWidth - plot.cursor.left + 12}px` : "auto";
      },
    },
  };
}

// Dragging chooses the part of the x axis that is shown, a double click the whole.
function zooming(zoomTo) {
  return {hooks: {
    setSelect: (plot) => { if (plot.select.width > 2) zoomTo([plot.select.left, plot.select.left + plot.select.width].map((at) => plot.posToVal(at, "x"))); },
    init: (plot) => plot.over.addEventListener("dblclick", () => zoomTo(null)),
  }};
}

// Draws curves in an element. Returns a function that removes them, and one that returns them as a picture.
function draw(place, metric, runs, curves, options, height) {
  const {data, series, bands} = plotted(runs, curves, options);
  const style = getComputedStyle(document.documentElement), soft = style.getPropertyValue("--soft");
  const largest = data[0].reduce((most, value) => Math.max(most, value ?? 0), 0);
  const x = axisOf(options.x, largest, runs.every((run) => run.is_stage));
  const axis = {stroke: soft, grid: {stroke: style.getPropertyValue("--grid"), width: 1}, ticks: {show: false}, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 15, labelGap: 0};
  const incrs = x.unit > 1 ? [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].map((each) => each * x.unit) : undefined;
  const plot = new uPlot({
    width: place.clientWidth, height, series: series.map((each) => ({...each, _stroke: each.stroke})), bands,
    legend: {show: false},
    cursor: {points: {size: 6}, drag: {x: true, y: false, setScale: false}},
    scales: {x: {time: false, ...(options.zoom ? {range: () => options.zoom} : {})}, y: {distr: options.log ? 3 : 1, range: options.log ? undefined : padded}},
    axes: [{...axis, size: 22, gap: 4, label: x.title, incrs, values: (_, values) => values.map((value) => number(value / x.unit))},
      {...axis, size: metric.endsWith("bytes") ? 62 : 50, gap: 4, label: title(metric, (height - 40) / 6.5), ...(metric.endsWith("bytes") ? {incrs: POWERS, values: (_, values) => values.map((value) => (value === null ? "" : bytes(value)))}
        : {values: (_, values) => values.map((value) => (value === null ? "" : number(value, 3)))})}],
    plugins: [tooltip(metric, runs, x), zooming(options.zoomTo)],
  }, data, place);
  const resize = new ResizeObserver(() => plot.setSize({width: place.clientWidth, height}));
  resize.observe(place);
  return {remove: () => { resize.disconnect(); plot.destroy(); }, picture: () => picture(plot.ctx.canvas, metric, runs)};
}

// A chart with its title and the names of its runs, as a canvas.
function picture(drawn, metric, runs) {
  const style = getComputedStyle(document.documentElement), scale = devicePixelRatio || 1, line = 18 * scale;
  const canvas = document.createElement("canvas");
  Object.assign(canvas, {width: drawn.width + 16 * scale, height: drawn.height + line * (runs.length + 1) + 16 * scale});
  const pen = canvas.getContext("2d");
  const write = (text, at, colour, weight = "") => { pen.fillStyle = colour; pen.font = `${weight} ${13 * scale}px system-ui, sans-serif`; pen.fillText(text, 8 * scale, at); };
  pen.fillStyle = style.getPropertyValue("--panel");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  write(metric, line, style.getPropertyValue("--ink"), "600");
  pen.drawImage(drawn, 8 * scale, line + 8 * scale);
  runs.forEach((run, place) => write(`— ${run.name}`, drawn.height + line * (place + 2) + 8 * scale, colour(run.place)));
  return canvas;
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

// `handle`: a ref that gets a function, which returns the chart as a canvas.
export function Chart({title, runs, curves, options, height = 180, handle}) {
  const place = useRef(null);
  const drawn = runs.filter(({name}) => curves[name]);
  const last = drawn.map(({name}) => `${name} ${number(curves[name].mean.at(-1))}`).join(", ");
  const remove = useRef(() => {});
  useEffect(() => drawLater(() => { // the old curves stay until the new ones are drawn
    remove.current();
    const made = draw(place.current, title, drawn, curves, options, height);
    remove.current = made.remove;
    handle.current = made.picture;
  }), [title, drawn.map(({name, place, parent}) => name + place + parent?.name).join(), curves, options.smoothing, options.log, options.x, options.along, options.zoom?.join(), options.theme, height]);
  useEffect(() => () => remove.current(), []);
  return html`<div class="plot" ref=${place} role="img" aria-label=${`${title}; newest values: ${last}`}></div>`;
}

// A range with a margin, also around a constant.
function padded(_, low, high) {
  if (low === null) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  return [low - room, high + room];
}
