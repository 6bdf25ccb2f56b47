"""The directories of saved models, as those see them who do not need their tensors.

Invariant: imports no torch. A checkpoint of another tenant is one that does not exist.
"""

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from polyreme.config.trainer import LoraConfig
from polyreme_trainer.megatron.atomic import discard, sync
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.messages import Kind, SavedModel

MODELS = "models"
"""The folder of the saved models in the service's directory."""
FACTS = "facts.json"


@dataclass(frozen=True)
class Facts:
    """What is known of a directory.

    Attributes:
        base_model: the base model's name, that of a critic for one, see `messages.name_of`.
        lora: the adapters; None: all parameters.
        seq: the request that wrote it.
        steps: the optimizer steps of the model.
        expires: when it may be deleted, seconds since the epoch; None: never.
        tenant: whose model it is.
        created: seconds since the epoch.
        is_named: whether the tenant gave it its name.
        metadata: the tenant's own.
    """

    base_model: str
    lora: LoraConfig | None
    seq: int
    steps: int
    expires: float | None = None
    tenant: str = ""
    created: float = 0.0
    is_named: bool = True
    metadata: Mapping[str, str] = field(default_factory=dict)

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
            return _facts((folder / FACTS).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None


@lru_cache(1024)
def _facts(text: str) -> Facts:
    """The facts in a file, which each sample from its checkpoint asks for."""
    tree: dict[str, Any] = json.loads(text)
    lora = tree.pop("lora")
    return Facts(lora=None if lora is None else LoraConfig.model_validate(lora), **tree)


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint that is there. nbytes: of its files."""

    name: SavedModel
    facts: Facts
    nbytes: int


class Folders:
    """The directories below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, checkpoint: SavedModel) -> Path:
        return self.root / checkpoint.model / checkpoint.kind / checkpoint.name

    def facts(self, checkpoint: SavedModel, tenant: str) -> Facts:
        """The facts of a tenant's checkpoint. Raises TenantError when there is none."""
        facts = Facts.read(self.folder(checkpoint))
        if facts is None or facts.is_expired or facts.tenant != tenant:
            raise TenantError(f"expected a saved checkpoint; found none at {checkpoint}")
        return facts

    def sampled(self, checkpoint: SavedModel, tenant: str) -> Path:
        """The directory of a checkpoint to sample from. Raises TenantError when there is none, or it is of another kind."""
        if checkpoint.kind != "sampler_weights":
            raise TenantError(f"expected a checkpoint that save_weights_for_sampler wrote; found {checkpoint}")
        self.facts(checkpoint, tenant)
        return self.folder(checkpoint).resolve()

    def models(self) -> list[str]:
        """The models that have a directory."""
        return sorted(folder.name for folder in self.root.iterdir()) if self.root.exists() else []

    def kept(self, model: str, tenant: str | None = None) -> list[KeptCheckpoint]:
        """A model's checkpoints that have not expired, the oldest first; with `tenant`, only the tenant's."""
        found = [
            KeptCheckpoint(SavedModel(model, kind, folder.name), facts, size(folder))
            for kind in get_args(Kind)
            for folder in _folders(self.root / model / kind)
            if (facts := Facts.read(folder)) is not None and not facts.is_expired and tenant in (None, facts.tenant)
        ]
        return sorted(found, key=lambda each: (each.facts.created, each.name.name))

    def set_expiry(self, checkpoint: SavedModel, tenant: str, expires: float | None) -> None:
        """Sets when a checkpoint may be deleted, or that it stays. Raises TenantError when there is none."""
        folder, facts = self.folder(checkpoint), replace(self.facts(checkpoint, tenant), expires=expires)
        new = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.new")  # not in the directory, which may be being deleted
        try:
            new.write_text(facts.to_json())
            sync(new)
            os.replace(new, folder / FACTS)
            sync(folder)
        except FileNotFoundError:
            discard(new)
            raise TenantError(f"expected a saved checkpoint; found one that is being deleted at {checkpoint}") from None

    def delete(self, checkpoint: SavedModel, tenant: str) -> None:
        """Deletes a checkpoint. Raises TenantError when there is none."""
        self.facts(checkpoint, tenant)
        remove(self.folder(checkpoint))


def remove(path: Path) -> None:
    """Deletes a directory, which a reader sees whole or not at all. Another process may delete it at the same time."""
    old = path.with_name(
        f".{path.name}.{secrets.token_hex(4)}.new"
    )  # what an interrupted deletion leaves, the name's next writer removes
    with suppress(FileNotFoundError):
        path.rename(old)
    discard(old)


def size(folder: Path) -> int:
    """The bytes of the files in a directory, of those that are still there."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _folders(path: Path) -> Iterator[Path]:
    """The directories in a directory that writers have finished."""
    return (folder for folder in (path.iterdir() if path.exists() else ()) if not folder.name.startswith("."))
