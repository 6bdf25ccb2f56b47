"""Adapters on disk in PEFT's format: adapter_config.json and adapter_model.safetensors.

Invariant: PEFT loads every adapter that is written. `read_adapter` also reads it, except for a classifier's, whose head is not
part of the base model. A feature of PEFT that would change the merged weights is refused by name, never ignored.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from polyreme.config.trainer import LoraConfig
from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families.base import VALUE_HEAD
from polyreme_trainer.megatron.huggingface.hf_files import save_tensors
from polyreme_trainer.megatron.huggingface.lora_mapping import LORA_A, LORA_B, projection_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PLAIN: dict[str, object] = {
    "fan_in_fan_out": False,
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
}
"""Fields of PEFT's configuration that `read_adapter` requires to have these values, and that are written."""
_UNSUPPORTED: dict[str, object] = {
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "layer_replication": None,
    "monteclora_config": None,
    "target_parameters": None,
    "use_bdlora": None,
    "use_qalora": False,
}
"""Likewise, but not written: older versions of PEFT do not know all of these."""
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the model's weights as they are. PiSSA, OLoRA, CorDA, LoftQ and others change them."""


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter to write.

    Attributes:
        tensors: every tensor, whole, by PEFT's name without its prefix; the value head of a classifier among them.
        lora: the section of the configuration.
        base, revision: where others find the frozen weights with which it was trained: a directory, or a repository and commit.
    """

    tensors: Mapping[str, Tensor]
    lora: LoraConfig
    base: str
    revision: str | None = None

    def write(self, folder: Path) -> None:
        """Fills an empty directory."""
        classifier = VALUE_HEAD in self.tensors
        projections = {projection_of(name): None for name in self.tensors if name != VALUE_HEAD}
        alpha = self.lora.alpha
        config = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if classifier else "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "revision": self.revision,
            "inference_mode": True,
            "r": self.lora.rank,
            "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
            "use_rslora": self.lora.rslora,
            "lora_dropout": 0.0,
            "target_modules": list(projections),
            **_PLAIN,
            "modules_to_save": ["score"] if classifier else None,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2))
        save_tensors({_PREFIX + name: tensor for name, tensor in self.tensors.items()}, folder / TENSORS)


@dataclass(frozen=True)
class ReadAdapter:
    """An adapter from a directory.

    Attributes:
        pairs: Hugging Face name of a weight -> its A [rank, in] and B [out, rank].
        scale: the factor of B A.
    """

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    scale: float


def read_adapter(folder: Path) -> ReadAdapter:
    """The adapter of a PEFT directory. Raises ConfigError for a damaged file, and unless it is a plain LoRA of linear layers."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{CONFIG} and {TENSORS} in {folder}", str(error), "Give a directory that PEFT has saved.") from None
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"peft_type LORA in {folder / CONFIG}", repr(config.get("peft_type")), "Merge this adapter with PEFT.")
    for field, plain in (_PLAIN | _UNSUPPORTED).items():
        if config.get(field, plain) not in (plain, None):
            raise ConfigError(f"{field} {plain!r} in {folder / CONFIG}", repr(config[field]), "Merge this adapter with PEFT.")
    if (initial := config.get("init_lora_weights")) not in _INITIAL:
        raise ConfigError(
            f"init_lora_weights that leaves the model's weights as they are in {folder / CONFIG}",
            repr(initial),
            "Merge this adapter with PEFT, into the weights that it has changed.",
        )
    found = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, tensor in found.items():
        if name.endswith(LORA_A) and (other := found.get(name.removesuffix(LORA_A) + LORA_B)) is not None:
            pairs[name.removesuffix(LORA_A) + ".weight"] = tensor, other
    if 2 * len(pairs) != len(found) or not pairs:
        unpaired = [name for name in found if not name.endswith((LORA_A, LORA_B))] or sorted(found)
        raise ConfigError(
            f"pairs of lora_A and lora_B in {folder / TENSORS}", ", ".join(unpaired[:3]), "Merge this adapter with PEFT."
        )
    rank, alpha = config["r"], config["lora_alpha"]
    return ReadAdapter(pairs, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
