"""The guarantees of policy versions and against pitfalls name existing tests."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROWS = [
    line
    for line in (ROOT / "docs" / "guarantees.md").read_text().partition("## Policy versions")[2].splitlines()
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
