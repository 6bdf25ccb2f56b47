"""The learner's files in the run directory: checkpoints for resuming, and a Hugging Face directory for each of them.

Invariant: a version's Hugging Face directory is complete before its checkpoint, so every checkpoint has one. Version 0's directory is never
removed: it is the reference policy, and every checkpoint has its digest.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme_trainer.learner.engine import Saved
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.learner.loading import LoadReports, unreported
from polyreme_trainer.megatron import atomic, checkpoint
from polyreme_trainer.megatron.export import Export, export_hf
from polyreme_trainer.megatron.frozen_weights import FrozenWeights
from polyreme_trainer.megatron.peft_files import PeftAdapter
from polyreme_trainer.megatron.roles import Role

WARM_START = "warm-start"
"""Prefix of the checkpoints between the steps of a warm start."""

FROZEN = "frozen"
"""The fact of a checkpoint with the digests of the weights that it was trained beside."""


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


class Saves:
    """The run directory's checkpoints and exports.

    Attributes:
        newest: the version of the newest checkpoint; None without one.
    """

    def __init__(self, config: RunConfig, files: Mapping[str, bytes], ranks: Ranks) -> None:
        self._config, self._files, self._ranks = config, files, ranks
        self._root = config.run_dir / "checkpoints"
        self._frozen = FrozenWeights(ranks)
        self.newest: int | None = None

    def hf_path(self, version: int) -> Path:
        """The path of the Hugging Face directory of `version`."""
        return self._config.run_dir / "hf" / f"iteration-{version:06d}"

    def load(self, roles: Sequence[Role[Any]], loads: LoadReports = unreported) -> tuple[int, Mapping[str, Any]] | None:
        """Restores the newest intact checkpoint. Collective.

        Returns:
            Its version and facts; None when the run has no checkpoint yet.

        Raises:
            ConfigError: there are checkpoints, but all of them are damaged. Or they belong to adapters of other weights.
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
        tensors: Mapping[str, Tensor],
        further: Mapping[str, Export],
        adapter: PeftAdapter | None = None,
    ) -> Saved:
        """Writes the Hugging Face directory and the checkpoint of `version`, and removes those beyond `keep_checkpoints`. Collective.

        Args:
            roles: the roles to save in the checkpoint.
            facts: facts for the checkpoint; rank 0's are stored.
            tensors: the version's tensors by Hugging Face name, without aliases; used on rank 0.
            further: more models to export, by the name of their subdirectory; used on rank 0.
            adapter: the adapters that `tensors` contains; used on rank 0.
        """
        path = checkpoint.iteration_path(self._root, version)

        async def export() -> None:
            await asyncio.to_thread(export_hf, self.hf_path(version), Export(tensors, self._files, adapter), further)

        async def prune() -> None:
            await asyncio.to_thread(self._prune, version)

        self._ranks.on_leader(export)
        reference = self._frozen.record(self._reference)
        own = {FROZEN: self._frozen.record(self._bases), "warm_started": bool(self._config.trainer.sft)}
        checkpoint.save(path, roles, {**facts, **reference, **own})
        self.newest = version
        self._ranks.on_leader(prune)
        oldest = checkpoint.find(self._root)[0].iteration if self._ranks.leads else version
        return Saved(path, self.hf_path(version), oldest)

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

    def _discard_warm_starts(self, except_for: Path | None = None) -> None:
        for path in self._root.glob(f"{WARM_START}-*"):
            if path != except_for:
                atomic.discard(path)

    def _check_warm_start(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError for adapters when only one of the checkpoint and the configuration has a warm start.

        Reference and critic then stand beside the wrong frozen weights: after a warm start they start from version 0's export, and otherwise
        from the weights beside the adapters.
        """
        trainer = self._config.trainer
        if trainer.lora is not None and facts["warm_started"] != bool(trainer.sft):
            with_phases, without = "trainer.sft with the phases of a warm start", "no trainer.sft"
            expected, found = (with_phases, without) if facts["warm_started"] else (without, with_phases)
            raise ConfigError(
                f"{expected}, as in the run that saved the checkpoint",
                found,
                "With adapters, a warm start decides the weights of the reference and of the critic: set trainer.sft as it was there.",
            )

    @property
    def _bases(self) -> dict[str, Path]:
        """The directories of the weights beside which adapters are trained, by the key that names them."""
        if self._config.trainer.lora is None:
            return {}
        critic = self._config.trainer.critic.path if self._config.algorithm.has_critic else None
        return {"model.path": self._config.model.path} | ({} if critic is None else {"trainer.critic.path": critic})

    @property
    def _reference(self) -> dict[str, Path]:
        return {"reference": self.hf_path(0)}
