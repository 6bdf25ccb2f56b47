"""Adds an adapter in PEFT's format to a model's weights.

Invariant: every tensor of the adapter changes one weight, or nothing is converted.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.peft_files import ReadAdapter, read_adapter


class WithAdapter(Mapping[str, Tensor]):
    """A model's tensors with W + scale B A in place of each adapted W: computed in float32 at access, in the dtype of W."""

    def __init__(self, tensors: Mapping[str, Tensor], adapter: ReadAdapter) -> None:
        self._tensors, self._adapter = tensors, adapter

    def __getitem__(self, name: str) -> Tensor:
        weight = self._tensors[name]
        if name not in self._adapter.pairs:
            return weight
        a, b = self._adapter.pairs[name]
        return weight.float().addmm(b.float(), a.float(), alpha=self._adapter.scale).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def with_adapter(tensors: Mapping[str, Tensor], folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> WithAdapter:
    """The model's tensors with the adapter of a directory. `shapes`: the model's. Raises ConfigError unless the adapter fits."""
    adapter = read_adapter(folder)
    for name, (a, b) in adapter.pairs.items():
        if name not in shapes or (b.shape[0], a.shape[1]) != shapes[name] or a.shape[0] != b.shape[1]:
            raise ConfigError(
                f"an adapter in {folder} of the model's weights",
                f"A {tuple(a.shape)} and B {tuple(b.shape)} for {name}, which is {shapes.get(name, 'no weight of the model')}",
                "Give an adapter that was trained for this model.",
            )
    return WithAdapter(tensors, adapter)
