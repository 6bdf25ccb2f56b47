"""The curves and the table of runs in a real browser: what is chosen, drawn, saved and written down."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from metric_rows import METRICS
from playwright.sync_api import expect

from support.run_page import CHROMIUM, NO_CHROMIUM, ready, saved_file, saved_rows

pytestmark = [pytest.mark.real, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]


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
    page.get_by_role("searchbox").fill("nothing of this name")
    expect(page.get_by_text("No metric matches")).to_be_visible()


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


@pytest.mark.parametrize("zoom", ["5~5", "9~2", "x", "~"])
def test_a_part_without_a_length_is_the_whole_axis(address: str, open_page: Any, zoom: str) -> None:
    page = open_page(f"{address}#/curves?run=first&runs=first&zoom={zoom}")
    expect(page.get_by_role("img", name="reward/mean").locator("canvas")).to_be_visible()


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


def test_charts_name_the_unit_of_every_metric(address: str, open_page: Any) -> None:
    rows = {metric.name.replace("NAME", "x"): metric.unit for metric in METRICS if metric.unit != "1 or score"}
    script = """async (names) => {
      const {title} = await import(document.querySelector('link[rel=modulepreload][href$="plot_data.js"]').href);
      return Object.fromEntries(names.map((name) => [name, title(name)]));
    }"""
    found = open_page(address).evaluate(script, list(rows))
    units = {"1": "", "B": " (bytes)"}
    assert found == {name: name + units.get(unit, f" ({unit})") for name, unit in rows.items()}


def test_metrics_of_episodes_and_resources_have_charts(address: str, episodes: str, open_page: Any) -> None:
    page = open_page(f"{episodes}#/curves?run=tools&runs=tools")
    watched = page.locator("details.group", has=page.get_by_role("heading", name="Watched"))
    for name in ("episode/turns/mean", "episode/tool_errors", "episode/environment_seconds"):
        expect(watched.get_by_role("img", name=name).locator("canvas")).to_be_visible()
    page.goto(f"{address}#/curves?run=first&find=resources")
    memory = page.locator("section.chart", has=page.get_by_role("img", name="resources/trainer/memory_bytes"))
    expect(memory.locator(".last")).to_have_text("2.5 GiB")


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
