"""One word for one thing: names that were replaced do not come back, and no public class name means two things."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    ROOT / "polyreme",
    ROOT / "services" / "rollout" / "polyreme_rollout",
    ROOT / "services" / "reward" / "polyreme_reward",
    ROOT / "services" / "trainer" / "polyreme_trainer",
)
TRAINER = "services/trainer/polyreme_trainer"

BANNED_MODULES = frozenset(
    {"desk", "drafts", "fleet", "hold", "intake", "pace", "place", "rows", "scratch", "servers", "slots", "snapshots", "usage"}
)
BANNED_CLASSES = frozenset(
    {"Desk", "Draft", "Drafts", "Fleet", "Hold", "Idleness", "Intake", "Layout", "Orders", "Place", "Scratch", "Swapper"}
)
BANNED_WORDS = re.compile(
    r"Kept here|Invariants:|\bMend\b|\bmends?\b|\bdear\b|\bwhoever\b|\bpatience\b|\bsilence\b|\bhopes?\b|\bfleet\b|\bdesk\b|\bdrafts?\b",
    re.IGNORECASE,
)
DRAFT_STORAGE = ("polyreme/experience/ledger.py", "polyreme/experience/scripts.py")
"""The Redis key and its scripts keep the name `drafts`: existing runs have it."""
SILENCE = (f"{TRAINER}/orchestrator/straggler_detection.py", f"{TRAINER}/orchestrator/replica_pool.py")
"""Silence is here a measured quantity, not a timeout."""


def modules() -> list[Path]:
    return [
        path for package in PACKAGES for path in sorted(package.rglob("*.py")) if "api" not in path.relative_to(package).parts
    ]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_a_public_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name_of(path))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice


def test_replaced_names_do_not_come_back() -> None:
    assert not [name_of(path) for path in modules() if path.stem in BANNED_MODULES]
    for path in modules():
        classes = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)}
        assert not classes & BANNED_CLASSES, name_of(path)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_uses_the_vocabulary(path: Path) -> None:
    source = path.read_text()
    allowed = {"drafts", "draft"} if name_of(path) in DRAFT_STORAGE else set()
    allowed |= {"silence"} if name_of(path) in SILENCE else set()
    assert not {word for word in BANNED_WORDS.findall(source) if word.lower() not in allowed}
    assert not re.search(r"^_?log = logging\.", source, re.MULTILINE), "a logger is called `logger`"


@pytest.mark.parametrize("path", [path for path in modules() if path.stem not in ("__init__", "__main__")], ids=name_of)
def test_a_module_states_its_invariant(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert "Invariant" in docstring, "expected `Invariant: ...` in the module's docstring"
