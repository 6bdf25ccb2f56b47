// The page: the list of runs, the views, keyboard, theme and address. The address (after #) selects the view.

import {html, render, useEffect, useLayoutEffect, useRef, useState} from "./vendor/preact.js";
import {choose, go, link, open, tab, useAddress} from "./address.js";
import {Curves} from "./curves.js";
import {COLOURS, Empty, Failure, State, number, useAnswer} from "./parts.js";
import {Unauthorized, offline, setToken, source} from "./source.js";

// A view whose module is loaded when it is first shown, so that the curves appear sooner.
function later(name, load) {
  let View = null;
  return function Later(props) {
    const {error} = useAnswer(async () => { View ??= (await load())[name]; }, []);
    return View ? html`<${View} ...${props} />` : html`<${Failure} error=${error} />`;
  };
}

const PAGES = {
  curves: Curves,
  samples: later("Samples", () => import("./samples.js")),
  life: later("Life", () => import("./life.js")),
  compare: later("Compare", () => import("./compare.js")),
  timeline: later("Timeline", () => import("./timeline.js")),
  servers: later("Servers", () => import("./servers.js")),
  events: later("Events", () => import("./events.js")),
  runs: later("RunTable", () => import("./run_table.js")),
  setup: later("Setup", () => import("./setup.js")),
};
const POLL_SECONDS = 2;
const VIEWS = [["curves", "Curves"], ["samples", "Samples"], ["timeline", "Timeline"], ["servers", "Servers"], ["events", "Events"], ["setup", "Configuration"], ["runs", "Runs"]];
const KEYS = [["1 – 7", "change the view"], ["/", "search"], ["j, k", "next, previous sample"], ["Enter", "open a sample"], ["x", "select a sample to compare"],
  ["c", "compare the two selected samples"], ["Esc", "back"], ["d", "dark or light"], ["?", "this list"]];

function useTheme() {
  const [theme, setTheme] = useState(localStorage.getItem("polyreme-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  document.documentElement.dataset.theme = theme;
  const change = () => setTheme((now) => {
    const next = now === "dark" ? "light" : "dark";
    localStorage.setItem("polyreme-theme", next);
    return next;
  });
  return [theme, change];
}

function useRuns() {
  const [state, setState] = useState({runs: null, error: null});
  useLayoutEffect(() => { // runs before the first, empty frame
    let timer = null;
    async function poll() {
      if (document.visibilityState === "visible") {
        try {
          setState({runs: await source.runs(), error: null});
        } catch (error) {
          setState((old) => ({...old, error}));
        }
      }
      if (!offline) timer = setTimeout(poll, POLL_SECONDS * 1000);
    }
    poll();
    return () => clearTimeout(timer);
  }, []);
  return state;
}

// The views' tabs. The current one is in sight.
function Tabs({current}) {
  const list = useRef(null);
  useEffect(() => {
    const chosen = list.current.querySelector("[aria-current]");
    if (chosen) list.current.scrollLeft = chosen.offsetLeft - list.current.offsetLeft - (list.current.clientWidth - chosen.clientWidth) / 2;
  }, [current]);
  return html`<nav class="tabs" aria-label="Views" ref=${list}>${VIEWS.map(([view, title]) => html`<a href=${tab(view)} aria-current=${current === view ? "page" : undefined}>${title}</a>`)}</nav>`;
}

function RunList({runs, chosen, setChosen, focus, setFocus}) {
  const toggle = (name) => setChosen(chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name]);
  return html`<ul class="runs">${runs.map((run, place) => html`<li key=${run.name} class=${run.name === focus ? "focus" : ""}>
    <input type="checkbox" checked=${chosen.includes(run.name)} onChange=${() => toggle(run.name)} aria-label=${`Show the curves of ${run.name}`}
      style=${`--mark: var(--run-${place % COLOURS})`} />
    <button onClick=${() => setFocus(run.name)} aria-pressed=${run.name === focus} title=${run.run}>
      <span class="name">${run.name}</span>
      <span class="progress">${run.iterations ? `${number(run.iteration)} / ${number(run.iterations)}` : number(run.iteration)}${run.indexed ? "" : " · reading"}</span>
      <${State} run=${run} />
    </button></li>`)}</ul>`;
}

function Login() {
  const submit = (event) => {
    event.preventDefault();
    setToken(new FormData(event.target).get("token"));
    location.reload();
  };
  return html`<main class="login"><h1>Polyreme</h1><form onSubmit=${submit}>
    <label>Token of this run's services <input name="token" type="password" autocomplete="off" required autofocus /></label>
    <button class="primary">Open</button></form></main>`;
}

function Help({close}) {
  const button = useRef(null);
  useEffect(() => button.current.focus(), []);
  return html`<dialog open class="help" aria-label="Keys"><h2>Keys</h2><dl>${KEYS.map(([key, what]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl>
    <button ref=${button} onClick=${close}>Close</button></dialog>`;
}

function App() {
  const {runs, error} = useRuns();
  const at = useAddress();
  const [help, setHelp] = useState(false);
  const [theme, changeTheme] = useTheme();
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") { document.activeElement?.blur(); setHelp(false); return; }
      if (/^(input|select|textarea)$/i.test(event.target.tagName) && event.target.type !== "checkbox" && event.target.type !== "range") return;
      if (VIEWS[Number(event.key) - 1]) open(tab(VIEWS[Number(event.key) - 1][0]));
      else if (event.key === "/") { event.preventDefault(); document.getElementById("search")?.focus(); }
      else if (event.key === "d") changeTheme();
      else if (event.key === "?") setHelp((shown) => !shown);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  const first = runs?.[0]?.name;
  useEffect(() => { if (first && !at.query.run) choose({run: first}); }, [first, at]); // so that a copied address means this run
  if (error instanceof Unauthorized) return html`<${Login} />`;
  if (runs === null) return html`<main class="login"><h1>Polyreme</h1><p>${error ? `The server does not answer: ${error.message}` : ""}</p></main>`;
  const focus = at.query.run ? runs.find((run) => run.name === at.query.run) : runs[0];
  const names = at.query.runs?.split("/") ?? (offline ? runs.map((run) => run.name) : focus ? [focus.name] : []); // no name contains a /
  const placed = runs.map((run, place) => ({...run, place}));
  for (const run of placed) run.parent = run.origin && placed.find((each) => each.run === run.origin.run);
  const shown = placed.filter((run) => names.includes(run.name));
  const setChosen = (chosen) => choose({runs: chosen.join("/") || "/"});
  const select = (name) => {
    const chosen = {run: name, runs: names.includes(name) ? at.query.runs : [...names, name].join("/")};
    if (["life", "compare"].includes(at.view)) go("samples", [], chosen); else choose(chosen);
  };
  const stamp = runs.map((run) => `${run.iteration}:${run.samples}:${run.metrics.length}:${run.state}`).join();
  const props = {run: focus, runs: shown, all: placed, stamp, theme, at};
  const View = PAGES[at.view] ?? Curves;
  const current = {life: "samples", compare: "samples"}[at.view] ?? at.view;
  return html`
    <header class="top">
      <a class="brand" href=${link("curves")}>Polyreme</a>
      ${focus && html`<div class="title"><h1>${focus.name}</h1><${State} run=${focus} />
        <span class="iteration">iteration ${number(focus.iteration)}${focus.iterations ? ` of ${number(focus.iterations)}` : ""}</span></div>`}
      <button class="quiet" onClick=${changeTheme} aria-label=${`Change to ${theme === "dark" ? "light" : "dark"} colours`} title="Dark or light (d)">${theme === "dark" ? "☀" : "☾"}</button>
      <button class="quiet" onClick=${() => setHelp(true)} aria-label="Keys" title="Keys (?)">?</button>
    </header>
    ${focus?.iterations ? html`<progress class="bar" max=${focus.iterations} value=${focus.iteration} aria-label="Progress of the run"></progress>` : html`<div class="bar"></div>`}
    <aside aria-label="Runs"><details class="fold" open=${matchMedia("(min-width: 56rem)").matches}><summary>Runs <span class="count">${runs.length}</span></summary>
      <${RunList} runs=${runs} chosen=${names} setChosen=${setChosen} focus=${focus?.name} setFocus=${select} /></details></aside>
    <main>
      <${Tabs} current=${current} />
      ${error && html`<p class="failure" role="status">The server does not answer; the page shows the last values.</p>`}
      ${focus?.reason && focus.state !== "done" ? html`<p class=${`notice ${focus.state}`}>${focus.reason}</p>` : null}
      ${(focus?.activities ?? []).map((text) => html`<p class="notice activity" role="status">${text}</p>`)}
      ${focus ? html`<${View} ...${props} />` : html`<${Empty} title=${at.query.run ? `No run ${at.query.run}` : "No run"}>There is no such run in this directory.<//>`}
    </main>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

render(html`<${App} />`, document.getElementById("app"));
