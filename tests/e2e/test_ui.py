"""The run page in a real browser: for recorded runs, for a training run, and as an offline report.

POLYREME_SCREENSHOTS=docs/images writes the screenshots of the guide there. By default they go to the test's own directory.
"""

import csv
import io
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

from polyreme.rundir.reader.index_rows import sample_id
from polyreme.rundir.run_directory import RunFile, owned, write_run_file
from support.seeded_run import record_run
from support.simulated_run import simulated_run

CHROMIUM = os.environ.get("POLYREME_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 60
SERIOUS = ("serious", "critical")
VIEWS = (
    "curves",
    "samples",
    "life/first/{telling}",
    "compare/first/1.0/41.1",
    "timeline",
    "servers",
    "events",
    "setup",
    "setup?all=1",
    "runs",
)
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
    record_run(folder.parent / "episodes" / "tools", iterations=2, seed=3, episodes=True)
    return folder  # both are recorded here, since a started browser has an event loop


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
def episodes(runs: Path) -> Iterator[str]:
    with served(str(runs.parent / "episodes")) as address:
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
        inside = "(tab) => tab.getBoundingClientRect().left >= 0 && tab.getBoundingClientRect().right <= innerWidth"
        assert page.locator("nav [aria-current]").evaluate(inside), f"the tab of {view} is out of sight"
        cut = "(tables) => tables.filter((table) => table.scrollWidth > table.parentElement.clientWidth + 1).length"
        assert page.locator("table.stacked").evaluate_all(cut) == 0, f"a table of {view} is cut"
        name = re.split("[/?]", view)[0]
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


def test_what_is_chosen_survives_a_reload(address: str, open_page: Any) -> None:
    page = open_page(address)
    ready(page)
    page.get_by_label("Show the curves of second").check()
    page.locator("input[type=range]").fill("0.6")
    page.get_by_label("x axis").select_option("seconds")
    page.get_by_label("Larger: entropy").first.click()
    page.locator("summary", has_text="checkpoint").click()
    ready(page)
    over = page.locator("section.chart.large .u-over").first
    page.wait_for_function("document.querySelector('section.chart.large .u-over')?.clientWidth > 800")
    over.scroll_into_view_if_needed()
    box = page.evaluate("document.querySelector('section.chart.large .u-over').getBoundingClientRect().toJSON()")
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 60, steps=4)
    page.mouse.up()
    expect(page.get_by_role("button", name="Whole axis")).to_be_visible()
    page.keyboard.press("5")
    page.get_by_role("button", name="saved").click()
    page.keyboard.press("1")
    page.reload()
    expect(page.get_by_label("Show the curves of second")).to_be_checked()
    expect(page.locator("output")).to_have_text("0.60")
    expect(page.get_by_label("x axis")).to_have_value("seconds")
    expect(page.locator("section.chart.large", has_text="entropy").first).to_be_visible()
    expect(page.locator("details.group[open]")).to_have_count(2)
    expect(page.get_by_role("button", name="Whole axis")).to_be_visible()
    other = open_page(page.url)  # a colleague opens the copied address
    expect(other.get_by_label("Show the curves of second")).to_be_checked()
    expect(other.get_by_label("x axis")).to_have_value("seconds")


def saved_file(page: Page, button: str) -> bytes:
    """The file that a button saves."""
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    return Path(download.value.path()).read_bytes()


def saved_rows(page: Page, button: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(saved_file(page, button).decode(), newline="")))


def test_charts_and_tables_are_saved(address: str, open_page: Any) -> None:
    page = open_page(f"{address}#/curves?run=first&runs=first/second&x=samples")
    expect(page.get_by_role("img", name="reward/mean").locator("canvas")).to_be_visible()
    rows = saved_rows(page, "Save reward/mean as CSV")
    assert {row["run"] for row in rows} == {"first", "second"} and len(rows) == 54
    assert [float(row["axis/samples"]) for row in rows[:3]] == [16.0, 32.0, 48.0]
    assert saved_file(page, "Save reward/mean as PNG").startswith(b"\x89PNG")
    page.goto(f"{address}#/samples?run=first&kind=eval")
    ready(page)
    assert len(saved_rows(page, "Save the samples as CSV")) == 20


def test_the_table_of_runs_is_sorted_and_filtered(address: str, open_page: Any) -> None:
    page = open_page(f"{address}#/runs")
    names = page.locator(".table-runs tbody td:first-child")
    expect(names).to_have_count(2)
    page.get_by_role("button", name="accuracy", exact=True).click()
    expect(names).to_have_text(["first", "second"])
    page.get_by_role("button", name=re.compile("^accuracy")).first.click()
    expect(names).to_have_text(["second", "first"])
    page.keyboard.press("/")
    page.keyboard.type("iteration>24 done")
    expect(names).to_have_text(["first"])


def test_tags_and_notes_are_kept(address: str, open_page: Any, runs: Path) -> None:
    page = open_page(f"{address}#/runs?find=first")
    page.get_by_label("tags of first").fill("paper, base")
    page.get_by_label("note of first").fill("the best so far")
    page.keyboard.press("Tab")
    for _ in range(2):
        ready(page)
        expect(page.get_by_label("note of first")).to_have_value("the best so far")
        expect(page.get_by_label("tags of first")).to_have_value("paper, base")
        page.reload()
    assert json.loads((runs / "first" / "notes.json").read_text()) == {"tags": ["paper", "base"], "note": "the best so far"}


def test_the_configuration_shows_what_is_not_a_default(address: str, open_page: Any) -> None:
    page = open_page(f"{address}#/setup?run=first")
    keys = page.locator(".keys td:first-child")
    expect(keys.filter(has_text="trainer.optimizer.lr")).to_have_count(1)
    few = keys.count()
    assert keys.evaluate_all("(cells) => cells.every((cell) => getComputedStyle(cell).whiteSpace === 'nowrap')")
    page.locator("summary", has_text="summary").click()
    expect(page.locator(".keys tr", has_text="updated").locator("td").nth(1)).to_have_text(re.compile(r"\d{4}, "))
    page.get_by_label("also defaults").check()
    page.locator("summary", has_text="trainer").click()
    expect(keys.filter(has_text="trainer.")).not_to_have_count(few)
    assert keys.count() > few


@pytest.mark.parametrize(("size", "theme"), [(WIDE, "light"), (NARROW, "dark")])
def test_an_episode_is_a_conversation(episodes: str, open_page: Any, pictures: Path, size: Any, theme: str) -> None:
    page = open_page(f"{episodes}#/life/tools/0.2", size, theme)
    messages = page.locator(".conversation > li")
    expect(messages).to_have_count(5)
    expect(page.locator(".conversation > li.sampled")).to_have_count(2)
    call = messages.nth(2)
    expect(call).to_contain_text("turn 1")
    expect(call).to_contain_text('add({"a": 2, "b": 3})')
    expect(call.locator(".bad")).to_have_text("expected two numbers")
    expect(page.locator(".steps")).to_contain_text("at the most turns")
    page.get_by_label("log-probability").check()
    shaded = "(tokens) => tokens.map((token) => token.style.background !== '')"
    assert page.locator("p.tokens > span").evaluate_all(shaded)[:6] == [True, True, True, False, False, False]
    found = Axe().run(page).response["violations"]
    assert not [each["id"] for each in found if each["impact"] in SERIOUS]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if size == WIDE:
        page.screenshot(path=pictures / "ui-episode.png", full_page=False)


def test_colours_of_events_say_their_severity(address: str, open_page: Any) -> None:
    page = open_page(f"{address}#/events?run=first")
    colour = {
        kind: page.locator(".events li", has=page.locator(".tag", has_text=kind)).first.evaluate(
            "(e) => getComputedStyle(e).color"
        )
        for kind in ("alarm", "restart", "saved", "notice")
    }
    assert colour["notice"] == colour["saved"] and len(set(colour.values())) == 3, colour


def test_a_replica_that_answers_an_evaluation_is_not_idle(address: str, open_page: Any) -> None:
    page = open_page(f"{address}#/timeline?run=first&count=6")
    lanes = page.locator(".timeline svg g", has=page.locator(".lane", has_text="rollout-"))
    expect(lanes).to_have_count(2)
    for lane in lanes.all():
        expect(lane.locator(".bar-evaluate")).to_have_count(3)
    expect(page.locator(".timeline text", has_text=re.compile("^seconds$"))).to_be_visible()
    page.goto(f"{address}#/servers?run=first")
    expect(page.get_by_role("region", name="Replicas")).to_contain_text("ended")


POINTS = """async () => {
  const {lines, columns} = await import(document.querySelector('link[rel=modulepreload][href$="plot_data.js"]').href);
  const parent = {name: "p", place: 0}, fork = {name: "f", place: 1, parent, origin: {iteration: 2}};
  const curves = {p: {steps: [1, 2, 3], mean: [5, 6, 7]}, f: {steps: [3, 4], mean: [8, 9]}};
  const along = {p: {steps: [1, 2, 3], mean: [10, 20, 30]}, f: {steps: [3, 4], mean: [4, 8]}};
  const plain = ({x, line, before}) => ({x, line, before: before.x});
  const sparse = {f: {steps: [0, 2, 4], mean: [1, 2, 3]}}, own = {f: {steps: [1, 3, 4], mean: [0.5, 0.25, 0.5]}};
  const [scattered] = lines([{name: "f", place: 0}], sparse, {smoothing: 0, x: "loss", along: own});
  return {step: plain(lines([fork], curves, {smoothing: 0, x: ""})[0]), tokens: plain(lines([fork], curves, {smoothing: 0, x: "tokens", along})[0]),
    between: lines([parent], {p: {steps: [0, 1, 2], mean: [1, 2, 3]}}, {smoothing: 0, x: "tokens", along: {p: {steps: [2, 4], mean: [20, 40]}}})[0].x,
    scattered: columns([[scattered.x, scattered.line]], "loss"), same: columns([[[2, 1, 2], [7, 8, 9]]], "loss")};
}"""


def test_points_stand_where_they_were_measured(address: str, open_page: Any) -> None:
    found = open_page(address).evaluate(POINTS)
    assert found["step"] == {"x": [3, 4], "line": [8, 9], "before": [1, 2]}
    assert found["tokens"] == {"x": [24, 28], "line": [8, 9], "before": [10, 20]}, "a fork continues what its parent had spent"
    assert found["between"] == [0, 10, 20], "between two positions in proportion"
    assert found["scattered"] == [[0.5], [3]], "a step without the other metric has no point"
    assert found["same"] == [[1, 2, 2], [8, 7, 9]], "points with one x all stay"


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
