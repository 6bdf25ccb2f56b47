"""A critic: a sharded model of the policy's family with a value head, as in transformers' ForSequenceClassification.

Invariant: a critic that starts from a language model has a zero head, so its first values are 0.
"""

from collections import ChainMap
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from polyreme.config.trainer import LoraConfig, MoeConfig, Recompute
from polyreme_trainer.megatron.batches.packing import PackedIds
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.huggingface.families.base import VALUE_HEAD
from polyreme_trainer.megatron.huggingface.hf_files import open_tensors
from polyreme_trainer.megatron.models.model import ShardedModel


class Critic(ShardedModel):
    """A sharded model with a value head (Hugging Face name `score.weight`)."""

    def values(self, ids: Tensor | PackedIds) -> Tensor:
        """The value of each sequence up to each token, differentiable in the weights: fp32, of the shape of `ids`.

        Args:
            ids: packed sequences, or int64 [b, s], padded on the right with any vocabulary token; values there are meaningless.
        """
        values = self.chunks[-1].output_layer(self.hidden(ids)).float()
        return self.context.join(PackedIds.of(ids), values).view(ids.shape)

    @torch.no_grad()
    def copy_backbone(self, model: ShardedModel) -> None:
        """Copies the weights of a model of the same sizes, except its head. The values become 0."""
        self.use(model)
        theirs = model.weights()
        for name, param in self._params.items():
            if name == "output_layer.weight":
                param.zero_()
            else:
                param.copy_(theirs[name])

    def load_hf(self, path: Path, loaded: Callable[[float], None] | None = None) -> None:
        """Loads a sequence classifier with one label, or a language model, whose values start at 0. Raises ConfigError."""
        shapes = hf_mapping.hf_shapes(self.arch)
        with open_tensors(path) as tensors:
            fresh = {} if VALUE_HEAD in tensors else {VALUE_HEAD: torch.zeros(shapes[VALUE_HEAD])}
            tensors.check({name: shape for name, shape in shapes.items() if name not in fresh}, {}, self.arch.unread)
            self.load_slices(ChainMap(fresh, tensors), loaded)  # type: ignore[arg-type]  # it is only read

    def load_base(self, path: Path, loaded: Callable[[float], None] | None = None) -> None:
        """Loads the frozen weights of a critic with adapters from a language model. Adapters and head keep their values.
        `loaded`: see `load_hf`. Raises ConfigError."""
        self.use()
        trained = {name: param.clone() for name, param in self.state_dict().items()}
        self.load_hf(path, loaded)
        self.load_state_dict(trained)


def build_critic(
    path: Path,
    dtype: str,
    device: Device,
    *,
    trainable: bool = True,
    recompute: Recompute | None = None,
    lora: LoraConfig | None = None,
    moe: MoeConfig | None = None,
    seed: int = 0,
    loaded: Callable[[float], None] | None = None,
) -> Critic:
    """The critic of a Hugging Face directory. Requires `init_parallel`. Raises ConfigError. `loaded`: see `load_hf`."""
    arch = load_architecture(path).with_value_head()
    critic = Critic(arch, dtype, device, trainable=trainable, recompute=recompute, lora=lora, moe=moe, seed=seed)
    critic.load_hf(path, loaded)
    return critic
