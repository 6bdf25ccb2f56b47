"""Loads weights into vLLM's model by repeating the recorded copies of vLLM's own reload, without its loaders.

Invariant: copies are used only after they have reproduced the result of vLLM's own reload exactly, for a model with real weights.
vLLM itself always loads models with layers that are not plain, and tensors that a loader changes.

On a small model, vLLM's reload spends most of its time in Python: it creates every parameter again, looks up each tensor, and
counts each copy first. The copies never change, so one recorded reload has all. On CPU linear layers are then packed again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyreme_rollout.engine.inspection import input_width, model_dtype

Tensors = Mapping[str, torch.Tensor]

_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""vLLM's methods whose processing after a load needs only the parameters of the layer."""
_PROBES = 4  # rows that a packed layer is compared by


@dataclass(frozen=True)
class Region:
    """Some elements of a tensor, as arguments of `torch.as_strided`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def in_storage(cls, view: torch.Tensor) -> "Region":
        return cls(tuple(view.shape), view.stride(), int(view.storage_offset()))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class Copy:
    """`tensor`: the Hugging Face name."""

    tensor: str
    source: Region
    target: Region


@dataclass
class Parameter:
    """The copies of a load into one parameter of a layer, which has this plain shape.

    Attributes:
        is_kept: whether the layer uses it, so that it is filled in place; otherwise it is packed and dropped.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_kept: bool = True
    copies: list[Copy] = field(default_factory=list)


Layers = dict[torch.nn.Module, dict[str, Parameter]]


class LearnedCopies:
    """The copies of a whole load, by layer and parameter, created by `learn`."""

    def __init__(self, layers: Layers, tensors: Tensors) -> None:
        self._layers, self._signature = layers, _signature(tensors)

    def fit(self, tensors: Tensors) -> bool:
        """Whether these tensors have the names, shapes and dtypes of the recorded load."""
        return _signature(tensors) == self._signature

    def load(self, tensors: Tensors) -> None:
        """Fills every parameter, and packs the layers that use packed weights, except a tied head."""
        for layer, parameters in self._layers.items():
            _fill(layer, parameters, tensors)


class CopyRecorder(TorchDispatchMode):
    """Records where a load copies the elements of `tensors`. Active while vLLM loads the model."""

    def __init__(self, model: torch.nn.Module, tensors: Tensors) -> None:
        super().__init__()
        self._modules = list(model.modules())
        self._last: torch.nn.Module | None = None
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}
        self.layers: Layers = {}
        self.is_plain = True
        """Whether every copy went to a contiguous parameter of a layer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].device.type == args[1].device.type == "cpu":
            name = self._names.get(args[1].untyped_storage().data_ptr())
            if name is not None:
                self._record(args[0], args[1], name)
        return func(*args, **(kwargs or {}))

    def _record(self, target: torch.Tensor, source: torch.Tensor, name: str) -> None:
        found = self._owner(target.untyped_storage().data_ptr())
        if found is None:
            self.is_plain = False
            return
        layer, key, parameter = found
        self.is_plain &= _fills_its_storage(parameter)
        known = self.layers.setdefault(layer, {}).setdefault(key, Parameter(tuple(parameter.shape), parameter.dtype))
        copy = Copy(name, Region.in_storage(source), Region.in_storage(target))
        if copy not in known.copies:  # vLLM copies a bias twice, the first time to count its elements
            known.copies.append(copy)

    def _owner(self, storage: int) -> tuple[torch.nn.Module, str, torch.Tensor] | None:
        """The layer that now has a parameter in this memory. vLLM creates the parameters layer by layer, in reused memory."""
        for layer in ([self._last] if self._last is not None else []) + self._modules:
            for key, parameter in layer._parameters.items():
                if parameter is not None and not parameter.is_meta and parameter.untyped_storage().data_ptr() == storage:
                    self._last = layer
                    return layer, key, parameter
        return None


def may_learn(model: torch.nn.Module) -> bool:
    """Whether every layer that a load processes is plain."""
    return all(
        type(layer).__name__ == "Attention"  # its scales are not loaded
        if callable(getattr(layer, "process_weights_after_loading", None))
        else type(layer.quant_method).__name__ in _PLAIN_METHODS
        if getattr(layer, "quant_method", None) is not None
        else True
        for layer in model.modules()
    )


def learn(recorder: CopyRecorder, tensors: Tensors) -> LearnedCopies | None:
    """The copies of a completed recorded load; None unless they read every element of each tensor once."""
    read = dict.fromkeys(tensors, 0)
    for layer, parameters in recorder.layers.items():
        for key, parameter in parameters.items():
            kernel = layer._parameters[key]
            if kernel is None:
                return None
            parameter.is_kept = tuple(kernel.shape) == parameter.shape
            if parameter.is_kept and not _fills_its_storage(kernel):
                return None
            for copy in parameter.copies:
                read[copy.tensor] += torch.Size(copy.source.size).numel()
    if not recorder.is_plain or any(read[name] != tensor.numel() for name, tensor in tensors.items()):
        return None
    return LearnedCopies(recorder.layers, tensors)


@torch.no_grad()
def fingerprint(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A fingerprint of the model's weights: copies of its plain parameters, and outputs of packed layers for some random rows."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.numel()}
    random = torch.Generator().manual_seed(0)
    for path, layer in model.named_modules():
        method, width = getattr(layer, "quant_method", None), input_width(layer)
        if method is not None and width is not None:
            rows = torch.randn(_PROBES, width, generator=random).to(model_dtype(model))
            found[f"{path} applied"] = method.apply(layer, rows, None)
    return found


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two fingerprints are equal bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _fill(layer: torch.nn.Module, parameters: Mapping[str, Parameter], tensors: Tensors) -> None:
    with _restored(layer, [key for key, parameter in parameters.items() if not parameter.is_kept]):
        for key, parameter in parameters.items():
            if parameter.is_kept:
                kept = layer._parameters[key]
                assert kept is not None, "learn has seen it"
                target = kept.data
            else:  # zeros: some rows are padding
                target = torch.zeros(parameter.shape, dtype=parameter.dtype)
                layer._parameters[key] = torch.nn.Parameter(target, requires_grad=False)
            for copy in parameter.copies:
                copy.target.of(target).copy_(copy.source.of(tensors[copy.tensor]))
        if (method := getattr(layer, "quant_method", None)) is not None:
            method.process_weights_after_loading(layer)


@contextmanager
def _restored(layer: torch.nn.Module, keys: list[str]) -> Iterator[None]:
    """Restores the layer's parameters at the end of the block."""
    before = {key: layer._parameters[key] for key in keys}
    try:
        yield
    finally:
        layer._parameters.update(before)


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.storage_offset() == 0


def _signature(tensors: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
