"""The weights that training reads but does not change. A checkpoint has their digests in place of their bytes.

Invariant: a resume continues only with the frozen weights, for the same use, with which the checkpoint was trained. Only rank 0 reads the
files, in a thread: that of a save, or one beside the heartbeat that keeps the other ranks waiting.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from polyreme.errors import ConfigError
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.checkpoints.checkpoint import weights_digest


class FrozenWeights:
    """Digests of directories of weights. A directory is read once: its weights do not change while the learner runs.

    Args:
        ranks: the learner's ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._digests: dict[Path, str] = {}

    def record(self, directories: Mapping[str, Path]) -> dict[str, str]:
        """The digest of every directory, by its use, for a checkpoint's facts. On rank 0, in the thread of a save; one at a time."""
        return {use: self._digest(directory) for use, directory in directories.items()}

    def check(self, directories: Mapping[str, Path], recorded: Mapping[str, str]) -> None:
        """Compares directories with what `record` has returned for a checkpoint. Collective.

        Raises:
            ConfigError: the uses differ, or the weights of one of them. On rank 0; on the others, LeaderError.
        """

        async def compare() -> None:
            if directories.keys() != recorded.keys():
                raise ConfigError(
                    f"frozen weights of {_names(recorded)}, as in the checkpoint",
                    f"of {_names(directories)}",
                    "Set trainer.lora, trainer.critic and the reference as they were, or start from the checkpoint's Hugging Face export.",
                )
            for use, directory in directories.items():
                if (found := await asyncio.to_thread(self._digest, directory)) != recorded[use]:
                    raise ConfigError(
                        f"digest {recorded[use]} of the weights in {directory} ({use}), as in the checkpoint",
                        found,
                        "Restore the directory from a copy.",
                    )

        self._ranks.on_leader(compare)

    def _digest(self, directory: Path) -> str:
        if directory not in self._digests:
            self._digests[directory] = weights_digest(directory)
        return self._digests[directory]


def _names(uses: Mapping[str, object]) -> str:
    return ", ".join(sorted(uses)) or "nothing"
