"""Keeps the export of the best evaluated version in hf/best.

Invariant: hf/best is complete or missing. It shares its files with the export (hard links), so it costs no space, and it stays
when `keep_checkpoints` removes that export.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

BEST = "best"
_VERSION = "policy_version"
"""File in hf/best with the number of its version."""


class BestExport:
    """Follows the evaluations of one run. `folder`: the run's hf/."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def update(self, evaluations: Mapping[int, float]) -> None:
        """Links the best version's export if it is a new best. Logs an export that cannot be linked.

        Args:
            evaluations: results by version, of one metric. If the version in hf/best has no result here, a version with a result
            replaces it.
        """
        kept = self.version()
        there = {version for version in evaluations if version == kept or (self._export(version) / "config.json").is_file()}
        best = best_version({version: evaluations[version] for version in there})
        if best is None or best == kept:
            return
        try:
            link_export(self._export(best), self._folder / BEST, {_VERSION: f"{best}\n"})
        except OSError as error:  # it was just removed, or the file system has no hard links
            logger.warning("cannot keep the export of version %d as %s: %s", best, self._folder / BEST, error)

    def version(self) -> int | None:
        """The version in hf/best, or None without one."""
        try:
            return int((self._folder / BEST / _VERSION).read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None

    def _export(self, version: int) -> Path:
        return self._folder / f"iteration-{version:06d}"


def link_export(source: Path, target: Path, further: Mapping[str, str]) -> None:
    """Replaces the directory `target` by links to the files of `source`. `further`: more files, by name. Raises OSError."""
    partial, old = target.with_name(f".{target.name}-partial"), target.with_name(f".{target.name}-old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=os.link)
    for name, content in further.items():
        (partial / name).write_text(content)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def best_version(evaluations: Mapping[int, float]) -> int | None:
    """The version with the highest result; of equal ones, the oldest. None without a result."""
    return min(evaluations, key=lambda version: (-evaluations[version], version), default=None)
