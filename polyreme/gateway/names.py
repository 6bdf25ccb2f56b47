"""The model names of a gateway, which select policy versions.

Invariant: pure. NAME is any served version, `latest` the newest one, NAME@17 version 17; an alias stands for one of these.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from polyreme.errors import ConfigError

Wanted = int | Literal["any", "latest"]
"""A policy version, or a rule that selects one of the served versions."""

LATEST = "latest"
_ALIAS = re.compile(r"[^\s@=]+")
_VERSION = re.compile(r"[0-9]{1,18}")
"""Digits that fit the 64 bits of a version."""


@dataclass(frozen=True)
class VersionBounds:
    """The versions that a request's headers allow.

    Attributes:
        minimum, exact: None: any.
    """

    minimum: int | None = None
    exact: int | None = None

    def allow(self, version: int) -> bool:
        return (self.minimum is None or version >= self.minimum) and self.exact in (None, version)


@dataclass(frozen=True)
class ModelNames:
    """The names of one run's models.

    Attributes:
        base: name of the run's model at its replicas.
        aliases: additional names.
    """

    base: str
    aliases: Mapping[str, Wanted] = field(default_factory=dict)

    def wanted(self, model: str | None) -> Wanted | None:
        """The version that `model` selects; None: unknown name. A request without a model uses the base name."""
        if model is None or model == self.base:
            return "any"
        if model in self.aliases:
            return self.aliases[model]
        if model == LATEST:
            return "latest"
        name, at, version = model.rpartition("@")
        return int(version) if at and name == self.base and _VERSION.fullmatch(version) else None

    def listed(self, versions: Iterable[int]) -> list[str]:
        """All currently valid names: the base name first, then `latest`, the aliases, and the served versions, newest first."""
        served = sorted(set(versions), reverse=True)
        names = [self.base, LATEST, *sorted(self.aliases), *(f"{self.base}@{version}" for version in served)]
        return list(dict.fromkeys(names))

    def described(self, versions: Iterable[int]) -> str:
        """The description of the names of `listed` in errors."""
        return "a model of " + ", ".join(f"`{name}`" for name in self.listed(versions))


def parse_aliases(words: Sequence[str], base: str) -> dict[str, Wanted]:
    """The aliases of `--alias NAME=17`, `NAME=latest` and `NAME` (any version that is served).

    Raises:
        ConfigError: a word has another form, or its name is that of the model or of another alias.
    """
    found: dict[str, Wanted] = {}
    for word in words:
        name, _, target = word.partition("=")
        is_version = _VERSION.fullmatch(target)
        if not _ALIAS.fullmatch(name) or not (is_version or target == LATEST or name == word):
            raise ConfigError("an alias NAME=VERSION, NAME=latest or NAME", repr(word), "Fix --alias.")
        if name in (base, LATEST) or name in found:
            raise ConfigError("an alias with a unique name", repr(name), "Choose another name for --alias.")
        found[name] = int(target) if is_version else "latest" if target == LATEST else "any"
    return found
