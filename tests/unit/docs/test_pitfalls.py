"""The pages of pitfalls and of the version contract name existing tests."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = {"pitfalls.md": "", "versions.md": "## The contract"}  # and the start of the table on the page
ROWS = [
    line
    for page, begin in PAGES.items()
    for line in (ROOT / "docs" / page).read_text().partition(begin or "\n")[2].splitlines()
    if line.startswith("| ") and line.count("|") == 4 and "hown by" not in line
]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_row_names_a_test() -> None:
    assert len(ROWS) >= 24
    assert [row for row in ROWS if not NAMED.search(row)] == []


@pytest.mark.parametrize(("file", "name"), sorted({match for row in ROWS for match in NAMED.findall(row)}))
def test_the_test_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
