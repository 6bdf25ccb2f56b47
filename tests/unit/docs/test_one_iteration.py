"""docs/one-iteration.md shows the code's own lines, of few enough files."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHORT = {name: f"services/{name}/polyreme_{name}/" for name in ("trainer", "rollout", "reward")}
HOP = re.compile(r"^\*\*`([\w./]+\.py)`\*\*: [^`]*(?:`[^`\n]+`[^`]*)*\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = (ROOT / "docs" / "one-iteration.md").read_text()
HOPS = HOP.findall(PAGE)
PAUSE = re.compile(r"^ *\.\.\.\n", re.MULTILINE)
"""Stands for lines that are left out."""
CALLS = re.compile(r"^These are all calls from the loop to this line: (.*?)\.$", re.MULTILINE | re.DOTALL)


def calls_of_a_loss() -> list[str]:
    """The functions that the page names between the loop and the arithmetic of a loss; `test_learner` compares them with a stack."""
    (names,) = CALLS.findall(PAGE)
    return re.findall(r"`([\w.]+)`", names)


def test_a_loss_is_at_most_eight_calls_below_the_loop() -> None:
    assert calls_of_a_loss()[0] == "Learner.iterate"
    assert len(calls_of_a_loss()) <= 8


def test_an_iteration_takes_at_most_thirty_files() -> None:
    files = [file for file, _ in HOPS]
    assert len(files) == len(set(files)) == PAGE.count("```python")
    assert 20 < len(files) <= 30


@pytest.mark.parametrize(("file", "lines"), HOPS, ids=[file for file, _ in HOPS])
def test_the_lines_are_those_of_the_file_in_their_order(file: str, lines: str) -> None:
    room, _, rest = file.partition("/")
    code = (ROOT / (SHORT[room] + rest if room in SHORT else file)).read_text().splitlines()
    after = 0
    for part in PAUSE.split(lines):
        wanted = part.splitlines()
        starts = range(after, len(code) - len(wanted) + 1)
        found = (start for start in starts if dedent("\n".join(code[start : start + len(wanted)])).splitlines() == wanted)
        after = next(found, -1) + len(wanted)
        assert after >= len(wanted), part
