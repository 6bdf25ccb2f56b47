"""The rules of an import: every key of another system has a declared fate.

Invariant: a rule without a counterpart among our keys says why. One with `*` never says "no effect" of keys that change training.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

Values = Mapping[str, Any]
"""The other system's values by dotted key: those of the file over the system's defaults."""
Convert = Callable[[Any, Values], object]
"""Computes our value from a key's value and all values."""
Fixed = dict[str, tuple[object, str]]
"""Our keys with value and origin, as `System.fixed` returns them."""
ITERATIONS = "(iterations)"
"""Among the values: our number of iterations, for keys that are a part of the run. Missing while that number is computed. Names
in brackets are no keys of the file."""


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

    ours: object
    note: str


class ReadElsewhere:
    """The result of a conversion when the rule of another key reads the value."""


PART = ReadElsewhere()


class Unresolved(str):
    """A text of the file with a variable that the file does not define."""


WHOLE = "samples are drawn from the whole distribution, so that the learner's log-probabilities are those of the sampler"
"""Why an option that cuts the distribution of the samples is lost."""


@dataclass(frozen=True)
class Rule:
    """The fate of a key. `part_of`, `idle` and `lost` make the rules without a counterpart.

    Attributes:
        key: the other system's dotted key. `*` matches any text.
        target: our dotted key; empty: there is no counterpart.
        note: a description of the translation, or the reason why there is no counterpart. Empty: the value is taken over.
        convert: computes our value from the key's value and all values: a value, `Noted`, `Lost`, `Off` or PART. None: the same
            value. A mapping sets the keys below `target`.
        fate: the declared fate.
    """

    key: str
    target: str = ""
    note: str = ""
    convert: Convert | None = None
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
    why: str,
    *keys: str,
    unless: Iterable[object] = (None,),
    off: Callable[[Values], str] | None = None,
    another_run: bool = False,
) -> tuple[Rule, ...]:
    """The fate of keys that change training and cannot be carried over.

    Args:
        why: what is missing here, or what to do instead.
        unless: values with which the key changes nothing, such as the value that switches it off.
        off: returns why the key has no effect beside the other values, or an empty text.
        another_run: whether a run without the key would be another kind of run. Such losses are reported first.
    """
    harmless = tuple(unless)

    def convert(value: object, values: Values) -> Lost | Off:
        if any(value is each or value == each for each in harmless):
            return Off("this value changes nothing here")
        return Off(reason) if off and (reason := off(values)) else Lost(why)

    return tuple(Rule(key, "", why, convert, Fate.ANOTHER_RUN if another_run else Fate.LOST) for key in keys)


def unless_off(off: Callable[[Values], str], convert: Convert) -> Convert:
    """The conversion, unless the key has no effect beside the other values: `off` says why, as that of `lost`."""
    return lambda value, values: Off(why) if (why := off(values)) else convert(value, values)


def one_of(schedules: Collection[str], *usual: object) -> Convert:
    """The fate of a schedule's name, which an optimizer's settings read. `usual`: values for the other system's own choice."""
    missing = f"no counterpart of this schedule ({', '.join(schedules)}); the rate is constant here"
    return lambda value, values: PART if value in schedules or value in usual else Lost(missing)


@dataclass(frozen=True)
class ForeignEnvironment:
    """The environment of a run of several turns: what the other system's keys say about it.

    Attributes:
        file: our `environment.file`, a path that the user must complete or adapt.
        origin: where the other system has the code that becomes this file.
        turns: the largest number of answers of an episode; None: tokens alone bound it.
        turns_origin: the key with that number.
        tokens: prompt and conversation together, if they are bounded otherwise than those of a run of one answer.
        key: the key that the loss is about.
        value: its value.
        loss: what must be written or adapted before a run.
    """

    file: str
    origin: str
    turns: int | None
    turns_origin: str
    key: str
    value: object
    loss: str
    tokens: int | None = None


@dataclass(frozen=True)
class System:
    """Another system.

    Attributes:
        name: name on the command line.
        title: name in texts.
        rules: rules of its keys. A key may have several rules. Rules that name the whole key have priority over those with `*`.
        defaults: its defaults for keys, used when a file lacks them: those that differ from ours, and those that rules read.
        fixed: our keys that follow from the system itself, or from several keys: computes value and reason from all values. The
            value may be `Lost`.
        epochs: its key with the number of passes over the data, for files without a number of iterations.
        environment: computes the environment of a run of several turns from all values; None: one answer per prompt.
    """

    name: str
    title: str
    rules: tuple[Rule, ...]
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: Callable[[Values], Fixed] = lambda values: {}
    epochs: str = ""
    environment: "Callable[[Values], ForeignEnvironment | None]" = lambda values: None

    def rules_of(self, key: str) -> list[Rule]:
        """The rules of a key: those that name it, else those with the longest pattern that matches."""
        if named := [rule for rule in self.rules if rule.key == key]:
            return named
        matching = [rule for rule in self.rules if rule.applies_to(key)]
        return [rule for rule in matching if rule.key == max((each.key for each in matching), key=len)]


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree of mappings by dotted key. Empty mappings have none."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree
