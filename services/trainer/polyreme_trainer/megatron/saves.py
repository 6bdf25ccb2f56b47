"""What the learner leaves on disk: checkpoints to go on from, and a Hugging Face directory beside each.

A version has its Hugging Face directory before it has its checkpoint, so a checkpoint that can be resumed from always has one.
Version 0's is kept for good: it is the reference policy of the KL term.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron import atomic, checkpoint
from polyreme_trainer.megatron.export import export_hf
from polyreme_trainer.megatron.optimizer import Optimizer
from polyreme_trainer.megatron.policy import Policy


class Saves:
    """The run directory's checkpoints and exports.

    Attributes:
        newest: the version of the newest checkpoint; None when there is none.
    """

    def __init__(self, config: RunConfig, files: Mapping[str, bytes], ranks: Ranks) -> None:
        self._config, self._files, self._ranks = config, files, ranks
        self._root = config.run_dir / "checkpoints"
        self.newest: int | None = None

    def hf_path(self, version: int) -> Path:
        """Where the Hugging Face directory of `version` is."""
        return self._config.run_dir / "hf" / f"iteration-{version:06d}"

    def due(self, version: int) -> bool:
        """Whether the save interval asks for a checkpoint of `version`."""
        interval = self._config.trainer.save_interval
        return interval > 0 and version % interval == 0

    def load(self, policy: Policy, optimizer: Optimizer) -> int | None:
        """Puts the newest checkpoint whose digests hold into policy and optimizer. Collective.

        Returns:
            Its version; None when the run has no checkpoint yet.

        Raises:
            ConfigError: there are checkpoints, and every one is damaged.
        """

        async def find() -> bytes:
            found = await asyncio.to_thread(checkpoint.newest, self._root)
            if found is None and (damaged := checkpoint.find(self._root)):
                raise ConfigError(
                    f"an undamaged checkpoint in {self._root}",
                    f"{len(damaged)}, none with the bytes that were saved",
                    "Restore one from a copy, or start another run with --fork.",
                )
            return str(found.iteration).encode() if found else b""

        answer = self._ranks.ask(find)
        if not answer:
            return None
        self.newest = int(answer)
        checkpoint.load(checkpoint.of(self._root, self.newest), policy, optimizer)
        return self.newest

    def save(
        self, version: int, policy: Policy, optimizer: Optimizer, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[Path, int]:
        """Writes both, and removes what is past `keep_checkpoints`. Collective.

        Args:
            facts: rank 0's go into the checkpoint.
            tensors: the version by Hugging Face name, without aliases; used on rank 0.

        Returns:
            The checkpoint's path, and on rank 0 the version of the oldest one that is kept.
        """

        async def export() -> None:
            await asyncio.to_thread(export_hf, self.hf_path(version), tensors, self._files)

        self._ranks.tell(export)
        saved = checkpoint.save(self._root, version, policy, optimizer, facts, self._config.trainer.keep_checkpoints)
        self.newest = version
        if not self._ranks.leads:
            return saved.path, version
        kept = [c.iteration for c in checkpoint.find(self._root)]
        for path in self.hf_path(0).parent.glob("iteration-*"):
            if path not in {self.hf_path(v) for v in (0, *kept)}:
                atomic.discard(path)
        return saved.path, kept[0]

    def reference(self, policy: Policy) -> Policy:
        """A frozen policy with the weights of version 0, also after a resume."""
        reference = Policy(policy.arch, policy.dtype, policy.device, trainable=False)
        reference.load_hf(self.hf_path(0))
        return reference
