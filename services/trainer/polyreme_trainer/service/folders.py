"""The directories of saved models, as those see them who only look for checkpoints.

Invariant: reads only, and imports no torch.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyreme.config.trainer import LoraConfig
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.messages import SavedModel

FACTS = "facts.json"


@dataclass(frozen=True)
class Facts:
    """What is known of a directory.

    Attributes:
        base_model: the base model's name.
        lora: the adapters; None: all parameters.
        seq: the request that wrote it.
        steps: the optimizer steps of the model.
        expires: when it may be deleted, seconds since the epoch; None: never.
    """

    base_model: str
    lora: LoraConfig | None
    seq: int
    steps: int
    expires: float | None = None

    def to_json(self) -> str:
        lora = None if self.lora is None else self.lora.model_dump()
        return json.dumps({**vars(self), "lora": lora}, indent=1)

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and self.expires < time.time()

    @classmethod
    def read(cls, folder: Path) -> "Facts | None":
        """None when there is no such directory."""
        try:
            tree: dict[str, Any] = json.loads((folder / FACTS).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        lora = tree.pop("lora")
        return cls(lora=None if lora is None else LoraConfig.model_validate(lora), **tree)


class Folders:
    """The directories below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, checkpoint: SavedModel) -> Path:
        return self.root / checkpoint.model / checkpoint.kind / checkpoint.name

    def facts(self, checkpoint: SavedModel) -> Facts:
        """The facts of a checkpoint. Raises TenantError when there is none."""
        facts = Facts.read(self.folder(checkpoint))
        if facts is None or facts.is_expired:
            raise TenantError(f"expected a saved checkpoint; found none at {checkpoint}")
        return facts

    def sampled(self, checkpoint: SavedModel) -> Path:
        """The directory of a checkpoint to sample from. Raises TenantError when there is none, or it is of the other kind."""
        if checkpoint.kind != "sampler_weights":
            raise TenantError(f"expected a checkpoint that save_weights_for_sampler wrote; found {checkpoint}")
        self.facts(checkpoint)
        return self.folder(checkpoint).resolve()
