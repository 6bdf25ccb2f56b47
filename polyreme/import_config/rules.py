"""The rules of an import, and their application to the values of a file.

Invariant: every key of the file is in the result exactly as taken over, translated, without a counterpart, or unknown. Pure.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Values = Mapping[str, Any]
"""The other system's values by dotted key: those of the file over the system's defaults."""


class Nothing:
    """The result of a conversion when the value has no counterpart or belongs to another rule."""


class ReadElsewhere(Nothing):
    """The result of a conversion when the rule of another key reads the value."""


NOTHING: Final = Nothing()
PART: Final = ReadElsewhere()


@dataclass(frozen=True)
class Rule:
    """The translation of a key.

    Attributes:
        key: the other system's dotted key. A final `*` matches any suffix.
        target: our dotted key; empty: there is no counterpart.
        note: a description of the translation, or the reason why there is no counterpart. Empty: the value is taken over.
        convert: computes our value from the key's value and all values. NOTHING: see `note`. None: the same value. A mapping sets the keys
            below `target`.
    """

    key: str
    target: str = ""
    note: str = ""
    convert: Callable[[Any, Values], Any] | None = None

    def applies_to(self, key: str) -> bool:
        return key.startswith(self.key[:-1]) if self.key.endswith("*") else key == self.key


def part_of(target: str, *keys: str) -> tuple[Rule, ...]:
    """The conversion of a key whose value the rule of another key reads for `target`."""
    return tuple(Rule(key, target, "", lambda value, values: PART) for key in keys)


@dataclass(frozen=True)
class System:
    """Another system.

    Attributes:
        name: name on the command line.
        title: name in texts.
        rules: rules of its keys. A key may have several rules. Rules that name the whole key have priority over those with `*`.
        defaults: its defaults for relevant keys, used when a file lacks them.
        fixed: our keys that follow from the system itself: computes value and reason from all values.
        epochs: its key with the number of passes over the data, for files without a number of iterations.
    """

    name: str
    title: str
    rules: tuple[Rule, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Callable[[Values], Mapping[str, tuple[Any, str]]] = lambda values: {}
    epochs: str = ""

    def rules_of(self, key: str) -> list[Rule]:
        """The rules of a key: those that name it, else the first with a matching `*`."""
        return [rule for rule in self.rules if rule.key == key] or [rule for rule in self.rules if rule.applies_to(key)][:1]


@dataclass(frozen=True)
class Entry:
    """The result for a key of the file or a default. `ours` is meaningful only when `target` is not empty."""

    key: str
    value: Any
    target: str
    ours: Any
    note: str


@dataclass(frozen=True)
class Imported:
    """Our values by dotted key, with their origin as a comment; the keys without a counterpart, and those that were read for others."""

    values: dict[str, Any]
    comments: dict[str, str]
    missing: list[Entry]
    parts: list[Entry]


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree of mappings by dotted key. Empty mappings have none."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def apply(system: System, given: Values) -> Imported:
    """Translates the values of a file."""
    values = {**system.defaults, **given}
    found = Imported({}, {}, [], [])
    for target, (ours, why) in system.fixed(values).items():
        found.values[target], found.comments[target] = ours, why
    for key, value in values.items():
        entries = list(_entries(system, key, value, values))
        used = [entry for entry in entries if entry.target]
        if not used and key in given:
            (found.parts if isinstance(entries[0].ours, ReadElsewhere) else found.missing).append(entries[0])
        for entry in used:
            origin = f"{key}: {_short(value)}" if entry.note or key not in given else key
            default = "" if key in given else f", {system.title}'s default"
            comment = origin + default + (f"; {entry.note}" if entry.note else "")
            for target, ours in _leaves(entry.target, entry.ours):
                found.values[target], found.comments[target] = ours, comment
    return found


def _entries(system: System, key: str, value: Any, values: Values) -> Iterator[Entry]:
    rules = system.rules_of(key)
    if not rules:
        yield Entry(key, value, "", None, "unknown to this importer")
    for rule in rules:
        ours = value if rule.convert is None else rule.convert(value, values)
        if isinstance(ours, ReadElsewhere):
            yield Entry(key, value, "", ours, f"read for {rule.target}")
        elif isinstance(ours, Nothing):
            why = f"no effect beside the other values{f' ({rule.note})' if rule.note else ''}" if rule.target else rule.note
            yield Entry(key, value, "", None, why)
        else:
            yield Entry(key, value, rule.target, ours, rule.note)


def _leaves(target: str, ours: Any) -> Iterator[tuple[str, Any]]:
    """A mapping below `target`, or the value itself. Options of a reward stay one value, since they are in a list."""
    if isinstance(ours, dict) and ours:
        for key, value in ours.items():
            yield from _leaves(f"{target}.{key}", value)
    else:
        yield target, ours


def _short(value: Any) -> str:
    return re.sub(r"\s+", " ", f"{value}")[:80]
