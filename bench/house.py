"""The figures of the house: rooms, arrows between them, lines, and the places that a reader stumbles over.

Reads the source only. The last line is one JSON object; it fails (exit code 1) when a figure is worse than its bound.

    python bench/house.py
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "polyreme": ROOT / "polyreme",
    "polyreme_rollout": ROOT / "services" / "rollout" / "polyreme_rollout",
    "polyreme_reward": ROOT / "services" / "reward" / "polyreme_reward",
    "polyreme_environment": ROOT / "services" / "environment" / "polyreme_environment",
    "polyreme_trainer": ROOT / "services" / "trainer" / "polyreme_trainer",
}
PRIVATE_MEMBER = r"[\w)\]](?<!self)(?<!cls)\._(?!exit\b|replace\b|getframe\b)[a-z]\w*"
"""A member of another object that begins with an underscore, without those that Python documents: `os._exit`, `_replace` of named tuples."""
HOUSES = ("polyreme", "polyreme_rollout", "polyreme_trainer.megatron", "polyreme_trainer.orchestrator")
BOUNDS = {
    "circles": 0,
    "services_import_cli": 0,
    "files_of_largest_folder": 23,
    "lines": 90_190,
    "modules_over_300_lines": 28,
    "lines_with_any": 291,
    "private_members_in_tests": 51,
    "monkeypatches_in_tests": 67,
    "arrows": {"polyreme": 58, "polyreme_rollout": 31, "polyreme_trainer.megatron": 73, "polyreme_trainer.orchestrator": 27},
}
"""Upper bounds. They are lowered when the figures fall, and not raised."""


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name and file of each module of the product, without the generated contracts."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] != "api":
                yield ".".join((package, *(part for part in parts if part != "__init__"))), path


def imports(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports."""
    found: dict[str, set[str]] = {}
    for module, text in sources.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        known = {name if name in sources else name.rpartition(".")[0] for name in names} & sources.keys()
        found[module] = known - {module}
    return found


def arrows(house: str, imported: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The imports between the rooms of a house: (from, to). A module directly in the house is a room of its own."""

    def room(module: str) -> str:
        return module.removeprefix(f"{house}.").partition(".")[0]

    inside = {name for name in imported if name.startswith(f"{house}.")}
    return {(room(a), room(b)) for a in inside for b in imported[a] & inside if room(a) != room(b)}


def in_circles(pairs: set[tuple[str, str]]) -> set[str]:
    """The rooms that import themselves through others, or lie between such rooms."""
    while True:
        left = {(a, b) for a, b in pairs if b in {a for a, _ in pairs} and a in {b for _, b in pairs}}
        if left == pairs:
            return {name for pair in pairs for name in pair}
        pairs = left


def count(pattern: str, texts: Iterator[str]) -> int:
    """The number of lines that match."""
    matcher = re.compile(pattern)
    return sum(bool(matcher.search(line)) for text in texts for line in text.splitlines())


def figures() -> dict[str, object]:
    sources = {module: path.read_text() for module, path in modules()}
    imported = imports(sources)
    tests = [path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))]
    pairs = {house: arrows(house, imported) for house in HOUSES}
    folders: dict[Path, int] = {}
    for _, path in modules():
        folders[path.parent] = folders.get(path.parent, 0) + 1
    return {
        "rooms": {house: len({name for pair in found for name in pair}) for house, found in pairs.items()},
        "arrows": {house: len(found) for house, found in pairs.items()},
        "circles": sum(len(in_circles(found)) for found in pairs.values()),
        "services_import_cli": sum(
            name.startswith("polyreme.cli")
            for module, names in imported.items()
            if not module.startswith("polyreme.")
            for name in names
        ),
        "files_of_largest_folder": max(folders.values()),
        "modules": len(sources),
        "lines": sum(text.count("\n") for text in sources.values()),
        "modules_over_300_lines": sum(text.count("\n") > 300 for text in sources.values()),
        "lines_with_any": count(r"\bAny\b", iter(sources.values())),
        "private_members_in_tests": count(PRIVATE_MEMBER, iter(tests)),
        "monkeypatches_in_tests": count(r"monkeypatch\.setattr|mock\.patch", iter(tests)),
    }


def worse(found: dict[str, object]) -> list[str]:
    """The figures above their bounds."""
    bad = [
        f"{name}: {found[name]}, at most {bound}"
        for name, bound in BOUNDS.items()
        if isinstance(bound, int) and int(str(found[name])) > bound
    ]
    limits, houses = BOUNDS["arrows"], found["arrows"]
    assert isinstance(limits, dict) and isinstance(houses, dict)
    return bad + [
        f"arrows in {house}: {houses[house]}, at most {bound}" for house, bound in limits.items() if houses[house] > bound
    ]


if __name__ == "__main__":
    result = figures()
    for name, value in result.items():
        print(f"{name:<26} {value}")
    failed = worse(result)
    for line in failed:
        print(f"expected {line}")
    print(json.dumps(result))
    sys.exit(bool(failed))
