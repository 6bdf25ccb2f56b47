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
DRAFT_STORAGE = tuple(f"polyreme/experience/{name}.py" for name in ("ledger", "log_reader", "scripts"))
"""The Redis key and its scripts keep the name `drafts`: existing runs have it."""
SILENCE = (f"{TRAINER}/orchestrator/replicas/straggler_detection.py", f"{TRAINER}/orchestrator/replicas/replica_pool.py")
"""Silence is here a measured quantity, not a timeout."""


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The text of every module, by its path in the repository."""
    paths = [
        path for package in PACKAGES for path in sorted(package.rglob("*.py")) if "api" not in path.relative_to(package).parts
    ]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


@pytest.fixture(scope="module")
def trees(sources: dict[str, str]) -> dict[str, ast.Module]:
    return {name: ast.parse(source) for name, source in sources.items()}


def test_a_public_class_name_means_one_thing(trees: dict[str, ast.Module]) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_replaced_names_do_not_come_back(trees: dict[str, ast.Module]) -> None:
    assert not [name for name in trees if Path(name).stem in BANNED_MODULES]
    classes = {name: {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} for name, tree in trees.items()}
    assert not {name: found & BANNED_CLASSES for name, found in classes.items() if found & BANNED_CLASSES}


def test_every_module_uses_the_vocabulary(sources: dict[str, str]) -> None:
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        allowed = {"drafts", "draft"} if name in DRAFT_STORAGE else {"silence"} if name in SILENCE else set()
        found[name] = {word for word in BANNED_WORDS.findall(source) if word.lower() not in allowed}
    assert not {name: words for name, words in found.items() if words}


def test_a_logger_is_called_logger(sources: dict[str, str]) -> None:
    assert not [name for name, source in sources.items() if re.search(r"^_?log = logging\.", source, re.MULTILINE)]
