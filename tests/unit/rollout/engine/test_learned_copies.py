"""A recorded load and its repetition by copies, on layers like vLLM's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyreme_rollout.engine.learned_copies import CopyRecorder, LearnedCopies, fingerprint, learn, may_learn, same

Load = Callable[["Model", dict[str, torch.Tensor]], None]


class UnquantizedLinearMethod:
    """Packs a layer's weight, as vLLM does on CPU, and drops the plain one."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.detach().t().contiguous()
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    def apply(self, layer: Any, rows: torch.Tensor, bias: None) -> torch.Tensor:
        return rows @ layer.packed


class Layer(torch.nn.Module):
    """A packed layer with two fused tensors, the second of which is shorter than its region."""

    input_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()
        self.packed = torch.zeros(4, 9)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.norm = torch.nn.Embedding(5, 4), Layer(), torch.nn.LayerNorm(4, bias=False)


def weights(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"q": (6, 4), "k": (2, 4), "b": (3,), "n": (4,), "e": (5, 4)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


@torch.no_grad()
def load(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    """Loads like vLLM's reload: creates a plain weight, fills it, packs it and drops it."""
    kernel = model.layer.weight
    model.layer.weight = torch.nn.Parameter(torch.zeros(9, 4), requires_grad=False)
    for name, start in (("q", 0), ("k", 6)):
        model.layer.weight.data.narrow(0, start, len(tensors[name])).copy_(tensors[name])
    for _ in range(2):  # as vLLM copies a bias
        model.layer.bias.data.copy_(tensors["b"])
    model.norm.weight.data.copy_(tensors["n"])
    model.embedding.weight.data.copy_(tensors["e"])
    model.layer.quant_method.process_weights_after_loading(model.layer)
    model.layer.weight = kernel


def learned(model: Model, act: Load, tensors: dict[str, torch.Tensor]) -> LearnedCopies | None:
    recorder = CopyRecorder(model, tensors)
    with recorder:
        act(model, tensors)
    return learn(recorder, tensors)


def test_copies_repeat_a_load_with_other_weights() -> None:
    model, expected = Model(), Model()
    kernel = model.layer.weight
    copies = learned(model, load, weights(1))
    assert copies is not None
    copies.load(weights(2))
    load(expected, weights(2))
    assert same(fingerprint(model), fingerprint(expected))
    load(expected, weights(1))
    assert not same(fingerprint(model), fingerprint(expected))
    assert model.layer.weight is kernel


def test_other_tensors_do_not_fit() -> None:
    copies = learned(Model(), load, weights(1))
    assert copies is not None and copies.fit(weights(2))
    assert not copies.fit({**weights(2), "x": torch.zeros(1)})
    assert not copies.fit({**weights(2), "b": torch.zeros(4)})
    assert not copies.fit({**weights(2), "b": torch.zeros(3, dtype=torch.bfloat16)})


def changes_a_tensor(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    load(model, {**tensors, "n": tensors["n"] + 1})


def reads_a_part(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    load(model, {**tensors, "q": tensors["q"][:5]})


def fills_what_is_no_parameter(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    load(model, tensors)
    model.layer.packed[0, :3].copy_(tensors["b"])


@pytest.mark.parametrize("act", [changes_a_tensor, reads_a_part, fills_what_is_no_parameter])
def test_a_load_that_is_more_than_copies_is_not_learned(act: Load) -> None:
    assert learned(Model(), act, weights(1)) is None


def test_a_failed_fill_leaves_the_layer_its_parameters() -> None:
    model = Model()
    kernel = model.layer.weight
    copies = learned(model, load, weights(1))
    assert copies is not None
    with pytest.raises(KeyError):
        copies.load({name: tensor for name, tensor in weights(2).items() if name != "k"})
    assert model.layer.weight is kernel


def test_layers_with_a_processing_of_their_own_are_vllms() -> None:
    class Absorbed(Layer):
        def process_weights_after_loading(self, dtype: torch.dtype) -> None: ...

    class OtherMethod(UnquantizedLinearMethod): ...

    plain, absorbed, other = Model(), Model(), Model()
    absorbed.layer, other.layer.quant_method = Absorbed(), OtherMethod()
    assert [may_learn(model) for model in (plain, absorbed, other)] == [True, False, False]
