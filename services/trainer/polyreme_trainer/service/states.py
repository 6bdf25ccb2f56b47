"""Models as directories: the states from which a restarted learner continues, and the checkpoints that tenants save.

    MODEL/states/SEQ                 weights, moments and gradient after request SEQ; the newest one counts
    MODEL/weights/NAME               a checkpoint to continue from: weights and moments
    MODEL/sampler_weights/NAME       a checkpoint to sample from: PEFT's files, or all weights
    MODEL/external_weights/NAME      the same files, to download
    MODEL/KIND/.NAME.replaced        what a checkpoint has replaced, until it is known to be good

Invariant: a directory is there whole or not at all. Each has facts.json: the base model's name, the adapters, the request that
wrote it, whose it is, and when it expires. Checkpoints take at most `limit` bytes.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import get_args

from polyreme_trainer.megatron.atomic import discard, new_directory, publish, sync
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.folders import FACTS, Facts, Folders, remove, size
from polyreme_trainer.service.messages import Kind, SavedModel


class States(Folders):
    """The directories as the learner writes them.

    Args:
        limit: bytes of all checkpoints.
        unnamed: checkpoints without a name that are kept of a model, the newest ones.
    """

    def __init__(self, root: Path, limit: int, unnamed: int = 32) -> None:
        super().__init__(root)
        self._limit, self._unnamed = limit, unnamed

    def save_state(self, model: str, write: Callable[[Path], None], facts: Facts) -> None:
        """Saves the state of a model after the request `facts.seq`, which `write` writes, and deletes its earlier states."""
        with new_directory(self._states(model) / str(facts.seq)) as folder:
            write(folder)
            (folder / FACTS).write_text(facts.to_json())
        for old in self._saved(model):
            if int(old.name) < facts.seq:
                discard(old)

    def newest_state(self, model: str) -> tuple[Path, Facts] | None:
        """The directory of the model's newest saved state, and its facts."""
        saved = self._saved(model)
        if not saved:
            return None
        facts = Facts.read(saved[-1])
        assert facts is not None
        return saved[-1], facts

    def save(self, checkpoint: SavedModel, write: Callable[[Path], None], facts: Facts, overwrite: bool) -> None:
        """Saves a checkpoint whose directory `write` fills. What it replaces is kept until `settle`. Raises TenantError when the
        name is taken, or the disk's share is."""
        path, before = self.folder(checkpoint), Facts.read(self.folder(checkpoint))
        again = before is not None and before.seq == facts.seq  # after a restart: the request finds what it has written itself
        if before is not None and not (again or overwrite or before.is_expired):
            raise TenantError(f"expected a new name, or overwrite; found a checkpoint at {checkpoint}")
        with new_directory(path) as folder:
            write(folder)
            (folder / FACTS).write_text(facts.to_json())
            self._make_room(checkpoint, size(folder))
            if not again:
                _link_all(path, _replaced(path))
        if not facts.is_named:
            for old in [each for each in self.kept(checkpoint.model) if not each.facts.is_named][: -self._unnamed]:
                remove(self.folder(old.name))

    def settle(self, checkpoint: SavedModel, seq: int, *, is_good: bool = True) -> None:
        """Decides about a checkpoint that the request `seq` has saved: one that is not good gives its place back to what it has
        replaced."""
        path, replaced = self.folder(checkpoint), _replaced(self.folder(checkpoint))
        facts = Facts.read(path)
        if facts is not None and facts.seq != seq:
            return  # it was saved again since
        if facts is not None and not is_good:
            if replaced.exists():
                publish(replaced, path)
            else:
                remove(path)
        discard(replaced)

    def unfinished(self) -> list[str]:
        """The models with a state to continue from."""
        return [model for model in self.models() if self._states(model).exists()]

    def check_room(self) -> None:
        """Raises TenantError when states and checkpoints take all of the disk's share."""
        if (total := sum(size(folder) for model in self.models() for folder in self._saved_in(model))) >= self._limit:
            raise TenantError(
                f"expected less than {self._limit / 2**30:.3g} GiB of models on disk; found {total / 2**30:.3g}. "
                "Unload some, or delete checkpoints."
            )

    def remove(self, model: str) -> None:
        """Deletes the states of an unloaded model. Its checkpoints stay."""
        discard(self._states(model))

    def sweep(self) -> None:
        """Deletes every expired checkpoint, and the directories of models without anything."""
        for model in self.models():
            for folder in (self.root / model).glob("*weights/[!.]*"):
                if (facts := Facts.read(folder)) is not None and facts.is_expired:
                    remove(folder)
            for folder in (*self._saved_in(model), self.root / model):
                with suppress(OSError):  # something is in it
                    folder.rmdir()

    def _make_room(self, checkpoint: SavedModel, needed: int) -> None:
        """Deletes checkpoints without a name, the oldest first, until one of `needed` bytes is within the limit. Raises
        TenantError, and deletes none, when those with a name leave no room."""
        others = [each for model in self.models() for each in self.kept(model) if each.name != checkpoint]
        if (named := needed + sum(each.nbytes for each in others if each.facts.is_named)) > self._limit:
            raise TenantError(
                f"expected at most {self._limit / 2**30:.3g} GiB of checkpoints; found {named / 2**30:.3g} with this one. "
                "Delete some, or give them a ttl."
            )
        total = needed + sum(each.nbytes for each in others)
        for each in sorted(others, key=lambda each: each.facts.created):
            if total > self._limit and not each.facts.is_named:
                remove(self.folder(each.name))
                total -= each.nbytes

    def _states(self, model: str) -> Path:
        return self.root / model / "states"

    def _saved_in(self, model: str) -> list[Path]:
        """The folders of a model's checkpoints and states. What else is in its directory is the observer's."""
        return [*(self.root / model / kind for kind in get_args(Kind)), self._states(model)]

    def _saved(self, model: str) -> list[Path]:
        """The model's states, the oldest first."""
        folders = self._states(model).iterdir() if self._states(model).exists() else ()
        return sorted((folder for folder in folders if folder.name.isdigit()), key=lambda folder: int(folder.name))


def _replaced(path: Path) -> Path:
    """Where what was in a directory stays until it is known whether what has replaced it is good."""
    return path.with_name(f".{path.name}.replaced")


def _link_all(path: Path, copy: Path) -> None:
    """Makes a copy of a directory with the same files; none where there is no directory, or a client deletes it meanwhile."""
    discard(copy)
    try:
        shutil.copytree(path, copy, copy_function=os.link)
        sync(copy)
    except OSError:
        discard(copy)
        if path.exists():
            raise
