"""A run's files in the run directory: checkpoints for resuming, and a Hugging Face directory for each version that has one.

Invariant: a version's Hugging Face directory is complete before its checkpoint, so every checkpoint has one. Version 0's directory is never
removed: it is the reference policy, and every checkpoint has its digest.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme.experience.loading import LoadReports, unreported
from polyreme.rundir.checkpoint_manifest import checkpoint_path, number_of, numbered
from polyreme_trainer.learner.engine import Saved
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron import atomic
from polyreme_trainer.megatron.checkpoints import checkpoint
from polyreme_trainer.megatron.checkpoints.checkpoint_writer import CheckpointWriter, Save
from polyreme_trainer.megatron.checkpoints.frozen_weights import FrozenWeights
from polyreme_trainer.megatron.huggingface.export import Export
from polyreme_trainer.megatron.training.roles import Role

WARM_START = "warm-start"
"""Prefix of the checkpoints between the steps of a warm start."""

FROZEN = "frozen"
"""The checkpoint's fact with the digests of the frozen weights that training used."""


def find_newest(ranks: Ranks, root: Path, prefix: str = "iteration") -> checkpoint.Checkpoint | None:
    """The newest intact checkpoint; None when there is none. Collective.

    Raises:
        ConfigError: there are checkpoints, but all of them are damaged.
    """

    async def find() -> bytes:
        found = await asyncio.to_thread(checkpoint.newest, root, prefix)
        if found is None and (damaged := len(numbered(root, prefix))):
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


class Saves:
    """The run directory's checkpoints and exports.

    Attributes:
        newest: the version of the newest checkpoint; None without one.
    """

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._root, self._hf = config.run_dir / "checkpoints", config.run_dir / "hf"
        self._frozen = FrozenWeights(ranks)
        self._writer = CheckpointWriter(ranks)
        self.newest: int | None = None

    def hf_path(self, version: int) -> Path:
        """The path of the Hugging Face directory of `version`."""
        return checkpoint_path(self._hf, version)

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
        """Starts to write the Hugging Face directory and the checkpoint of `version`, see `CheckpointWriter`. Collective.

        Args:
            roles: the roles to save in the checkpoint.
            facts: facts for the checkpoint; rank 0's are stored.
            exports: the models to export, see `Save`.
        """
        self._writer.start(
            Save(
                checkpoint_path(self._root, version),
                roles,
                lambda: {**facts, **self._further_facts()},
                self._config.trainer.keep_checkpoints,
                self.hf_path(version),
                exports,
                self._discard,
            )
        )

    def save_warm_start(self, step: int, roles: Sequence[Role[Any]], facts: Mapping[str, Any]) -> None:
        """Starts to write a checkpoint between two steps of a warm start. `step` counts the steps of all phases. Collective."""
        path = checkpoint_path(self._root, step, WARM_START)
        self._writer.start(Save(path, roles, lambda: {**facts, FROZEN: self._frozen.record(self._bases)}, keep=1))

    def finish(self, wait: bool) -> Saved | None:
        """The running save once it is complete on all ranks, see `CheckpointWriter.finish`. Collective."""
        saved = self._writer.finish(wait)
        if saved is not None and saved.hf_path is not None:  # not of a warm start
            self.newest = saved.number
        return saved

    def close(self) -> None:
        """Waits once more for a running save after an error elsewhere. Not collective."""
        self._writer.close()

    def _further_facts(self) -> dict[str, Any]:
        """The facts for the manifest that a resume checks."""
        frozen = {FROZEN: self._frozen.record(self._bases), "warm_started": bool(self._config.trainer.sft)}
        return {**self._frozen.record(self._reference), **frozen}

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

    def _discard(self) -> None:
        """Removes the exports without a checkpoint, and the warm start's checkpoints. In rank 0's thread."""
        kept = {0, *(number_of(path) for path in numbered(self._root))}
        for path in numbered(self._hf):
            if number_of(path) not in kept:
                atomic.discard(path)
        for path in numbered(self._root, WARM_START):
            atomic.discard(path)
        atomic.discard_unfinished(self._hf, "iteration-*")
        atomic.discard_unfinished(self._root, f"{WARM_START}-*")

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
