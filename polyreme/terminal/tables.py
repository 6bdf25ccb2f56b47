"""Rows as a table of pandas or polars.

Invariant: neither library is imported before a table is requested, and neither is required.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from polyreme.errors import ConfigError

Library = Literal["pandas", "polars"]
_LIBRARIES = ("pandas", "polars")


def to_table(rows: Iterable[Mapping[str, Any]], library: Library | None = None) -> Any:
    """A DataFrame with one row per mapping. A mapping inside a row becomes columns named `outer.inner`; a missing value is null.

    Args:
        rows: JSON values by column.
        library: pandas or polars. None: the first of these that is installed.

    Raises:
        ConfigError: the library is not installed.
    """
    chosen: str | None = library or next((name for name in _LIBRARIES if find_spec(name)), None)
    if chosen not in _LIBRARIES:
        raise ConfigError("pandas or polars", str(chosen or "neither"), "Install one: pip install pandas.")
    if not find_spec(chosen):
        raise ConfigError(f"an installed {chosen}", "none", f"Install it: pip install {chosen}.")
    flat = [dict(_columns(row)) for row in rows]
    frames = import_module(chosen)
    if chosen == "pandas":
        return frames.DataFrame(flat)
    return frames.DataFrame(flat, infer_schema_length=None, strict=False)


def _columns(row: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _columns(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
