// Files that the browser saves: tables as CSV, charts as CSV and PNG.

import {html, useState} from "./vendor/preact.js";

// Rows as CSV (RFC 4180): UTF-8, numbers in full.
export function csv(rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",") + "\r\n").join("");
}

export function save(name, content, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], {type}));
  link.download = name.replace(/[^\w.-]+/g, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// A button that saves rows. `rows` returns them, or a promise of them, the names of the columns first.
export function CsvButton({file, rows, of}) {
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const run = async () => {
    setBusy(true);
    setProblem("");
    try {
      save(`${file}.csv`, csv(await rows()), "text/csv");
    } catch (error) {
      setProblem(error.message);
    }
    setBusy(false);
  };
  return html`<button class="quiet csv" onClick=${run} disabled=${busy} title=${problem || "Save as CSV"} aria-label=${`Save ${of} as CSV`}>${problem ? "failed" : "CSV"}</button>`;
}
