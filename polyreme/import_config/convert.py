"""Conversions that several systems share.

Invariant: pure functions of a key's value and all values, as `Rule.convert` takes them.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from polyreme.config.named_input import split_name
from polyreme.errors import ConfigError
from polyreme.import_config.rules import ITERATIONS, Convert, Lost, Noted, Off, Values

K = TypeVar("K")
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KL = _KL | {f"{name}+": "k2" if ours == "k2" else f"{ours}+" for name, ours in _KL.items()}
"""Our name for each estimator. With +: its value with the gradient of k2."""


def positive(value: object, values: Values) -> object:
    """The number if it is positive, otherwise 0. Other systems write -1 for never."""
    return value if isinstance(value, int | float) and value > 0 else 0


def given(value: object, values: Values) -> object:
    """The value unless it is null or 0, which leave the choice to the other system."""
    return value or Off("not set")


def when(key: str, *wanted: object) -> Convert:
    """The value if another key has one of the values `wanted`; without `wanted`, if it is true."""
    choices = wanted or (True,)
    needs = f"only used with {key}: {' or '.join(str(each).lower() if each is True else str(each) for each in choices)}"
    return lambda value, values: value if values.get(key) in choices else Off(needs)


def unless_given(key: str, convert: Convert) -> Convert:
    """The conversion, unless another key has a value, which the other system then reads instead."""
    return lambda value, values: Off(f"{key} is read instead") if values.get(key) else convert(value, values)


def adapters(alpha: str, default: float) -> Convert:
    """A rank of adapters with the value of the key `alpha`. Rank 0 stands for training all weights."""
    return lambda rank, values: {"rank": rank, "alpha": values.get(alpha, default)} if rank else Off("all weights are trained")


def above(least: float) -> Convert:
    """The number if it is greater than `least`, the value that disables the option."""
    return lambda value, values: value if isinstance(value, int | float) and value > least else Off()


def overlong(length: str, limit: str, factor: str, usual: int = 0) -> Convert:
    """The penalty near the length limit, from the keys of buffer, limit and factor. Other systems count the buffer in tokens.

    Args:
    usual: the limit if the file has none.
    """

    def convert(value: object, values: Values) -> object:
        tokens = values.get(length, usual)
        if not value or not tokens:
            return Off()
        return {"buffer": min(1.0, tokens / values[limit]), "factor": values.get(factor, 1.0)}

    return convert


def lookup(table: Mapping[K, object], *ignored: object) -> Convert:
    """The table's entry of the value. A value that is neither there nor among `ignored` is a loss."""
    known = ", ".join(str(each) for each in table)
    missing = f"no counterpart of this value; known: {known}"
    return lambda value, values: table[value] if value in table else Off() if value in ignored else Lost(missing)


def choice(what: str, table: Mapping[K, object], *ignored: object) -> Convert:
    """The table's entry of the value, for keys that choose the algorithm. Without one, the import is refused: see `refused`."""

    def convert(value: Any, values: Values) -> object:
        if value in table:
            return table[value]
        if value in ignored:
            return Off()
        raise refused(what, value, table)

    return convert


def refused(what: str, value: object, known: Iterable[object]) -> ConfigError:
    """The error for an algorithm that we do not have: any translation would be another algorithm."""
    return ConfigError(
        f"{what} that Polyreme has ({', '.join(map(str, known))})",
        str(value),
        "There is no translation of this algorithm. Choose one of these, or write it as algorithm.source.",
    )


def part_of_run(value: float, values: Values) -> object:
    """A fraction of the run, from 0 to 1, as iterations. It is rounded up, as transformers does."""
    iterations = values.get(ITERATIONS)
    if not value or iterations is None:
        return Off("0: none")
    return Noted(math.ceil(value * iterations), f"x {iterations} iterations")


def minibatches(batch: float, mini: float, why: str) -> tuple[int, str]:
    """The number of optimizer steps that divide a batch, and its origin: CHECK where the division has a remainder."""
    steps = ratio(batch, mini)
    rest = mini > 0 and batch % mini
    return steps, f"CHECK: {batch:g} / {mini:g} is no whole number; {why}" if rest else why


def placeholder(name: str, **options: object) -> dict[str, object]:
    """A reward that we do not have, as a Python file that the user must write: the run does not start without it."""
    label = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "reward"
    return {"name": label, "file": f"FILL_IN/{label}.py", **options}


def ratio(value: float, other: float) -> int:
    """`value` divided by `other`, rounded down, at least 1. Other systems drop or refuse a remainder."""
    return max(1, math.floor(value / other)) if other and other > 0 else 1


def product(*factors: object) -> int:
    """The product of the numbers among the factors; at least 1."""
    return max(1, math.prod(int(each) for each in factors if isinstance(each, int | float) and each > 0))


def local(path: str) -> str:
    """A file or directory: `~` for the home directory of a shell script."""
    return path.replace("${HOME}", "~").replace("$HOME", "~")


def path(value: object, values: Values) -> str | Lost:
    """A file or directory as `local` writes it."""
    return local(value) if isinstance(value, str) else Lost("no path")


def paths(value: object, values: Values) -> object:
    """One path, or a list of them."""
    if isinstance(value, list):
        found = [path(each, values) for each in value]
        return found[0] if len(found) == 1 else found
    return path(value, values) if value else Off("none")


NAME_OR_PATH = "a local path, which wins, or owner/name on the hub"


def at_revision(key: str) -> Convert:
    """A path, or a name at the revision that another key has."""

    def convert(value: object, values: Values) -> object:
        where, revision = path(value, values), values.get(key)
        return f"{where}@{revision}" if revision not in (None, "main") and split_name(str(where)) is not None else where

    return convert


def of_name(key: str, usual: str | None = None) -> Convert:
    """The part of the data set that another key names: its configuration or split. `usual`: the one that is taken without."""

    def convert(value: object, values: Values) -> object:
        if value in (None, usual):
            return Off("as here")
        if split_name(str(values.get(key, ""))) is None:
            return Lost(f"{key} is a local path: name the file of this part in data.train")
        return Lost("a part of a split: use split: [from, to] of a source") if "[" in str(value) else value

    return convert


def trackers(value: str | list[str] | None, values: Values) -> object:
    """The supported trackers in a list of loggers. Files and TensorBoard are always written."""
    names = [value] if isinstance(value, str) else value or []
    known = [{"kind": name} for name in dict.fromkeys(names) if name in ("wandb", "swanlab", "mlflow", "trackio")]
    return known or Off("files and TensorBoard")


def name(value: object, values: Values) -> object:
    """A name of a run: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-") or Off("no name")
