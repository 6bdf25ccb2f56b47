"""docs/troubleshooting.md quotes existing messages, and explains every alarm.

Invariant: messages are compared by their constant parts; filled-in parts are `…`, as on the page.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from polyreme_trainer.observe import alarms

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
SOURCES = [ROOT / "polyreme", *(ROOT / "services").glob("*/polyreme_*")]


def template(node: ast.expr) -> str:
    """A text of the code with `…` for its filled-in parts."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(template(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
    return "…"


@cache
def messages() -> str:
    """Every text of the code, one per line, and every error in its printed form."""
    found: set[str] = set()
    for file in (file for source in SOURCES for file in source.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Name(id=name), args=[expected, there, do]) if name.endswith("Error"):
                    found.add(f"expected {template(expected)}; found {template(there)}. {template(do)}")
                case ast.List(elts=[expected, there, do]):  # an error forwarded from another process
                    found.add(f"expected {template(expected)}; found {template(there)}. {template(do)}")
                case ast.Call(func=ast.Name(id="Gate"), args=[name_of, _, _, do]):
                    found.add(f"expected {template(name_of)} of at most …; found …. {template(do)}")
                case ast.Constant(value=str()) | ast.JoinedStr() | ast.BinOp(op=ast.Add()):
                    found.add(template(node))
    return "\n".join(text.replace("\n", " ") for text in found)


def is_in_the_code(quote: str) -> bool:
    parts = [re.escape(part) for part in quote.split("…")]
    return re.search(".*".join(parts), messages()) is not None


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_in_the_code(quote: str) -> None:
    assert is_in_the_code(quote)


def test_a_message_that_no_code_has_is_found() -> None:
    assert is_in_the_code("expected a finite gradient; found norm …")
    assert not is_in_the_code("expected a finite gradient; found a norm of …")


def test_every_alarm_is_explained() -> None:
    names = [node.name for node in ast.walk(ast.parse(Path(alarms.__file__).read_text())) if isinstance(node, ast.FunctionDef)]
    kinds = [name.replace("_", " ") for name in names if any(quote.startswith(f"{name.replace('_', ' ')}:") for quote in QUOTES)]
    history = [alarms.Observation(i, 1.0, 1.0, 8, 1e-6, 0, 1.0, 0.0, 0.0, 1.0) for i in range(1, 6)]
    raised = alarms.check(history, mismatch_limit=1e-3)
    assert sorted(kinds) == sorted(name.replace("_", " ") for name in raised)
    assert len(raised) == 4


def test_each_message_has_one_place() -> None:
    assert len(QUOTES) >= 50
    assert len(QUOTES) == len(set(QUOTES))
