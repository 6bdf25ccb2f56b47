"""The rules of an import, and their application to the values of a file.

Every key of another system has a declared fate. A rule with `*` never says "no effect" about keys that change training.

Invariant: every key of the file is in the result exactly once for each of its rules, with its fate. Pure.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from polyreme.errors import ConfigError

Values = Mapping[str, Any]
"""The other system's values by dotted key: those of the file over the system's defaults."""
ITERATIONS = "(iterations)"
"""Among the values: our number of iterations, for keys that are a part of the run. Missing while that number is computed. Names in
brackets are no keys of the file."""


class Fate(StrEnum):
    """What becomes of a key. The losses come first in an import's report, in this order."""

    ANOTHER_RUN = "another kind of run"
    UNKNOWN = "unknown"
    LOST = "not carried over"
    TAKEN = "taken over"
    CONVERTED = "converted"
    PART = "read for another key"
    IDLE = "no effect on training"


LOSSES = (Fate.ANOTHER_RUN, Fate.UNKNOWN, Fate.LOST)


@dataclass(frozen=True)
class Lost:
    """The result of a conversion when the value changes training and has no counterpart."""

    why: str


@dataclass(frozen=True)
class Off:
    """The result of a conversion when the value changes nothing in training: it switches something off, or another key does."""

    why: str = "off"


@dataclass(frozen=True)
class Noted:
    """The result of a conversion with a comment of its own, which says CHECK where the user must decide."""

    ours: Any
    note: str


class ReadElsewhere:
    """The result of a conversion when the rule of another key reads the value."""


PART = ReadElsewhere()


class Unresolved(str):
    """A text of the file with a variable that the file does not define."""


@dataclass(frozen=True)
class Rule:
    """The fate of a key. `part_of`, `idle` and `lost` make the rules without a counterpart.

    Attributes:
        key: the other system's dotted key. `*` matches any text.
        target: our dotted key; empty: there is no counterpart.
        note: a description of the translation, or the reason why there is no counterpart. Empty: the value is taken over.
        convert: computes our value from the key's value and all values: a value, `Noted`, `Lost`, `Off` or PART. None: the same value. A
            mapping sets the keys below `target`.
        fate: the declared fate.
    """

    key: str
    target: str = ""
    note: str = ""
    convert: Callable[[Any, Values], Any] | None = None
    fate: Fate = Fate.CONVERTED

    def __post_init__(self) -> None:
        if not self.target and self.fate in (Fate.CONVERTED, Fate.TAKEN, Fate.PART):
            raise ValueError(f"expected a fate for {self.key}, which has no target; use idle() or lost()")
        if self.fate is Fate.CONVERTED and self.convert is None and not self.note:
            object.__setattr__(self, "fate", Fate.TAKEN)

    def applies_to(self, key: str) -> bool:
        return fnmatchcase(key, self.key) if "*" in self.key else key == self.key


def part_of(target: str, *keys: str) -> tuple[Rule, ...]:
    """The fate of keys whose value the rule of another key, or the system itself, reads for `target`."""
    return tuple(Rule(key, target, "", lambda value, values: PART, Fate.PART) for key in keys)


def idle(why: str, *keys: str) -> tuple[Rule, ...]:
    """The fate of keys that change speed, memory, logs or storage, and nothing in training. With `*`: true of every key below."""
    return tuple(Rule(key, "", why, lambda value, values: Off(why), Fate.IDLE) for key in keys)


def lost(
    why: str, *keys: str, unless: Iterable[Any] = (None,), off: Callable[[Values], str] | None = None, another_run: bool = False
) -> tuple[Rule, ...]:
    """The fate of keys that change training and cannot be carried over.

    Args:
        why: what is missing here, or what to do instead.
        unless: values with which the key changes nothing, such as the value that switches it off.
        off: returns why the key has no effect beside the other values, or an empty text.
        another_run: whether a run without the key would be another kind of run. Such losses are reported first.
    """
    harmless = tuple(unless)

    def convert(value: Any, values: Values) -> Lost | Off:
        if any(value is each or value == each for each in harmless):
            return Off("this value changes nothing here")
        return Off(reason) if off and (reason := off(values)) else Lost(why)

    return tuple(Rule(key, "", why, convert, Fate.ANOTHER_RUN if another_run else Fate.LOST) for key in keys)


@dataclass(frozen=True)
class System:
    """Another system.

    Attributes:
        name: name on the command line.
        title: name in texts.
        rules: rules of its keys. A key may have several rules. Rules that name the whole key have priority over those with `*`.
        defaults: its defaults for relevant keys, used when a file lacks them: those that differ from ours, and those that rules read.
        fixed: our keys that follow from the system itself, or from several keys: computes value and reason from all values. The value may
            be `Lost`.
        epochs: its key with the number of passes over the data, for files without a number of iterations.
    """

    name: str
    title: str
    rules: tuple[Rule, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Callable[[Values], Mapping[str, tuple[Any, str]]] = lambda values: {}
    epochs: str = ""

    def rules_of(self, key: str) -> list[Rule]:
        """The rules of a key: those that name it, else those with the longest pattern that matches."""
        if named := [rule for rule in self.rules if rule.key == key]:
            return named
        matching = [rule for rule in self.rules if rule.applies_to(key)]
        return [rule for rule in matching if rule.key == max((each.key for each in matching), key=len)]


@dataclass(frozen=True)
class Entry:
    """The result of a rule for a key of the file or a default. `ours` is meaningful only when `target` is not empty."""

    key: str
    value: Any
    target: str
    ours: Any
    note: str
    fate: Fate

    @property
    def is_loss(self) -> bool:
        return self.fate in LOSSES


@dataclass(frozen=True)
class Imported:
    """Our values by dotted key, with their origin as a comment; and the keys that set none.

    Attributes:
        lost: keys that change training and were not carried over, the gravest first.
        parts: keys that were read for others.
        idle: keys without effect on training.
    """

    values: dict[str, Any]
    comments: dict[str, str]
    lost: list[Entry]
    parts: list[Entry]
    idle: list[Entry]


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree of mappings by dotted key. Empty mappings have none."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


_WRITE = "Write the value that the other system trains with into the file."
TEXTS = frozenset({"model.path", "data.train", "data.eval", "trainer.critic.path", "output_dir", "name", "reward.rewards"})
"""Our keys that can hold a text with an unresolved variable, for the user to complete. For any other key it is a loss."""


def apply(system: System, given: Values) -> Imported:
    """Translates the values of a file.

    Raises:
        ConfigError: the original trains with an algorithm that we do not have, or a value is none that the key can have.
    """
    values = {**system.defaults, **{key: value for key, value in given.items() if _is_known(system, key, value)}}
    found = Imported({}, {}, [], [], [])
    for target, (ours, why) in _fixed(system, values).items():
        if isinstance(ours, Lost):
            found.lost.append(Entry(why, values.get(why), "", None, ours.why, Fate.LOST))
            continue
        _set(found, target, ours, why)
    for key, value in {**system.defaults, **given}.items():
        if key.startswith("("):
            continue
        _collect(found, system, list(_entries(system, key, value, values)), given=key in given)
        if key in system.defaults and not _is_known(system, key, value):
            _collect(found, system, list(_entries(system, key, system.defaults[key], values)), given=False)
    found.lost.sort(key=lambda entry: LOSSES.index(entry.fate))
    return found


def _fixed(system: System, values: Values) -> Mapping[str, tuple[Any, str]]:
    for key, usual in system.defaults.items():
        if isinstance(usual, int | float) and isinstance(values[key], str):
            raise ConfigError(f"a number for {key}", _short(values[key]), _WRITE)
    try:
        return system.fixed(values)
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"values of {system.title} that fit together", f"{type(error).__name__}: {error}", _WRITE) from error


def _is_known(system: System, key: str, value: Any) -> bool:
    return not isinstance(value, Unresolved) or any(rule.target in TEXTS for rule in system.rules_of(key))


def _collect(found: Imported, system: System, entries: list[Entry], *, given: bool) -> None:
    for entry in entries:
        if entry.is_loss:
            default = "" if given else f" ({system.title}'s default)"
            found.lost.append(Entry(entry.key, entry.value, "", None, entry.note + default, entry.fate))
        if entry.target:
            default = "" if given else f", {system.title}'s default"
            origin = f"{entry.key}: {_short(entry.value)}" if entry.note or not given else entry.key
            _set(found, entry.target, entry.ours, origin + default + (f"; {entry.note}" if entry.note else ""))
    if given and not any(entry.target or entry.is_loss for entry in entries):
        parts = [entry for entry in entries if entry.fate is Fate.PART]
        (found.parts if parts else found.idle).append((parts or entries)[0])


def _set(found: Imported, target: str, ours: Any, comment: str) -> None:
    """Sets our key, or the keys below it. It replaces what is above and below them."""
    for key in [key for key in found.values if key.startswith(f"{target}.") or target.startswith(f"{key}.")]:
        if not isinstance(ours, dict) or not key.startswith(f"{target}."):
            del found.values[key], found.comments[key]
    for leaf, part in _leaves(target, ours):
        unknown = "$" in str(part) and "CHECK" not in comment  # a path, an address, or a list of rewards with one
        found.values[leaf], found.comments[leaf] = (
            part,
            f"{comment}; CHECK: the file does not say what $... is" if unknown else comment,
        )


def _entries(system: System, key: str, value: Any, values: Values) -> Iterator[Entry]:
    rules = system.rules_of(key)
    if not rules:
        yield Entry(key, value, "", None, "unknown to this importer; find out whether it changes training", Fate.UNKNOWN)
    for rule in rules:
        if isinstance(value, Unresolved) and rule.target not in TEXTS and rule.fate not in (Fate.IDLE, *LOSSES):
            default = f"; used here: {system.defaults[key]}, {system.title}'s default" if key in system.defaults else ""
            yield Entry(key, value, "", None, f"CHECK: the file does not say what this is{default}", Fate.LOST)
        else:
            yield _entry(rule, key, value, values)


def _entry(rule: Rule, key: str, value: Any, values: Values) -> Entry:
    try:
        ours = value if rule.convert is None else rule.convert(value, values)
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ConfigError(f"a value of {key} that becomes {rule.target}", f"{_short(value)} ({error})", _WRITE) from error
    note = rule.note
    if isinstance(ours, Noted):
        ours, note = ours.ours, "; ".join(filter(None, (rule.note, ours.note)))
    match ours:
        case Lost():
            return Entry(key, value, "", None, ours.why, rule.fate if rule.fate in LOSSES else Fate.LOST)
        case Off():
            return Entry(key, value, "", None, ours.why, Fate.IDLE)
        case ReadElsewhere():
            return Entry(key, value, "", None, rule.target, Fate.PART)
    return Entry(key, value, rule.target, ours, note, rule.fate)


def _leaves(target: str, ours: Any) -> Iterator[tuple[str, Any]]:
    """A mapping below `target`, or the value itself. Options of a reward stay one value, since they are in a list."""
    if isinstance(ours, dict) and ours:
        for key, value in ours.items():
            yield from _leaves(f"{target}.{key}", value)
    else:
        yield target, ours


def _short(value: Any) -> str:
    return re.sub(r"\s+", " ", f"{value}")[:80]
