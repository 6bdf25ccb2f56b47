"""Conversions of learning-rate schedules by the names of transformers, which TRL and OpenRLHF use.

Invariant: pure functions of a key's value and all values, as `Rule.convert` takes them.
"""

from collections.abc import Callable

from polyreme.import_config.convert import part_of_run
from polyreme.import_config.rules import Convert, Lost, Off, Values, unless_off

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "polynomial": "linear",
}
"""Our schedule for each name."""
POLYNOMIAL_END = 1e-7
"""Final rate of transformers' polynomial schedule, whose default power is 1."""


def schedule(options: str = "") -> Convert:
    """Our schedule. `options` is the key of the schedule's own options."""

    def convert(value: object, values: Values) -> object:
        if value not in SCHEDULES:
            return Lost(f"no such schedule here; known: {', '.join(SCHEDULES)}. Used here: constant")
        if value == "polynomial" and values.get(f"{options}.power", 1) != 1:
            return Lost("a polynomial of another power than 1. Used here: constant")
        return SCHEDULES[value]

    return convert


def minimum(rate: str, ratio: Callable[[Values], float]) -> Convert:
    """The final rate of a schedule that has one: `ratio` of the value of the key `rate`."""

    def convert(value: object, values: Values) -> object:
        if value == "polynomial":
            return POLYNOMIAL_END
        return values[rate] * ratio(values) if "with_min_lr" in str(value) else Off("falls to 0, or not at all")

    return convert


def warmup_ratio(schedule_key: str) -> Convert:
    """A warm-up as a part of the run. transformers' constant schedule has none."""
    return unless_off(lambda values: without_warmup(values, schedule_key), part_of_run)


def without_warmup(values: Values, key: str) -> str:
    """Why the schedule named by `key` has no warm-up; empty where it has one."""
    return "transformers' constant schedule has no warm-up" if values.get(key) == "constant" else ""
