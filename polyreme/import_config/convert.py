"""Conversions that several systems share.

Invariant: pure functions of a key's value and all values, as `Rule.convert` takes them.
"""

import math
import re
from collections.abc import Callable
from typing import Any

from polyreme.import_config.rules import NOTHING, Values

KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Our name for each estimator."""


def positive(value: Any, values: Values) -> Any:
    """The number if it is positive, otherwise 0. Other systems write -1 for never."""
    return value if isinstance(value, int | float) and value > 0 else 0


def when(key: str, wanted: Any = True) -> Callable[[Any, Values], Any]:
    """The value if another key has the value `wanted`."""
    return lambda value, values: value if values.get(key) == wanted else NOTHING


def adapters(alpha: str, default: float) -> Callable[[Any, Values], Any]:
    """A rank of adapters with the value of the key `alpha`. Rank 0 stands for training all weights."""
    return lambda rank, values: {"rank": rank, "alpha": values.get(alpha, default)} if rank else NOTHING


def above(least: float) -> Callable[[Any, Values], Any]:
    """The number if it is greater than `least`, the value that disables the option."""
    return lambda value, values: value if isinstance(value, int | float) and value > least else NOTHING


def overlong(length: str, limit: str, factor: str, usual: int = 0) -> Callable[[Any, Values], Any]:
    """The penalty near the length limit, from the keys of the buffer, the limit and the factor. Other systems count the buffer in tokens.

    Args:
    usual: the limit if the file has none.
    """

    def convert(value: Any, values: Values) -> Any:
        tokens = values.get(length, usual)
        if not value or not tokens:
            return NOTHING
        return {"buffer": min(1.0, tokens / values[limit]), "factor": values.get(factor, 1.0)}

    return convert


def lookup(table: dict[Any, Any]) -> Callable[[Any, Values], Any]:
    """The table's entry of the value."""
    return lambda value, values: table.get(value, NOTHING)


def ratio(value: float, other: float) -> int:
    """`value` divided by `other`, rounded down, at least 1. Other systems drop or refuse a remainder."""
    return max(1, math.floor(value / other)) if other and other > 0 else 1


def product(*factors: Any) -> int:
    """The product of the numbers among the factors; at least 1."""
    return max(1, math.prod(int(each) for each in factors if isinstance(each, int | float) and each > 0))


def path(value: Any, values: Values) -> Any:
    """A file or directory: `~` for the home directory of a shell script."""
    return value.replace("${HOME}", "~").replace("$HOME", "~") if isinstance(value, str) else NOTHING


def paths(value: Any, values: Values) -> Any:
    """One path, or a list of them."""
    if isinstance(value, list):
        found = [path(each, values) for each in value]
        return found[0] if len(found) == 1 else found
    return path(value, values) if value else NOTHING


def trackers(value: Any, values: Values) -> Any:
    """The supported trackers in a list of loggers. Files and TensorBoard are always written."""
    names = [value] if isinstance(value, str) else value or []
    known = [{"kind": name} for name in dict.fromkeys(names) if name in ("wandb", "swanlab", "mlflow", "trackio")]
    return known or NOTHING


def name(value: Any, values: Values) -> Any:
    """A name of a run: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-") or NOTHING
