"""The learner's files in the run directory: checkpoints for resuming, and a Hugging Face directory for each of them.

`save` copies the state to host memory and returns. A thread of each rank writes it while training continues. Rank 0's thread writes the
export and, once all ranks have written their files, the manifest; then it removes old checkpoints.

Invariant: a version's Hugging Face directory is complete before its checkpoint, so every checkpoint has one. At most one save is being
written, and it counts only after `finish` has returned it on every rank. Version 0's directory is never removed: it is the reference policy,
and every checkpoint has its digest.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme.experience.loading import LoadReports, unreported
from polyreme_trainer.learner.engine import Saved
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron import atomic, checkpoint
from polyreme_trainer.megatron.background import BackgroundWork
from polyreme_trainer.megatron.export import Export, export_hf
from polyreme_trainer.megatron.frozen_weights import FrozenWeights
from polyreme_trainer.megatron.roles import Role

WARM_START = "warm-start"
"""Prefix of the checkpoints between the steps of a warm start."""

FROZEN = "frozen"
"""The checkpoint's fact with the digests of the frozen weights that training used."""

WRITE_SECONDS = 300.0
SLOWEST_WRITE = 10e6
"""Bytes per second. A save's deadline is `WRITE_SECONDS` plus the time of its bytes at this speed."""
POLL_SECONDS = 1.0
CLOSE_SECONDS = 30.0
"""Seconds for which a learner that ends with an error waits for the running save."""

logger = logging.getLogger(__name__)


def find_newest(ranks: Ranks, root: Path, prefix: str = "iteration") -> checkpoint.Checkpoint | None:
    """The newest intact checkpoint; None when there is none. Collective.

    Raises:
        ConfigError: there are checkpoints, but all of them are damaged.
    """

    async def find() -> bytes:
        found = await asyncio.to_thread(checkpoint.newest, root, prefix)
        if found is None and (damaged := checkpoint.count(root, prefix)):
            raise ConfigError(
                f"an undamaged checkpoint in {root}",
                f"{damaged}, all damaged (the log says how)",
                "Restore one from a copy, or remove the directory and start the run again.",
            )
        return found.path.name.encode() if found else b""

    name = ranks.broadcast_from_leader(find).decode()
    return read_shared(root / name) if name else None


def read_shared(path: Path) -> checkpoint.Checkpoint:
    """Reads a checkpoint by path: a directory listing may be stale on a machine that is not the writer's. Raises ConfigError."""
    found = checkpoint.read(path)
    if found is None:
        raise ConfigError(f"checkpoint {path}, which rank 0 found intact", "no readable manifest", "Share the run directory.")
    return found


@dataclass(frozen=True)
class Pending:
    """A save that is being written. The work returns the oldest version with a checkpoint, and the seconds that writing took."""

    version: int
    work: BackgroundWork[tuple[int, float]]


class Saves:
    """The run directory's checkpoints and exports.

    Attributes:
        newest: the version of the newest checkpoint; None without one.
    """

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._root = config.run_dir / "checkpoints"
        self._frozen = FrozenWeights(ranks)
        self._pending: Pending | None = None
        self.newest: int | None = None

    def hf_path(self, version: int) -> Path:
        """The path of the Hugging Face directory of `version`."""
        return self._config.run_dir / "hf" / f"iteration-{version:06d}"

    def load(self, roles: Sequence[Role[Any]], loads: LoadReports = unreported) -> tuple[int, Mapping[str, Any]] | None:
        """Restores the newest intact checkpoint. Collective.

        Returns:
            Its version and facts; None when the run has no checkpoint yet.

        Raises:
            ConfigError: all checkpoints are damaged, or they belong to adapters of other weights.
        """
        found = find_newest(self._ranks, self._root)
        if found is None:
            return None
        self.newest = found.iteration
        self._frozen.check(self._bases, found.facts[FROZEN])
        self._check_warm_start(found.facts)
        checkpoint.load(found, roles, loads)
        return self.newest, found.facts

    def save(
        self,
        version: int,
        roles: Sequence[Role[Any]],
        facts: Mapping[str, Any],
        exports: Mapping[str, Export],
    ) -> None:
        """Copies `version` to host memory and starts to write its Hugging Face directory and its checkpoint. Collective.

        Requires that no other save is being written; see `finish`.

        Args:
            roles: the roles to save in the checkpoint.
            facts: facts for the checkpoint; rank 0's are stored.
            exports: the models to export, by the name of their subdirectory; "" is the policy. Their tensors do not change until the
                save is finished. Used on rank 0.
        """
        assert self._pending is None, "one save at a time"
        path = checkpoint.iteration_path(self._root, version)
        checkpoint.begin(path)
        own = checkpoint.rank_contents(roles).copied(roles[0].model.device)
        exported = sum(tensor.nbytes for model in exports.values() for tensor in model.tensors.values())
        seconds = WRITE_SECONDS + (own.nbytes + exported) / SLOWEST_WRITE
        began = time.perf_counter()

        def write() -> tuple[int, float]:
            if not self._ranks.leads:
                checkpoint.write(path, own)
                return version, time.perf_counter() - began
            further = dict(exports)
            export_hf(self.hf_path(version), further.pop(""), further)
            checkpoint.write(path, own)
            checkpoint.complete(path, own, {**facts, **self._further_facts()}, seconds)
            self._prune(version)
            return checkpoint.find(self._root)[0].iteration, time.perf_counter() - began

        self._pending = Pending(version, BackgroundWork(f"the checkpoint of version {version}", write, seconds))

    def finish(self, wait: bool) -> Saved | None:
        """The running save once it is complete on all ranks. None while it is incomplete, or when there is none. Collective.

        Args:
            wait: return only when nothing is being written.

        Raises:
            The error of this rank's thread. An error of rank 0's thread is a LeaderError on the other ranks.
        """
        while (pending := self._pending) is not None:
            seconds = POLL_SECONDS if wait else 0.0
            if not self._ranks.leads:
                pending.work.finished(seconds)
            if self._ranks.broadcast_from_leader(partial(_finished, pending.work, seconds)) == b"\x01":
                self._pending, self.newest = None, pending.version
                path = checkpoint.iteration_path(self._root, pending.version)
                oldest, took = pending.work.result() if self._ranks.leads else (pending.version, 0.0)
                return Saved(pending.version, path, self.hf_path(pending.version), oldest, took)
            if not wait:
                break
        return None

    def close(self) -> None:
        """Waits once more for a running save after an error elsewhere. Not collective."""
        if self._pending is not None and not self._pending.work.end(CLOSE_SECONDS):
            logger.warning("the checkpoint of version %d was not completed", self._pending.version)

    def _further_facts(self) -> dict[str, Any]:
        """The facts for the manifest that a resume checks."""
        frozen = {FROZEN: self._frozen.read(self._bases), "warm_started": bool(self._config.trainer.sft)}
        return {**self._frozen.read(self._reference), **frozen}

    def check_reference(self, facts: Mapping[str, Any]) -> Path:
        """The Hugging Face directory of version 0, after a check of its weights against the checkpoint's digest. Collective.

        Raises:
            ConfigError: the weights' digest differs. On rank 0; on the others, LeaderError.
        """
        self._frozen.check(self._reference, {use: facts[use] for use in self._reference})
        return self.hf_path(0)

    def find_warm_start(self) -> checkpoint.Checkpoint | None:
        """The newest intact checkpoint of a warm start; None without one. Collective."""

        async def find() -> bytes:
            found = await asyncio.to_thread(checkpoint.newest, self._root, WARM_START)
            return found.path.name.encode() if found else b""

        name = self._ranks.broadcast_from_leader(find).decode()
        if not name:
            return None
        found = read_shared(self._root / name)
        self._frozen.check(self._bases, found.facts[FROZEN])
        return found

    def save_warm_start(self, step: int, roles: Sequence[Role[Any]], facts: Mapping[str, Any]) -> None:
        """Writes a checkpoint between two steps of a warm start and removes older ones. `step` counts the steps of all phases. Collective."""
        path = self._root / f"{WARM_START}-{step:06d}"
        checkpoint.save(path, roles, {**facts, FROZEN: self._frozen.record(self._bases)})
        if self._ranks.leads:
            self._discard_warm_starts(except_for=path)

    def _prune(self, version: int) -> None:
        checkpoint.prune(self._root, version, self._config.trainer.keep_checkpoints)
        kept = {0, *(each.iteration for each in checkpoint.find(self._root))}
        for path in self.hf_path(0).parent.glob("iteration-*"):
            if path not in {self.hf_path(each) for each in kept}:
                atomic.discard(path)
        self._discard_warm_starts()
        for folder in (self._root, self.hf_path(0).parent):  # of saves that a crash has cut short
            for pattern in (".iteration-*.new", ".iteration-*.old"):
                for path in folder.glob(pattern):
                    atomic.discard(path)

    def _discard_warm_starts(self, except_for: Path | None = None) -> None:
        for path in self._root.glob(f"{WARM_START}-*"):
            if path != except_for:
                atomic.discard(path)

    def _check_warm_start(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError for adapters when only one of the checkpoint and the configuration has a warm start.

        The reference and the critic would have the wrong frozen weights: after a warm start they start from version 0's export, otherwise
        from the actor's frozen weights.
        """
        trainer = self._config.trainer
        if trainer.lora is not None and facts["warm_started"] != bool(trainer.sft):
            with_phases, without = "trainer.sft with the phases of a warm start", "no trainer.sft"
            expected, found = (with_phases, without) if facts["warm_started"] else (without, with_phases)
            raise ConfigError(
                f"{expected}, as in the run that saved the checkpoint",
                found,
                "With adapters, a warm start decides the weights of the reference and of the critic: set trainer.sft as it was in that run.",
            )

    @property
    def _bases(self) -> dict[str, Path]:
        """The directories of the frozen weights of adapters, by the configuration key that names them."""
        if self._config.trainer.lora is None:
            return {}
        critic = self._config.trainer.critic.path if self._config.algorithm.has_critic else None
        return {"model.path": self._config.model.path} | ({} if critic is None else {"trainer.critic.path": critic})

    @property
    def _reference(self) -> dict[str, Path]:
        return {"reference": self.hf_path(0)}


async def _finished(work: BackgroundWork[Any], seconds: float) -> bytes:
    """One byte: whether the work finishes within `seconds`."""
    return bytes([await asyncio.to_thread(work.finished, seconds) if seconds else work.finished()])
