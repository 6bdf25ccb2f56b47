"""Fixtures of the tests of the run page: recorded runs, their server, a browser.

POLYREME_SCREENSHOTS=docs/images writes the screenshots of the guide there; `make pictures` sets it. By default they go to the tests' own
directory. What only these tests need is imported when they begin, since every process of the light tests reads this file.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.seeded_run import record_run

    folder = tmp_path_factory.mktemp("ui") / "runs"
    record_run(folder / "second", iterations=24, seed=2)
    record_run(folder / "first", iterations=30, seed=1)
    record_run(folder.parent / "episodes" / "tools", iterations=2, seed=3, episodes=True)
    return folder  # all are recorded here, since a started browser has an event loop


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    from support.run_page import served

    with served(str(runs)) as address:
        yield address


@pytest.fixture(scope="module")
def episodes(runs: Path) -> Iterator[str]:
    from support.run_page import served

    with served(str(runs.parent / "episodes")) as address:
        yield address


@pytest.fixture(scope="module")
def browser(runs: Path) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    from support.run_page import CHROMIUM

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """The messages of the pages' consoles."""
    return []


@pytest.fixture
def open_page(browser: Any, complaints: list[str]) -> Iterator[Any]:
    """Opens an address. The test fails when the page writes to the console."""
    from support.run_page import SECONDS, WIDE

    contexts: list[Any] = []

    def opened(address: str, size: Any = WIDE, theme: Any = "light", **options: Any) -> Any:
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


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("POLYREME_SCREENSHOTS") or tmp_path_factory.mktemp("pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
