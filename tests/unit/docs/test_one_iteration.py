"""docs/one-iteration.md names files and definitions that exist, and few enough of them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHORT = {name: f"services/{name}/polyreme_{name}/" for name in ("trainer", "rollout", "reward")}
ROW = re.compile(r"^\| `([\w./]+\.py)` \| (.+?) \| .+ \|$", re.MULTILINE)
HOPS = ROW.findall((ROOT / "docs" / "one-iteration.md").read_text())


def test_an_iteration_takes_at_most_fifty_files() -> None:
    files = [file for file, _ in HOPS]
    assert len(files) == len(set(files))
    assert 30 < len(files) <= 50


@pytest.mark.parametrize(("file", "names"), HOPS, ids=[file for file, _ in HOPS])
def test_every_name_is_defined_in_its_file(file: str, names: str) -> None:
    room, _, rest = file.partition("/")
    path = ROOT / (SHORT[room] + rest if room in SHORT else file)
    tree = ast.parse(path.read_text())
    defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
    wanted = set(re.findall(r"`(\w+)`", names))
    assert wanted
    assert wanted <= defined
