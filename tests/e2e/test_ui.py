"""The run page in a real browser: for recorded runs, for a training run, and as an offline report.

POLYREME_SCREENSHOTS=docs/images writes the screenshots of the guide there. By default they go to the test's own directory.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from polyreme.cli.reader.index_rows import sample_id
from polyreme.cli.run_directory import RunFile, owned, write_run_file
from support.seeded_run import record_run
from support.simulated_run import simulated_run

CHROMIUM = os.environ.get("POLYREME_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 60
SERIOUS = ("serious", "critical")
VIEWS = ("curves", "samples", "life/first/{telling}", "compare/first/1.0/41.1", "timeline", "servers", "events", "setup")
PICTURES = {"curves": "light", "samples": "light", "life": "dark", "timeline": "light"}
WIDE, NARROW = {"width": 1600, "height": 950}, {"width": 375, "height": 800}
expect.set_options(timeout=SECONDS * 1000)

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium: apt-get install chromium, or set POLYREME_CHROMIUM; .ci/run installs it"
    ),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ui") / "runs"
    record_run(folder / "second", iterations=24, seed=2)
    record_run(folder / "first", iterations=30, seed=1)
    return folder


@contextmanager
def served(*words: str, **environment: str) -> Iterator[str]:
    """Runs `polyreme ui`. Yields its address."""
    command = [sys.executable, "-m", "polyreme", "ui", *words, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"https?://\S+/ui/", line)
        assert found, line
        yield found[0]
    finally:
        process.terminate()
        process.wait(SECONDS)
        process.stdout.close()


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with served(str(runs)) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """The messages of the pages' consoles."""
    return []


@pytest.fixture
def open_page(browser: Browser, complaints: list[str]) -> Iterator[Any]:
    """Opens an address. The test fails when the page writes to the console."""
    contexts: list[BrowserContext] = []

    def opened(address: str, size: Any = WIDE, theme: Any = "light", **options: Any) -> Page:
        context = browser.new_context(viewport=size, color_scheme=theme, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(SECONDS * 1000)
        page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not complaints


def telling_sample(run_dir: Path) -> dict[str, Any]:
    """The first sample that two versions sampled and whose first reward call failed."""
    files = sorted((run_dir / "samples").glob("iteration_*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return next(line for line in lines if len(line["calls"]) > 1 and len(line["spans"]) > 1)


def ready(page: Page) -> None:
    """Waits until the view has its data."""
    page.wait_for_load_state("networkidle")
    expect(page.locator("main nav")).to_be_visible()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("POLYREME_SCREENSHOTS") or tmp_path_factory.mktemp("pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize(("size", "theme"), [(WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")])
def test_every_view_fits_and_is_accessible(
    address: str, open_page: Any, runs: Path, pictures: Path, size: Any, theme: str
) -> None:
    page, telling = open_page(address, size, theme), telling_sample(runs / "first")
    for view in (view.format(telling=sample_id(telling)) for view in VIEWS):
        page.goto(f"{address}#/{view}")
        ready(page)
        expect(page.locator("main > :not(nav)").first).to_be_visible()
        found = Axe().run(page).response["violations"]
        serious = [(each["id"], [node["html"] for node in each["nodes"]]) for each in found if each["impact"] in SERIOUS]
        assert not serious, view
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is wider than the window"
        name = view.partition("/")[0]
        if size == WIDE and PICTURES.get(name) == theme:
            page.screenshot(path=pictures / f"ui-{name}.png")
        if (size, theme) == (NARROW, "dark") and view == "curves":
            page.screenshot(path=pictures / "ui-narrow.png")


def test_curves_of_several_runs_are_smoothed_searched_and_enlarged(address: str, open_page: Any) -> None:
    page = open_page(address)
    ready(page)
    expect(page.locator("section.chart").first.locator("canvas")).to_be_visible()
    page.get_by_label("Show the curves of second").check()
    plot = page.get_by_role("img", name="reward/mean")
    expect(plot).to_have_attribute("aria-label", re.compile("first .*second|second .*first"))
    page.locator("input[type=range]").fill("0.9")
    page.get_by_label("log scale").check()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("grad norm")
    expect(page.locator("section.chart")).to_have_count(1)
    page.get_by_label("Larger: grad_norm").click()
    expect(page.locator("section.chart.large")).to_be_visible()


STORE = """async () => {
  const module = document.querySelector('link[rel=modulepreload][href$="curve_store.js"]').href;
  const {curveStore} = await import(module);
  const asked = [], values = {a: [1, 2, 3], b: [1, 2]};
  const store = curveStore(async (wanted) => {
    asked.push(JSON.parse(JSON.stringify(wanted)));
    return Object.fromEntries(Object.entries(wanted).map(([run, metrics]) => [run, Object.fromEntries(Object.entries(metrics).map(([metric, after]) => {
      const steps = values[run].filter((step) => step > after);
      return [metric, {steps, mean: steps.map((step) => 10 * step)}];
    }).filter(([, curve]) => curve.steps.length))]));
  });
  const first = (await store.curves(["a", "b"], ["x"])).x;
  const second = (await store.curves(["a", "b"], ["x"])).x;
  values.a.push(4);
  const [third, same] = await Promise.all([store.curves(["a", "b"], ["x"]), store.curves(["a"], ["x"])]);
  store.forget("a");
  const fourth = (await store.curves(["a"], ["x"])).x;
  return {asked, first, kept: first === second, third: third.x, same: same.x, fourth};
}"""


def test_the_page_asks_only_for_points_that_it_lacks(address: str, open_page: Any) -> None:
    found = open_page(address).evaluate(STORE)
    assert found["asked"] == [
        {"a": {"x": -1}, "b": {"x": -1}},
        {"a": {"x": 3}, "b": {"x": 2}},
        {"a": {"x": 3}, "b": {"x": 2}},
        {"a": {"x": -1}},
    ]
    assert found["kept"], "curves without new points are not drawn again"
    longer = {"steps": [1, 2, 3, 4], "mean": [10, 20, 30, 40]}
    assert found["first"]["a"]["steps"] == [1, 2, 3]
    assert found["third"] == {"a": longer, "b": found["first"]["b"]} and found["same"] == found["fourth"] == {"a": longer}


def test_the_keyboard_walks_through_samples(address: str, open_page: Any, runs: Path) -> None:
    page = open_page(address)
    ready(page)
    page.keyboard.press("2")
    expect(page.locator("tr.marked")).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("What is 12 + 10")
    page.keyboard.press("Escape")
    expect(page.locator("table.samples tbody tr td.prompt", has_text="What is 12 + 10?").first).to_be_visible()
    expect(page.locator("table.samples tbody tr td.prompt", has_not_text="What is 12 + 10?")).to_have_count(0)
    for key in ("x", "j", "x"):
        page.keyboard.press(key)
    chosen = page.locator("td.choose input:checked")
    expect(chosen).to_have_count(2)
    page.keyboard.press("c")
    expect(page.locator(".sides .card")).to_have_count(2)
    page.go_back()
    expect(page.locator("tr.marked")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=re.compile(r"Sample \d+\.\d"))).to_be_visible()
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()


def test_the_life_of_a_sample_is_what_the_run_recorded(address: str, open_page: Any, runs: Path) -> None:
    sample = telling_sample(runs / "first")
    page = open_page(f"{address}#/life/first/{sample_id(sample)}")
    life = page.locator("article.life")
    for text in (
        sample["prompt"],
        sample["response"],
        sample["replicas"][-1],
        "timeout",
        f"version {sample['spans'][0][0]}",
    ):
        expect(life.get_by_text(text).first).to_be_visible()
    facts = dict(zip(life.locator("dt").all_text_contents(), life.locator("dd").all_text_contents(), strict=True))
    assert facts["iteration"] == str(sample["iteration"]) and facts["optimizer steps"] == "1"
    assert float(facts["advantage"]) == pytest.approx(sample["advantage"], abs=1e-3)
    assert float(facts["share of the loss"]) == pytest.approx(sample["weight"], abs=1e-4)
    expect(life.locator(".tokens span")).to_have_count(sample["tokens"])
    for kind in ("advantage", "version"):
        life.get_by_label(kind, exact=True).check()
        expect(life.locator(".legend").first).to_contain_text(kind)


def test_the_page_asks_for_the_token_of_the_services(open_page: Any, complaints: list[str], runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "second", tmp_path / "second")
    config = tmp_path / "second" / "config.yaml"
    config.write_text(re.sub(r"(?m)^security:.*$", "security: {token_env: RUN_TOKEN}", config.read_text()))
    assert "RUN_TOKEN" in config.read_text()
    with served(str(tmp_path / "second"), RUN_TOKEN="secret-3") as address:
        page = open_page(address)
        page.get_by_label("Token").fill("secret-3")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_role("heading", name="second", exact=True)).to_be_visible()
        page.close()
    assert all("401" in text for text in complaints), complaints
    complaints.clear()


def test_a_report_needs_no_server(runs: Path, open_page: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    subprocess.run(
        [sys.executable, "-m", "polyreme", "report", str(runs), "-o", str(report)], check=True, timeout=300, capture_output=True
    )
    page = open_page(f"file://{report}", offline=True)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    expect(page.locator("section.chart canvas").first).to_be_visible()
    expect(page.get_by_role("img", name="reward/mean")).to_have_attribute(
        "aria-label", re.compile("first .*second|second .*first")
    )
    page.keyboard.press("2")
    expect(page.locator("tr.marked")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator("article.life")).to_be_visible()
    page.keyboard.press("3")
    expect(page.locator(".timeline svg")).to_be_visible()
    assert not [url for url in asked if not url.startswith(("file:", "data:"))]


def test_a_run_that_trains_moves_on_the_page(redis_url: str, run_id: str, tmp_path: Path, open_page: Any) -> None:
    training = simulated_run(redis_url, run_id, tmp_path, iterations=200, train_seconds=0.2)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(training) as live:
        config = portal.call(live.run.config)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        write_run_file(config.run_dir, RunFile(run_id, redis_url, redis_url))
        (config.run_dir / "config.yaml").write_text(config.to_yaml())
        with served(str(config.run_dir)) as address, owned(config.run_dir):  # as `polyreme up` owns it
            page = open_page(address)
            for number in (2, 5):  # it continues by itself
                moved = re.compile(rf"^({number}|\d\d+) / 200")
                expect(page.locator(".runs .progress")).to_have_text(moved)
            page.goto(f"{address}#/servers")
            listed = page.get_by_role("region", name="Registered servers").locator("tbody tr")
            expect(listed.first).to_be_visible(timeout=SECONDS * 1000)
            page.goto(f"{address}#/samples?order=oldest")
            page.locator("td.id a").first.click()
            facts = page.locator("article.life dl.facts")
            for part in ("replica", "advantage", "share of the loss", "mean log-probability"):
                expect(facts.get_by_text(part, exact=True).first).to_be_visible()
            expect(page.locator("article.life table", has_text="server")).to_contain_text("ok")
            page.close()
