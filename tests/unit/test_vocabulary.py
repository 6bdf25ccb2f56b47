"""One word for one thing: no public class name means two things, and a logger has one name."""

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
    ROOT / "services" / "environment" / "polyreme_environment",
    ROOT / "services" / "trainer" / "polyreme_trainer",
)


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
    modules: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(name)
    assert not {name: named for name, named in modules.items() if len(named) > 1}


def test_a_logger_is_called_logger(sources: dict[str, str]) -> None:
    assert not [name for name, source in sources.items() if re.search(r"^_?log = logging\.", source, re.MULTILINE)]
