"""Imports of torch, transformers and vLLM, in less time.

Invariant: an imported module is what it is without this one.
"""

import gc
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getmodulename

_NAME = re.compile(r"^Name:[ \t]*(.*)", re.MULTILINE | re.IGNORECASE)
_PYTHON = re.compile(r'^"?([^/,\n"]+)(?:/[^,\n]*)?\.py(?=["\n,]|$)', re.MULTILINE)
_FIRST = re.compile(r'^"?([^/,\n"]+)(/?)', re.MULTILINE)


@contextmanager
def quick_imports() -> Iterator[None]:
    """For a block that imports, or that makes something whose module is imported then.

    It suspends garbage collection, which takes a tenth of the time, and runs finalizers amid C code, where Python ignores a
    signal's exception. transformers asks at its import which distribution has which package, and gets `packages`' answer.
    """
    enabled, original = gc.isenabled(), importlib.metadata.packages_distributions
    gc.disable()
    importlib.metadata.packages_distributions = packages
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = original
        if enabled:
            gc.enable()


def packages() -> dict[str, list[str]]:
    """As `importlib.metadata.packages_distributions`, which makes an object of every line and file of every distribution: the
    names of the distributions of each package, in a tenth of the time."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        declared = (distribution.read_text("top_level.txt") or "").split()
        if names := declared or _inferred(distribution):
            match = _NAME.search(distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "")
            owner = match[1] if match else distribution.metadata["Name"]
            for name in names:
                found.setdefault(name, []).append(owner)
    return found


def _inferred(distribution: importlib.metadata.Distribution) -> set[str]:
    """The top-level names of a distribution's files."""
    files = distribution.read_text("RECORD") or "\n".join(map(str, distribution.files or ()))
    if sys.version_info < (3, 12):
        return set(_PYTHON.findall(files))
    tops = {first if slash else getmodulename(first) or first for first, slash in _FIRST.findall(files)}
    return {name for name in tops if "." not in name}
