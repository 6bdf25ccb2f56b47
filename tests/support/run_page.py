"""The run page in a browser: its server, sizes of windows, files that it saves."""

import csv
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect

CHROMIUM = os.environ.get("POLYREME_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
NO_CHROMIUM = "no Chromium: apt-get install chromium, or set POLYREME_CHROMIUM; .ci/run installs it"
SECONDS = 60
SERIOUS = ("serious", "critical")
WIDE, NARROW = {"width": 1600, "height": 950}, {"width": 375, "height": 800}
expect.set_options(timeout=SECONDS * 1000)


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


def ready(page: Page) -> None:
    """Waits until the view has its data."""
    page.wait_for_load_state("networkidle")
    expect(page.locator("main nav")).to_be_visible()


def saved_file(page: Page, button: str) -> bytes:
    """The file that a button saves."""
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    return Path(download.value.path()).read_bytes()


def saved_rows(page: Page, button: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(saved_file(page, button).decode(), newline="")))
