"""The name of a checkpoint, and its manifest, checkpoint.json: format, iteration, layout and facts, the xxh3_64 of every file,
and a digest of itself.

Invariant: `read_manifest` returns only what `write_manifest` wrote. Every other byte or name is damage, which raises ValueError.
An undamaged manifest of another format is refused with an error that names the format. What has no checkpoint's name, such as a
copy, is never used, changed or removed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from polyreme.errors import ConfigError

CheckpointFacts = Mapping[str, Any]
"""The facts of a checkpoint: JSON values."""

MANIFEST = "checkpoint.json"
WARM_START = "warm-start"
"""Prefix of the checkpoints between the steps of a warm start."""
_FORMAT = 6
_BLOCK = 1 << 24


def write_manifest(
    folder: Path, iteration: int, layout: Mapping[str, object], facts: Mapping[str, object], files: Mapping[str, str]
) -> None:
    """Writes the manifest of a checkpoint whose other files are complete. `files`: name -> xxh3_64."""
    fields = {"format": _FORMAT, "iteration": iteration, "layout": dict(layout), "facts": dict(facts), "files": dict(files)}
    (folder / MANIFEST).write_text(json.dumps({**fields, "digest": _digest(fields)}, indent=1))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The fields of the manifest in a checkpoint's directory.

    Raises:
        ConfigError: it is undamaged, and has another format.
        ValueError: it is damaged, or belongs to another directory.
        OSError: it cannot be read.
    """
    try:
        fields = json.loads((folder / MANIFEST).read_text())
        digest, found = fields.pop("digest"), fields["format"]
        if digest != _digest(fields):
            raise ValueError("other bytes than were saved")
        if fields["iteration"] != number_of(folder):
            raise ValueError(f"expected the iteration of the directory's name; found {fields['iteration']}")
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if found != _FORMAT:
        raise ConfigError(
            f"a checkpoint of format {_FORMAT}",
            f"format {found!r} in {folder}",
            "Continue with the version of Polyreme that saved it, or start a new run from its Hugging Face export.",
        )
    return fields


def is_intact(folder: Path, files: Mapping[str, str]) -> bool:
    """Whether every file of a manifest can be read and has its digest."""
    try:
        return all(digest_of(folder / name) == digest for name, digest in files.items())
    except OSError:
        return False


def digest_of(file: Path) -> str:
    """xxh3_64 of a file's bytes, hexadecimal."""
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def checkpoint_path(root: Path, number: int, prefix: str = "iteration") -> Path:
    """The path of a checkpoint, or of its export: PREFIX-NUMBER, the number with at least six digits."""
    return root / f"{prefix}-{number:06d}"


def numbered(root: Path, prefix: str = "iteration") -> list[Path]:
    """The directories whose names `checkpoint_path` gives, by their numbers. Nothing is read from them."""
    found = [
        path for path in root.glob(f"{prefix}-*") if path == checkpoint_path(root, number_of(path), prefix) and path.is_dir()
    ]
    return sorted(found, key=number_of)


def number_of(folder: Path) -> int:
    """The number at the end of a checkpoint's name; -1 without one."""
    text = folder.name.rpartition("-")[2]
    return int(text) if text.isdecimal() else -1


def _digest(fields: Mapping[str, object]) -> str:
    return xxhash.xxh3_64(json.dumps(fields, sort_keys=True).encode()).hexdigest()
