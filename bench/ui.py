"""The run page's slowest interaction in Chromium, beside 100,000 samples, 10,000 iterations and 20 runs.

    python bench/ui.py [--samples 100000] [--iterations 10000] [--runs 20]

One run is recorded by the trainer's own recorder, with all samples; the other runs have metrics only. Timed from the user's action to the
drawn result: first paint of a fresh page, every chart of the big run, one chart over all runs, a search for a rare and for a frequent
text, and the life of a sample by its id. `slowest_interaction_s` (<= 1.0) is the slowest of them. `index_seconds` is what reading all files
for the first time took. `server_share` (<= 0.02) is the processor time of the page's server per second, while a browser looks at a run
that records an iteration every second.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from playwright.sync_api import Page, expect, sync_playwright
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from polyreme.cli.reader import RunReader
from support.configs import run_config
from support.seeded_run import SAMPLES, made_run, record_run

TARGET = {"slowest_interaction_s": 1.0, "server_share": 0.02}
CHARTS = 12
LIVE_SECONDS = 20


def write_metrics(run_dir: Path, iterations: int, seed: int) -> None:
    """A run with metrics and without samples."""
    run_dir.mkdir(parents=True)
    config = run_config(run_dir.parent, name=run_dir.name, output_dir=run_dir.parent, iterations=iterations)
    (run_dir / "config.yaml").write_text(config.to_yaml())
    (run_dir / "run.json").write_text(json.dumps({"run_id": run_dir.name, "redis": "embedded"}))
    (run_dir / "summary.json").write_text(json.dumps({"run": run_dir.name, "state": "done", "reason": ""}))
    with open(run_dir / "metrics.jsonl", "w") as file:
        for number, (record, _, _) in enumerate(made_run(iterations, seed, 1e9, 0)):
            file.write(json.dumps({"run": run_dir.name, "id": f"{number}-0", **record}) + "\n")


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The address of the page of the runs in `folder`, and its server's process."""
    command = [sys.executable, "-m", "polyreme", "ui", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        yield re.findall(r"https?://\S+/ui/", line)[0], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def interactions(page: Page, address: str, runs: int, samples: int) -> dict[str, float]:
    """Seconds of each interaction."""
    found: dict[str, float] = {}

    def drawn(name: str) -> None:
        page.locator(f'[aria-label^="{name};"] canvas').first.wait_for()

    def paint() -> None:
        page.goto(f"{address}?run=big#/curves?run=big")
        drawn("reward/mean")

    found["first paint"] = timed(paint)
    metrics = page.evaluate("fetch('api/runs').then(a => a.json()).then(runs => runs.find(run => run.name === 'big').metrics)")
    names = [name for name in metrics if name != "time"]
    for name in names[:: max(1, len(names) // CHARTS)]:

        def chart(name: str = name) -> None:
            page.locator("#search").fill(name)
            drawn(name)

        found[f"chart {name}"] = timed(chart)
    page.locator("#search").fill("reward/mean")
    drawn("reward/mean")
    for _ in range(runs - 2):
        page.locator(".runs input:not(:checked)").first.check()
    page.wait_for_load_state("networkidle")

    def overlay() -> None:
        page.locator(".runs input:not(:checked)").check()
        expect(page.locator('[aria-label^="reward/mean;"]')).to_have_attribute(
            "aria-label", re.compile(rf"(.*other-.*,){{{runs - 1}}}|big")
        )
        page.wait_for_load_state("networkidle")

    if runs > 1:
        found["one more run over the others"] = timed(overlay)
    page.goto(f"{address}#/samples?run=big")
    page.locator("tr.marked").wait_for()
    for kind, text in (("rare", "no such text"), ("frequent", "What is 12")):

        def search(text: str = text) -> None:
            with page.expect_response(re.compile("/samples\\?.*text=" + text.split(" ")[0])):
                page.locator("#search").fill(text)
            page.locator(".empty, tr.marked").first.wait_for()

        found[f"search, {kind}"] = timed(search)

    def life() -> None:
        page.goto(f"{address}#/life/big/{samples // SAMPLES // 2}.1")
        page.locator("article.life").wait_for()

    found["life of a sample"] = timed(life)
    return found


def live_share(folder: Path, page_of: Callable[[str], Page]) -> float:
    """Processor seconds of the server per second, while a browser looks at a run that records an iteration per second."""
    run_dir = folder / "live"
    write_metrics(run_dir, 500, 1)
    (run_dir / "summary.json").write_text(json.dumps({"run": "live", "state": "running", "reason": ""}))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:-LIVE_SECONDS]))
    with served(run_dir) as (address, process):
        page = page_of(address)
        page.locator("section.chart canvas").first.wait_for()
        page.wait_for_timeout(3000)
        before, began = sum(process.cpu_times()[:2]), time.perf_counter()
        for line in lines[-LIVE_SECONDS:]:
            with open(run_dir / "metrics.jsonl", "a") as file:
                file.write(line)
            page.wait_for_timeout(1000)
        return float((sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - began))


def measure(folder: Path, samples: int, iterations: int, runs: int) -> dict[str, Any]:
    groups = max(1, samples // iterations // SAMPLES)
    record_run(folder / "runs" / "big", iterations, 0, groups)
    for number in range(1, runs):
        write_metrics(folder / "runs" / f"other-{number:02d}", iterations, number)
    (folder / "runs" / "big" / "run.json").touch()  # the newest run comes first
    index = timed(lambda: [RunReader(path).refresh() for path in sorted((folder / "runs").iterdir())])
    chromium = os.environ.get("POLYREME_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with served(folder / "runs") as (address, _):
            page = browser.new_page(viewport={"width": 1600, "height": 950})
            page.goto(address)
            page.wait_for_function(
                "() => fetch('api/runs').then(a => a.json()).then(runs => runs.every(run => run.indexed))", timeout=300_000
            )
            seconds = interactions(browser.new_page(viewport={"width": 1600, "height": 950}), address, runs, samples)

        def opened(address: str) -> Page:
            page = browser.new_page(viewport={"width": 1600, "height": 950})
            page.goto(address)
            return page

        share = live_share(folder, opened)
        browser.close()
    return {"seconds": seconds, "index_seconds": round(index, 2), "server_share": round(share, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.samples, options.iterations, options.runs)
    table = Table("interaction", "seconds")
    for name, seconds in found["seconds"].items():
        table.add_row(name, f"{seconds:.2f}")
    Console().print(table)
    slowest = round(max(found["seconds"].values()), 3)
    del found["seconds"]
    print(json.dumps({"bench": "ui", "slowest_interaction_s": slowest, **found, "target": TARGET, **vars(options)}))


if __name__ == "__main__":
    main()
