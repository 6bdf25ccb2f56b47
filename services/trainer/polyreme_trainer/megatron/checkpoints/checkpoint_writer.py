"""Writes the checkpoints of iterations, of a warm start and of stages in the background, with the Hugging Face directory of each.

`start` copies the state to host memory and returns. A thread of each rank writes it while training continues. Rank 0's thread
writes the export and, once all ranks have written their files, the manifest; then it removes old checkpoints.

Invariant: at most one save is being written, and it counts only after `finish` has returned it on every rank. An export is
complete before its checkpoint. The error of a save that fails is raised by `finish`.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from polyreme.errors import PolyremeError, UnavailableError
from polyreme.rundir.checkpoint_manifest import number_of, numbered
from polyreme_trainer.learner.engine import Saved
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron import atomic
from polyreme_trainer.megatron.checkpoints import checkpoint
from polyreme_trainer.megatron.checkpoints.checkpoint import RankContents
from polyreme_trainer.megatron.huggingface.export import Export, export_hf
from polyreme_trainer.megatron.training.roles import AnyRole

SLOWEST_WRITE = 10e6
"""Bytes per second."""
CLOSE_SECONDS = 30.0
"""Seconds for which a learner that ends with an error waits for the running save."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundWork(Generic[T]):
    """Starts `work` at once, in its own daemon thread: work that never returns, as on a dead file system, keeps no process alive.

    Args:
        name: a description of the work, for the thread's name and for errors.
        seconds: the deadline.
    """

    def __init__(self, name: str, work: Callable[[], T], seconds: float) -> None:
        self._name, self._work, self._seconds = name, work, seconds
        self._deadline = time.monotonic() + seconds
        self._future: Future[T] = Future()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def finished(self, seconds: float = 0.0) -> bool:
        """Waits up to `seconds` for the end of the work. Returns whether it has succeeded.

        Raises:
            The work's error; or UnavailableError when it is not finished by the deadline.
        """
        if not wait([self._future], seconds).done:
            if time.monotonic() > self._deadline:
                raise UnavailableError(
                    f"{self._name} within {self._seconds:.0f} s", "not finished", "Check the file system of the run directory."
                )
            return False
        self._future.result()
        return True

    def result(self) -> T:
        """The return value of the finished work."""
        return self._future.result(0)

    def end(self, seconds: float) -> bool:
        """Waits up to `seconds` for the work to end, successfully or not. Returns whether it has ended."""
        return bool(wait([self._future], seconds).done)

    def _run(self) -> None:
        try:
            self._future.set_result(self._work())
        except BaseException as error:  # noqa: BLE001 - `finished` raises it in the caller's thread
            self._future.set_exception(error)


@dataclass(frozen=True)
class Save:
    """What to save.

    Attributes:
        path: the checkpoint's directory, see `checkpoint_path`.
        roles: the roles in the checkpoint.
        facts: returns JSON values for the manifest. Called in rank 0's thread.
        keep: number of checkpoints with the same prefix to keep.
        hf_path: the Hugging Face directory to write before the checkpoint; None: none.
        exports: its models, by subdirectory; "" is the model. Their tensors do not change until the save ends. On rank 0 only.
        discard: removes what has become unnecessary, once the checkpoint is complete. Called in rank 0's thread.
    """

    path: Path
    roles: Sequence[AnyRole]
    facts: Callable[[], Mapping[str, object]]
    keep: int
    hf_path: Path | None = None
    exports: Mapping[str, Export] = field(default_factory=dict)
    discard: Callable[[], None] = lambda: None

    @property
    def export_bytes(self) -> int:
        """The bytes of the tensors to export."""
        return sum(tensor.nbytes for model in self.exports.values() for tensor in model.tensors.values())


@dataclass(frozen=True)
class Pending:
    """A save that is being written. The work returns the number of the oldest checkpoint, and the seconds that writing took."""

    save: Save
    work: BackgroundWork[tuple[int, float]]


class CheckpointWriter:
    """Writes one checkpoint at a time.

    Args:
        ranks: the ranks that take part in every save.
        write_seconds: part of a save's deadline; the other part is the time of its bytes at the speed SLOWEST_WRITE.
        poll_seconds: between two looks at a save that is waited for.
    """

    def __init__(self, ranks: Ranks, write_seconds: float = 300.0, poll_seconds: float = 1.0) -> None:
        self._ranks, self._write_seconds, self._poll_seconds = ranks, write_seconds, poll_seconds
        self._pending: Pending | None = None

    def start(self, save: Save) -> None:
        """Copies the state to host memory and starts to write it. Requires that no other save is being written. Collective.

        Raises:
            OSError, RunFailedError: see `checkpoint.begin`.
        """
        assert self._pending is None, "one save at a time"
        own = checkpoint.rank_contents(save.roles)
        nbytes = own.ranks * own.nbytes + save.export_bytes
        temporary = checkpoint.begin(save.path, self._ranks, nbytes)
        seconds = self._write_seconds + nbytes / SLOWEST_WRITE
        work = partial(self._write, save, temporary, own.copied(save.roles[0].model.device), nbytes, seconds)
        self._pending = Pending(save, BackgroundWork(f"the checkpoint {save.path.name}", work, seconds))

    def finish(self, wait: bool) -> Saved | None:
        """The running save once it is complete on all ranks. None while it is incomplete, or when there is none. Collective.

        Args:
            wait: return only when nothing is being written.

        Raises:
            The error of this rank's thread. An error of rank 0's thread is a LeaderError on the other ranks.
        """
        while (pending := self._pending) is not None:
            seconds = self._poll_seconds if wait else 0.0
            if not self._ranks.leads:
                pending.work.finished(seconds)
            if self._ranks.broadcast_from_leader(partial(_finished, pending.work, seconds)) == b"\x01":
                self._pending = None
                path, number = pending.save.path, number_of(pending.save.path)
                oldest, took = pending.work.result() if self._ranks.leads else (number, 0.0)
                return Saved(number, path, pending.save.hf_path, oldest, took)
            if not wait:
                break
        return None

    def close(self) -> None:
        """Waits once more for a running save after an error elsewhere. Not collective."""
        if self._pending is None:
            return
        name = self._pending.save.path.name
        try:
            if not self._pending.work.finished(CLOSE_SECONDS):
                logger.warning("the checkpoint %s was not completed within %.0f s", name, CLOSE_SECONDS)
        except Exception as error:  # noqa: BLE001 - another error already ends the learner
            logger.warning("the checkpoint %s was not completed: %s", name, error)

    def _write(self, save: Save, temporary: Path, own: RankContents, nbytes: int, seconds: float) -> tuple[int, float]:
        """Writes this rank's part. On rank 0 also completes the checkpoint and removes old ones."""
        began = time.perf_counter()
        if not self._ranks.leads:
            try:
                checkpoint.write(temporary, own)
            except OSError as error:
                if temporary.exists():  # else rank 0, which looks for the receipt there, raises
                    checkpoint.give_up(temporary, own, error)
            return number_of(save.path), time.perf_counter() - began
        try:
            if save.hf_path is not None:
                further = dict(save.exports)
                export_hf(save.hf_path, further.pop(""), further)
            checkpoint.write(temporary, own)
            checkpoint.complete(temporary, save.path, own, save.facts(), seconds)
        except (OSError, PolyremeError) as error:
            if isinstance(error, FileNotFoundError) and not temporary.exists():
                raise PolyremeError(
                    f"the directory {temporary} of this save",
                    "none, because another process that saves into the same directory has removed it",
                    "Stop the other learner of this run directory, then continue with --resume.",
                ) from error
            atomic.discard(temporary)  # its files may have filled the disk
            if save.hf_path is not None and not save.path.exists():
                atomic.discard(save.hf_path)
            raise checkpoint.save_error(error, save.path, nbytes) if isinstance(error, OSError) else error from None
        folder, prefix, number = save.path.parent, save.path.name.rpartition("-")[0], number_of(save.path)
        checkpoint.prune(folder, number, save.keep, prefix)
        save.discard()
        return min([number, *map(number_of, numbered(folder, prefix))]), time.perf_counter() - began


async def _finished(work: BackgroundWork[tuple[int, float]], seconds: float) -> bytes:
    """One byte: whether the work finishes within `seconds`."""
    return bytes([await asyncio.to_thread(work.finished, seconds) if seconds else work.finished()])
