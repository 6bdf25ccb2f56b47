"""The run page in a real browser: every view, for recorded runs, for a training run, and as an offline report."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from polyreme.rundir.reader.index_rows import sample_id
from polyreme.rundir.run_directory import RunFile, owned, write_run_file
from support.run_page import CHROMIUM, NARROW, NO_CHROMIUM, SECONDS, SERIOUS, WIDE, ready, served
from support.seeded_run import telling_sample
from support.simulated_run import simulated_run

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

pytestmark = [pytest.mark.real, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]


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


def test_narrow_names_break_after_their_separators(address: str, open_page: Any) -> None:
    page = open_page(f"{address}#/setup?run=first&all=1&fold=checkpoint,rollout,trainer,data", NARROW)
    expect(page.locator(".keys td:first-child", has_text="trainer.optimizer.lr").first).to_be_visible()
    broken = """(cells) => cells.flatMap((cell) => [...cell.childNodes].filter((part) => {
      const range = document.createRange();
      range.selectNode(part);
      return part.nodeType === Node.TEXT_NODE && range.getClientRects().length > 1;
    }).map((part) => part.data))"""
    assert page.locator(".keys td:first-child").evaluate_all(broken) == []
    page.goto(f"{address}#/runs")
    label = page.locator("td[data-label^='response']").first
    wrap = "(cell) => [getComputedStyle(cell, '::before').overflowWrap, getComputedStyle(cell, '::before').content]"
    assert label.evaluate(wrap) == ["break-word", '"response_\u200blength/\u200bmean"']


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


def test_an_address_that_is_cut_within_a_character_shows_a_page(address: str, open_page: Any) -> None:
    expect(open_page(f"{address}#/samples/%E2%8").locator("table.samples tbody tr").first).to_be_visible()


DUE = """() => {
  const waiting = new Map(), set = setTimeout, clear = clearTimeout;
  window.setTimeout = (call, milliseconds) => {
    const id = set(() => { waiting.delete(id); call(); }, milliseconds);
    waiting.set(id, call);
    return id;
  };
  window.clearTimeout = (id) => { waiting.delete(id); clear(id); };
  document.querySelector(".runs input:not(:checked)").click();
  document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "2", bubbles: true}));
  for (const [id, call] of waiting) { clear(id); call(); }
  Object.assign(window, {setTimeout: set, clearTimeout: clear});
}"""
"""Chooses a run and presses a key. Every timer is due before the page hears of its new address."""


def test_a_key_opens_its_view_while_a_choice_is_written(address: str, open_page: Any) -> None:
    page = open_page(address)
    ready(page)
    page.evaluate(DUE)
    expect(page.locator("table.samples tbody tr").first).to_be_visible()


def test_a_timeline_of_very_many_groups_is_drawn(address: str, open_page: Any) -> None:
    page = open_page(address)

    def answer(route: Any) -> None:
        found = route.fetch().json()
        route.fulfill(json=found | {"groups": found["groups"][:1] * 40_000})

    page.route(re.compile("/timeline[?]"), answer)
    page.goto(f"{address}#/timeline?run=first")
    expect(page.locator("rect.bar-score").last).to_be_attached()


def test_a_duration_is_rounded_before_it_is_split(address: str, open_page: Any) -> None:
    script = """async (values) => {
      const {seconds} = await import(document.querySelector('link[rel=modulepreload][href$="parts.js"]').href);
      return values.map(seconds);
    }"""
    found = open_page(address).evaluate(script, [0.0004, 0.9996, 9.996, 59.94, 59.96, 119.6, 3599.4, 3599.6, 7199, 86_370])
    assert found[:5] == ["0 ms", "1.00 s", "10.0 s", "59.9 s", "1 min 0 s"]
    assert found[5:] == ["2 min 0 s", "59 min 59 s", "1 h 0 min", "2 h 0 min", "24 h 0 min"]


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
            page.goto(f"{address}#/curves?find=resources")
            for name in ("trainer", "reward"):
                expect(page.get_by_role("img", name=f"resources/{name}/cores").locator("canvas")).to_be_visible()
            page.close()
