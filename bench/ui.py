"""The run page's slowest interaction in Chromium with 100,000 samples, 10,000 iterations and 20 runs.

    python bench/ui.py [--samples 100000] [--iterations 10000] [--runs 20] [--repeats 3]

One run is written by the trainer's own recorder, with all samples; the other runs have metrics only. Timed from the user's action to the
drawn result: first paint of a fresh browser, every chart of the big run, one chart over all runs, a search for a rare and for a frequent
text, and the life of a sample by its id. Each is repeated in a fresh browser and the shortest time counts; the processor time of the page's
server is printed too. `slowest_interaction_s` (<= 1.0) is the slowest of them. `recording_seconds` and `index_seconds` are the times of
writing the runs and of reading all their files for the first time.

`server_share` (<= 0.02) is the processor time per second of `polyreme ui` while a browser shows a run of that many iterations that
records one every second. `page_share_of_trainer` (<= 0.02) is the same for the trainer's own HTTP port: processor time per second of a
running trainer with the page open, minus that without.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from anyio.from_thread import start_blocking_portal
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.rundir.reader import RunReader
from polyreme.rundir.run_directory import RunFile, write_run_file
from support.configs import run_config
from support.seeded_run import SAMPLES, made_run, record_run
from support.simulated_run import simulated_run

TARGET = {"slowest_interaction_s": 1.0, "server_share": 0.02, "page_share_of_trainer": 0.02}
CHARTS = 12
LIVE_SECONDS = 20
SIZE: ViewportSize = {"width": 1600, "height": 950}
_START_MS = 120_000


def write_metrics(run_dir: Path, iterations: int, seed: int) -> None:
    """Writes a run with metrics and without samples."""
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
    """Serves the page of the runs in `folder`. Yields its address and the server's process."""
    command = [sys.executable, "-m", "polyreme", "ui", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        yield re.findall(r"https?://\S+/ui/", line)[0], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def processor_seconds(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def interactions(page: Page, address: str, server: psutil.Process, runs: int, samples: int) -> dict[str, tuple[float, float]]:
    """Returns the seconds and the server's processor seconds of each interaction."""
    found: dict[str, tuple[float, float]] = {}

    def timed(act: Callable[[], None]) -> tuple[float, float]:
        worked, began = processor_seconds(server), time.perf_counter()
        act()
        return time.perf_counter() - began, processor_seconds(server) - worked

    def drawn(name: str) -> None:
        page.locator(f'[aria-label^="{name};"] canvas').first.wait_for()

    def paint() -> None:
        page.goto(f"{address}#/curves?run=big")
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
        box = page.locator(".runs input:not(:checked)").first
        name = (box.get_attribute("aria-label") or "").split(" ")[-1]
        box.check()
        page.locator(f'[aria-label^="reward/mean;"][aria-label*="{name} "] canvas').first.wait_for()

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


def live_share(folder: Path, browser: Browser, iterations: int) -> float:
    """Returns processor seconds of `polyreme ui` per second, while a browser shows a run that records an iteration per second."""
    run_dir = folder / "live"
    write_metrics(run_dir, iterations, 1)
    (run_dir / "summary.json").write_text(json.dumps({"run": "live", "state": "running", "reason": ""}))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:-LIVE_SECONDS]))
    RunReader(run_dir).refresh()
    with served(run_dir) as (address, process):
        page = opened(browser, address)
        before, began = processor_seconds(process), time.perf_counter()
        for line in lines[-LIVE_SECONDS:]:
            with open(run_dir / "metrics.jsonl", "a") as file:
                file.write(line)
            page.wait_for_timeout(1000)
        share = (processor_seconds(process) - before) / (time.perf_counter() - began)
        page.context.close()
        return share


def opened(browser: Browser, address: str) -> Page:
    """Opens the page and waits until its curves are drawn."""
    page = browser.new_context(viewport=SIZE).new_page()
    page.goto(address)
    page.locator("section.chart canvas").first.wait_for(timeout=_START_MS)
    page.wait_for_timeout(3000)
    return page


def trainer_share(folder: Path, browser: Browser) -> float:
    """Returns the processor seconds per second that the page costs a trainer: a simulated run, first with and then without the page."""
    (folder / "trainer").mkdir()
    (folder / "redis").mkdir()
    with EmbeddedServer.start(folder / "redis") as redis, socket.socket() as free, start_blocking_portal() as portal:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        training = simulated_run(redis.url, "watched", folder / "trainer", iterations=10_000, train_seconds=0.5, http_port=port)
        with portal.wrap_async_context_manager(training) as live:
            config = portal.call(live.run.config)
            config.run_dir.mkdir(parents=True, exist_ok=True)
            (config.run_dir / "config.yaml").write_text(config.to_yaml())
            write_run_file(config.run_dir, RunFile("watched", redis.url, redis.url))
            portal.call(asyncio.sleep, LIVE_SECONDS)  # until it trains
            trainer = psutil.Process(live.children["train"].pid)
            page = opened(browser, f"http://127.0.0.1:{port}/ui/")
            shares = []
            for _ in range(2):
                before, began = processor_seconds(trainer), time.perf_counter()
                portal.call(asyncio.sleep, LIVE_SECONDS)
                shares.append((processor_seconds(trainer) - before) / (time.perf_counter() - began))
                page.context.close()
            return shares[0] - shares[1]


def measure(folder: Path, samples: int, iterations: int, runs: int, repeats: int) -> dict[str, Any]:
    groups = -(-samples // (iterations * SAMPLES))  # at least `samples` samples
    began = time.perf_counter()
    record_run(folder / "runs" / "big", iterations, 0, groups)
    for number in range(1, runs):
        write_metrics(folder / "runs" / f"other-{number:02d}", iterations, number)
    (folder / "runs" / "big" / "run.json").touch()  # the newest run comes first
    recording, began = time.perf_counter() - began, time.perf_counter()
    for path in sorted((folder / "runs").iterdir()):
        RunReader(path).refresh()
    index = time.perf_counter() - began
    chromium = os.environ.get("POLYREME_CHROMIUM") or shutil.which("chromium")
    rounds = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with served(folder / "runs") as (address, process):
            for _ in range(repeats):
                context = browser.new_context(viewport=SIZE)
                rounds.append(interactions(context.new_page(), address, process, runs, groups * iterations * SAMPLES))
                context.close()
        share, of_trainer = live_share(folder, browser, iterations), trainer_share(folder, browser)
        browser.close()
    return {
        "interactions": {name: tuple(map(min, zip(*(each[name] for each in rounds), strict=True))) for name in rounds[0]},
        "recording_seconds": round(recording, 1),
        "index_seconds": round(index, 1),
        "server_share": round(share, 4),
        "page_share_of_trainer": round(of_trainer, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.samples, options.iterations, options.runs, options.repeats)
    timed = found.pop("interactions")
    table = Table("interaction", "seconds", "of the server's processor")
    for name, (seconds, worked) in timed.items():
        table.add_row(name, f"{seconds:.3f}", f"{worked:.3f}")
    Console().print(table)
    slowest = round(max(seconds for seconds, _ in timed.values()), 3)
    seconds = {name: round(each, 3) for name, (each, _) in timed.items()}
    print(
        json.dumps(
            {"bench": "ui", "slowest_interaction_s": slowest, **found, "seconds": seconds, "target": TARGET, **vars(options)}
        )
    )


if __name__ == "__main__":
    main()
