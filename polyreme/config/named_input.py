"""Models and data by name: `owner/name` or `owner/name@revision` of a Hugging Face hub where a path can stand.

Invariant: a local path wins over a name. A loaded configuration has absolute paths and, relative, the names that no local file
has; a started one has only absolute paths, and its key `names` says which of them are repositories, at which commit.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from polyreme.config.section import Operational, Section

Kind = Literal["model", "dataset"]

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w][\w./-]*))?")
_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".idx", ".bin", ".txt", ".gz", ".zst")
"""Suffixes of data files, with which no name ends."""


@dataclass(frozen=True)
class Nameable:
    """Marks a field whose path may be a name.

    Attributes:
        splits: for data, the splits of a repository to take when none is named: the first one that it has.
    """

    kind: Kind
    splits: tuple[str, ...] = ()


MODEL = Nameable("model")
TRAINING = Nameable("dataset", ("train",))
HELD_OUT = Nameable("dataset", ("test", "validation"))


class NamedInput(Section):
    """A repository that a start has found and downloaded. A resume, a fork and every process of the run use the same commit."""

    type: Kind = Field(description="model or dataset.")
    name: str = Field(description="owner/name.")
    asked: str | None = Field(None, description="The branch, tag or commit in the configuration file; null: the default branch.")
    revision: str = Field(description="The commit.")
    config: str | None = Field(None, description="For data: the configuration of the repository.")
    split: str | None = Field(None, description="For data: the split.")
    path: Operational[Path] = Field(description="Where its files are on the machine that started the run.")

    def __str__(self) -> str:
        part = " ".join(filter(None, (self.config, self.split)))
        return f"{self.name}@{self.revision}{f' ({part})' if part else ''}"


def split_name(path: Path | str) -> tuple[str, str | None] | None:
    """Name and revision of a text like owner/name@revision; None when it is none."""
    found = _NAME.fullmatch(str(path))
    return None if found is None or found[1].lower().endswith(_FILES) else (found[1], found[2])


def nameable(metadata: list[object]) -> Nameable | None:
    """The mark among a field's metadata, if there is one."""
    return next((mark for mark in metadata if isinstance(mark, Nameable)), None)


def filled(tree: Any, values: Mapping[str, object]) -> Any:
    """A tree of plain values in which each text that is a key of `values` is replaced by its value."""
    if isinstance(tree, Mapping):
        return {key: filled(value, values) for key, value in tree.items()}
    if isinstance(tree, list):
        return [filled(value, values) for value in tree]
    return values.get(tree, tree) if isinstance(tree, str) else tree
