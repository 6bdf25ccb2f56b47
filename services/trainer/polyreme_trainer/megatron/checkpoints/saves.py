"""The files of a run or a stage in its directory: checkpoints for resuming, and Hugging Face directories of the same weights.

Invariant: a version's Hugging Face directory is complete before its checkpoint, so every checkpoint of a run has one. Version 0's
directory is never removed: it is the reference policy, and every checkpoint has its digest. A resume continues only with the
frozen weights, for the same use, with which the checkpoint was trained.
"""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.errors import ConfigError
from polyreme.experience.loading import LoadReports, unreported
from polyreme.rundir.checkpoint_manifest import WARM_START, CheckpointFacts, checkpoint_path, number_of, numbered
from polyreme_trainer.learner.engine import Saved
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron import atomic
from polyreme_trainer.megatron.checkpoints import checkpoint
from polyreme_trainer.megatron.checkpoints.checkpoint import weights_digest
from polyreme_trainer.megatron.checkpoints.checkpoint_writer import CheckpointWriter, Save
from polyreme_trainer.megatron.huggingface.export import Export
from polyreme_trainer.megatron.training.roles import AnyRole

FROZEN = "frozen"
"""The checkpoint's fact with the digests of the frozen weights that training used."""


class FrozenWeights:
    """Digests of directories of weights that training reads but does not change: a checkpoint has these in place of their bytes.

    A directory is read once, on rank 0, in a thread: that of a save, or one beside the heartbeat that keeps other ranks waiting.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._digest = ranks, functools.cache(weights_digest)

    def record(self, directories: Mapping[str, Path]) -> dict[str, str]:
        """The digest of each directory, by use, for a checkpoint's facts. On rank 0, in the thread of a save; one at a time."""
        return {use: self._digest(directory) for use, directory in directories.items()}

    def check(self, directories: Mapping[str, Path], recorded: Mapping[str, str]) -> None:
        """Compares directories with what `record` has returned for a checkpoint. Collective.

        Raises:
            ConfigError: the uses differ, or the weights of one of them. On rank 0; on the others, LeaderError.
        """

        async def compare() -> None:
            if directories.keys() != recorded.keys():
                expected, found = (", ".join(sorted(uses)) or "nothing" for uses in (recorded, directories))
                raise ConfigError(
                    f"frozen weights of {expected}, as in the checkpoint",
                    f"of {found}",
                    "Set trainer.lora, trainer.critic and the reference as they were, "
                    "or start from the checkpoint's Hugging Face export.",
                )
            for use, directory in directories.items():
                if (found := await asyncio.to_thread(self._digest, directory)) != recorded[use]:
                    raise ConfigError(
                        f"digest {recorded[use]} of the weights in {directory} ({use}), as in the checkpoint",
                        found,
                        "Restore the directory from a copy.",
                    )

        self._ranks.on_leader(compare)


def find_newest(ranks: Ranks, root: Path, prefix: str = "iteration", are_needed: bool = True) -> checkpoint.Checkpoint | None:
    """The newest intact checkpoint; None when there is none. Collective.

    Raises:
        ConfigError: there are checkpoints, which `are_needed`, but all of them are damaged.
    """

    async def find() -> bytes:
        found = await asyncio.to_thread(checkpoint.newest, root, prefix)
        if found is None and are_needed and (damaged := len(numbered(root, prefix))):
            raise ConfigError(
                f"an undamaged checkpoint in {root}",
                f"{damaged}, all damaged (the log says how)",
                "Restore one from a copy, or remove the directory and start the run again.",
            )
        return found.path.name.encode() if found else b""

    name = ranks.broadcast_from_leader(find).decode()
    if not name:
        return None
    found = checkpoint.read(root / name)  # a directory listing may be stale on a machine that is not the writer's
    if found is None:
        what = f"checkpoint {root / name}, which rank 0 found intact"
        raise ConfigError(what, "no readable manifest", "Share the run directory.")
    return found


class Saves(CheckpointWriter):
    """The checkpoints of a run directory, each with its export if it has one.

    Args:
        frozen: the directories of weights that a resume reads again, by their use. Checkpoints have their digests.
    """

    def __init__(self, config: RunConfig | StageConfig, ranks: Ranks, frozen: Mapping[str, Path]) -> None:
        super().__init__(ranks)
        self._config, self.frozen_directories = config, frozen
        self._root, self._hf = config.run_dir / "checkpoints", config.run_dir / "hf"
        self._frozen = FrozenWeights(ranks)

    def load(self, roles: Sequence[AnyRole], loads: LoadReports = unreported) -> tuple[int, CheckpointFacts] | None:
        """Restores the newest intact checkpoint. Collective.

        Returns:
            Its number and facts; None when there is no checkpoint yet.

        Raises:
            ConfigError: all checkpoints are damaged, or they belong to other frozen weights.
        """
        found = find_newest(self._ranks, self._root, self._config.checkpoint_prefix)
        if found is None:
            return None
        self._check(found.facts)
        checkpoint.load(found, roles, loads)
        return found.iteration, found.facts

    def save(
        self, number: int, roles: Sequence[AnyRole], facts: CheckpointFacts, hf_path: Path | None, exports: Mapping[str, Export]
    ) -> None:
        """Starts to write a Hugging Face directory and the checkpoint `number`, see `CheckpointWriter`. Collective.

        Args:
            roles: the roles to save in the checkpoint.
            facts: facts for the checkpoint; rank 0's are stored.
            hf_path, exports: the directory and the models to export, see `Save`.
        """
        path, keep = checkpoint_path(self._root, number, self._config.checkpoint_prefix), self._config.trainer.keep_checkpoints
        self.start(Save(path, roles, lambda: {**facts, **self._further_facts()}, keep, hf_path, exports, self._discard))

    def _check(self, facts: CheckpointFacts) -> None:
        """Raises ConfigError for a checkpoint that does not fit. Collective."""
        self._frozen.check(self.frozen_directories, facts[FROZEN])

    def _further_facts(self) -> dict[str, object]:
        """The facts for the manifest that a resume checks. In rank 0's thread."""
        return {FROZEN: self._frozen.record(self.frozen_directories)}

    def _discard(self) -> None:
        """Removes what has become unnecessary, once a checkpoint is complete. In rank 0's thread."""
        atomic.discard_unfinished(self._hf, "*")


class RunSaves(Saves):
    """A run's checkpoints of versions and of its warm start.

    Attributes:
        newest: the version of the newest checkpoint; None without one.
    """

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        super().__init__(config, ranks, adapter_bases(config))
        self._trainer = config.trainer
        self.newest: int | None = None

    def hf_path(self, version: int) -> Path:
        """The path of the Hugging Face directory of `version`."""
        return checkpoint_path(self._hf, version)

    def load(self, roles: Sequence[AnyRole], loads: LoadReports = unreported) -> tuple[int, CheckpointFacts] | None:
        if (loaded := super().load(roles, loads)) is not None:
            self.newest = loaded[0]
        return loaded

    def save_warm_start(self, step: int, roles: Sequence[AnyRole], facts: CheckpointFacts) -> None:
        """Starts to write a checkpoint between two steps of a warm start. `step` counts the steps of all phases. Collective."""
        path = checkpoint_path(self._root, step, WARM_START)
        self.start(Save(path, roles, lambda: {**facts, **super(RunSaves, self)._further_facts()}, keep=1))

    def finish(self, wait: bool) -> Saved | None:
        saved = super().finish(wait)
        if saved is not None and saved.hf_path is not None:  # not of a warm start
            self.newest = saved.number
        return saved

    def _further_facts(self) -> dict[str, object]:
        further = {**super()._further_facts(), "warm_started": bool(self._trainer.sft)}
        return {**self._frozen.record(self._reference), **further}

    def check_reference(self, facts: CheckpointFacts) -> Path:
        """The Hugging Face directory of version 0, after a check of its weights against the checkpoint's digest. Collective.

        Raises:
            ConfigError: the weights' digest differs. On rank 0; on the others, LeaderError.
        """
        self._frozen.check(self._reference, {use: facts[use] for use in self._reference})
        return self.hf_path(0)

    def find_warm_start(self) -> checkpoint.Checkpoint | None:
        """The newest intact checkpoint of a warm start; None without one. Collective."""
        found = find_newest(self._ranks, self._root, WARM_START, are_needed=False)
        if found is not None:
            super()._check(found.facts)
        return found

    def _discard(self) -> None:
        """Removes the exports without a checkpoint, and the warm start's checkpoints."""
        kept = {0, *(number_of(path) for path in numbered(self._root))}
        for path in numbered(self._hf):
            if number_of(path) not in kept:
                atomic.discard(path)
        for path in numbered(self._root, WARM_START):
            atomic.discard(path)
        atomic.discard_unfinished(self._hf, "iteration-*")
        atomic.discard_unfinished(self._root, f"{WARM_START}-*")

    def _check(self, facts: CheckpointFacts) -> None:
        """Also raises ConfigError for adapters when only one of the checkpoint and the configuration has a warm start.

        The reference and the critic would have the wrong frozen weights: after a warm start they start from version 0's export,
        otherwise from the actor's frozen weights.
        """
        super()._check(facts)
        trainer = self._trainer
        if trainer.lora is not None and facts["warm_started"] != bool(trainer.sft):
            with_phases, without = "trainer.sft with the phases of a warm start", "no trainer.sft"
            expected, found = (with_phases, without) if facts["warm_started"] else (without, with_phases)
            raise ConfigError(
                f"{expected}, as in the run that saved the checkpoint",
                found,
                "With adapters, a warm start decides the weights of the reference and of the critic: "
                "set trainer.sft as it was in that run.",
            )

    @property
    def _reference(self) -> dict[str, Path]:
        return {"reference": self.hf_path(0)}


def adapter_bases(config: RunConfig) -> dict[str, Path]:
    """The directories of the frozen weights of adapters, by the configuration key that names them."""
    if config.trainer.lora is None:
        return {}
    critic = config.trainer.critic.path if config.algorithm.has_critic else None
    return {"model.path": config.model.path} | ({} if critic is None else {"trainer.critic.path": critic})
