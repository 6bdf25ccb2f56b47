"""The application of an import's rules to the values of a file.

Invariant: every key of the file is in the result exactly once for each of its rules, with its fate. Pure.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from polyreme.config.yaml_text import Tree
from polyreme.errors import ConfigError
from polyreme.import_config.rules import LOSSES, Fate, Fixed, Lost, Noted, Off, ReadElsewhere, Rule, System, Unresolved, Values


@dataclass(frozen=True)
class Entry:
    """The result of a rule for a key of the file or a default. `ours` is meaningful only when `target` is not empty."""

    key: str
    value: object
    target: str
    ours: object
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

    values: Tree
    comments: dict[str, str]
    lost: list[Entry]
    parts: list[Entry]
    idle: list[Entry]


_WRITE = "Write the value that the other system trains with into the file."
TEXTS = frozenset(
    {"model.path", "data.train", "data.eval", "trainer.critic.path", "output_dir", "name", "reward.rewards", "environment.file"}
)
"""Our keys that can hold a text with an unresolved variable, for the user to complete. For any other key it is a loss."""


def apply(system: System, given: Values) -> Imported:
    """Translates the values of a file.

    Raises:
        ConfigError: the original trains with an algorithm that we do not have, or a value is none that the key can have.
    """
    values = known_values(system, given)
    found, setters = Imported({}, {}, [], [], []), dict[str, str]()
    for target, (ours, why) in _fixed(system, values).items():
        if isinstance(ours, Lost):
            found.lost.append(Entry(why, values.get(why), "", None, ours.why, Fate.LOST))
            continue
        _set(found, target, ours, why)
    for key, value in {**system.defaults, **given}.items():
        if key.startswith("("):
            continue
        entries = list(_entries(system, key, value, values))
        _collect(found, system, entries, given=key in given)
        if key in given:
            _note_rivals(found, entries, setters)
        if key in system.defaults and not _is_known(system, key, value):
            _collect(found, system, list(_entries(system, key, system.defaults[key], values)), given=False)
    found.lost.sort(key=lambda entry: LOSSES.index(entry.fate))
    return found


def known_values(system: System, given: Values) -> dict[str, object]:
    """The values of a file over the system's defaults, without those that the file leaves open, unless they are texts."""
    return {**system.defaults, **{key: value for key, value in given.items() if _is_known(system, key, value)}}


def _fixed(system: System, values: Values) -> Fixed:
    for key, usual in system.defaults.items():
        if isinstance(usual, int | float) and isinstance(values[key], str):
            raise ConfigError(f"a number for {key}", _short(values[key]), _WRITE)
    try:
        return system.fixed(values)
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"values of {system.title} that fit together", f"{type(error).__name__}: {error}", _WRITE) from error


def _is_known(system: System, key: str, value: object) -> bool:
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


def _note_rivals(found: Imported, entries: Iterable[Entry], setters: dict[str, str]) -> None:
    """Says CHECK at our key that two keys of the file set: which one the other system reads is not in a table."""
    for entry in entries:
        if not entry.target:
            continue
        rival = setters.setdefault(entry.target, entry.key)
        if rival != entry.key and entry.target in found.comments:
            found.comments[entry.target] += f"; CHECK: {rival} is in the file, too, and was replaced"


def _set(found: Imported, target: str, ours: object, comment: str) -> None:
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


def _entries(system: System, key: str, value: object, values: Values) -> Iterator[Entry]:
    rules = system.rules_of(key)
    if not rules:
        yield Entry(key, value, "", None, "unknown to this importer; find out whether it changes training", Fate.UNKNOWN)
    for rule in rules:
        if isinstance(value, Unresolved) and rule.target not in TEXTS and rule.fate not in (Fate.IDLE, *LOSSES):
            default = f"; used here: {system.defaults[key]}, {system.title}'s default" if key in system.defaults else ""
            yield Entry(key, value, "", None, f"CHECK: the file does not say what this is{default}", Fate.LOST)
        else:
            yield _entry(rule, key, value, values)


def _entry(rule: Rule, key: str, value: object, values: Values) -> Entry:
    try:
        ours = value if rule.convert is None else rule.convert(value, values)
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ConfigError(f"a value of {key} that becomes {rule.target}", f"{_short(value)} ({error})", _WRITE) from error
    note = rule.note
    if isinstance(ours, Noted):
        note = "; ".join(filter(None, (rule.note, ours.note)))
        ours = ours.ours
    match ours:
        case Lost():
            return Entry(key, value, "", None, ours.why, rule.fate if rule.fate in LOSSES else Fate.LOST)
        case Off():
            return Entry(key, value, "", None, ours.why, Fate.IDLE)
        case ReadElsewhere():
            return Entry(key, value, "", None, rule.target, Fate.PART)
    return Entry(key, value, rule.target, ours, note, rule.fate)


def _leaves(target: str, ours: object) -> Iterator[tuple[str, object]]:
    """A mapping below `target`, or the value itself. Options of a reward stay one value, since they are in a list."""
    if isinstance(ours, dict) and ours:
        for key, value in ours.items():
            yield from _leaves(f"{target}.{key}", value)
    else:
        yield target, ours


def _short(value: object) -> str:
    return re.sub(r"\s+", " ", f"{value}")[:80]
