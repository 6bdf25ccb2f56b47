// The address: everything that is chosen on the page stands after the #, so that a reload or a copied link shows the same view.

import {useEffect, useState} from "./vendor/preact.js";

export const SHARED = ["run", "runs"]; // chosen for all views
const WRITE_MILLISECONDS = 200; // browsers limit how often an address may change
const listeners = new Set();
const left = new Map(); // view -> its query when it was left, to which its tab returns
let timer = null;
let now = parsed();

// A part of an address. A copied one may be cut within a character.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// "#/samples?text=x" -> {view: "samples", words: [], query: {text: "x"}}
function parsed() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...words] = path.split("/").map(decoded);
  const ofSample = ["life", "compare"].includes(view) ? {run: words[0]} : {};
  return {view: view || "curves", words, query: {...Object.fromEntries(new URLSearchParams(query ?? "")), ...ofSample}};
}

const filled = (query) => Object.fromEntries(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null && value !== false));
const only = (query, wanted) => Object.fromEntries(Object.entries(query).filter(([key]) => SHARED.includes(key) === wanted));

// A link to a view. It keeps what is chosen for all views.
export function link(view, words = [], query = {}) {
  const tail = new URLSearchParams(filled({...only(now.query, true), ...query})).toString();
  return `#/${[view, ...words].map(encodeURIComponent).join("/")}${tail ? "?" + tail : ""}`;
}

export const tab = (view) => link(view, [], view === now.view ? only(now.query, false) : left.get(view));

// Opens a link. What was chosen is written first: written later, it would replace the new address.
export function open(target) {
  if (timer) write();
  location.hash = target.slice(1);
}

export const go = (view, words = [], query = {}) => open(link(view, words, query));

function change(next) {
  if (next.view !== now.view) left.set(now.view, only(now.query, false));
  now = next;
  for (const each of listeners) each(now);
}

function write() {
  clearTimeout(timer);
  timer = null;
  history.replaceState(null, "", link(now.view, now.words, now.query));
}

// Changes values of the current view's query; an empty value or false removes one.
export function choose(changes) {
  change({...now, query: filled({...now.query, ...changes})});
  clearTimeout(timer);
  timer = setTimeout(write, WRITE_MILLISECONDS);
}

addEventListener("hashchange", () => { clearTimeout(timer); timer = null; change(parsed()); });
for (const leaving of ["pagehide", "click"]) addEventListener(leaving, () => timer && write(), true);

export function useAddress() {
  const [at, setAt] = useState(now);
  useEffect(() => { listeners.add(setAt); setAt(now); return () => listeners.delete(setAt); }, []);
  return at;
}

// A view's own part of the query.
export const own = (at) => only(at.query, false);
