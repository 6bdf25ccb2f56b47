"""Samples in a real browser: the list, the life of one, episodes."""

import re
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from polyreme.rundir.reader.index_rows import sample_id
from support.run_page import CHROMIUM, NARROW, NO_CHROMIUM, SERIOUS, WIDE, ready
from support.seeded_run import telling_sample

pytestmark = [pytest.mark.real, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]


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
    marked = page.locator("tr.marked").get_attribute("data-id")
    expect(page).to_have_url(re.compile(r"chosen=\d+\.\d+%7E\d+\.\d+|chosen=\d+\.\d+~\d+\.\d+"))
    page.reload()  # a copied address shows the same samples
    expect(chosen).to_have_count(2)
    expect(page.locator("tr.marked")).to_have_attribute("data-id", marked)
    page.keyboard.press("c")
    expect(page.locator(".sides .card")).to_have_count(2)
    page.go_back()
    expect(page.locator("tr.marked")).to_have_attribute("data-id", marked)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=re.compile(r"Sample \d+\.\d"))).to_be_visible()
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    expect(page.get_by_role("dialog").get_by_role("button")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_the_life_of_a_sample_is_what_the_run_recorded(address: str, open_page: Any, runs: Path) -> None:
    sample = telling_sample(runs / "first")
    page = open_page(f"{address}#/life/first/{sample_id(sample)}")
    life = page.locator("article.life")
    for text in (sample["prompt"], sample["response"], sample["replicas"][-1], "timeout", f"version {sample['spans'][0][0]}"):
        expect(life.get_by_text(text).first).to_be_visible()
    facts = dict(zip(life.locator("dt").all_text_contents(), life.locator("dd").all_text_contents(), strict=True))
    assert facts["iteration"] == str(sample["iteration"]) and facts["optimizer steps"] == "1"
    assert float(facts["advantage"]) == pytest.approx(sample["advantage"], abs=1e-3)
    assert float(facts["share of the loss"]) == pytest.approx(sample["weight"], abs=1e-4)
    expect(life.locator(".tokens span")).to_have_count(sample["tokens"])
    for kind in ("advantage", "version"):
        life.get_by_label(kind, exact=True).check()
        expect(life.locator(".legend").first).to_contain_text(kind)


def test_long_answers_without_a_common_word_are_compared(address: str, open_page: Any) -> None:
    page = open_page(address)

    def answer(route: Any) -> None:
        word = "a" if route.request.url.endswith("/1.0") else "b"
        text = " ".join(f"{word}{number}" for number in range(30_000))
        route.fulfill(json=route.fetch().json() | {"response": text})

    page.route(re.compile("/samples/"), answer)
    page.goto(f"{address}#/compare/first/1.0/41.1")
    expect(page.locator(".sides mark")).to_have_count(2)
    expect(page.locator(".sides mark.added")).to_contain_text(" b29999")
