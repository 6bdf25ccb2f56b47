"""Log-probabilities and entropies of one rank's output layer compared with torch's distributions: values, gradients, and memory."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyreme_trainer.megatron.layers.logprobs import Head, token_logprobs

TEMPERATURES = [1.0, 0.7]


def head(valid: int, temperature: float = 1.0, with_entropy: bool = False, block_logits: int | None = None) -> Head:
    return Head(torch.nn.functional.linear, 0, valid, temperature, None, with_entropy, block_logits)


def random_layer(tokens: int, columns: int) -> tuple[Tensor, Tensor]:
    """Hidden states [tokens, 6] and an output layer's weight [columns, 6]."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(rows, 6, generator=generator).requires_grad_() for rows in (tokens, columns))  # type: ignore[return-value]


def objective(results: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """A sum in which every token has a different weight."""
    weights = torch.linspace(-1, 1, len(results[0])), torch.linspace(2, 1, len(results[0]))
    return torch.stack([(part * weight).sum() for part, weight in zip(results, weights, strict=False)]).sum()


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("limit", "valid"), [(2**25, 37), (1, 37), (1, 10)])
def test_values_and_gradients_are_those_of_torch(limit: int, valid: int, temperature: float, with_entropy: bool) -> None:
    """Tested with one block, with three blocks of which the last one has padding, and with one block that omits only padding."""
    layer = random_layer(7, 48)
    targets = torch.tensor([0, 4, 36, 15, 16, 31, 32]) % valid
    distribution = torch.distributions.Categorical(logits=(layer[0] @ layer[1].t())[:, :valid] / temperature)
    want = [distribution.log_prob(targets), distribution.entropy()][: 1 + with_entropy]
    got = token_logprobs(*layer, targets, head(valid, temperature, with_entropy, limit))
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(objective(results), layer) for results in (got, want)]
    torch.testing.assert_close(*gradients)
    assert (gradients[0][1][valid:] == 0).all()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_has_no_gradient(frozen: int) -> None:
    layer = random_layer(4, 16)
    layer[frozen].requires_grad_(False)
    objective(token_logprobs(*layer, torch.tensor([3, 1, 2, 0]), head(16))).backward()
    assert layer[frozen].grad is None
    assert layer[1 - frozen].grad is not None


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_wanted_token_is_no_gradient(with_entropy: bool) -> None:
    layer = random_layer(0, 16)
    got = token_logprobs(*layer, torch.empty(0, dtype=torch.int64), head(5, with_entropy=with_entropy))
    torch.cat(got).sum().backward()
    assert all(part.shape == (0,) for part in got)
    assert layer[1].grad is not None
    assert (layer[1].grad == 0).all()


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("limit", [2**25, 1], ids=["one block", "several blocks"])
def test_a_second_backward_pass_has_the_same_gradients(limit: int, with_entropy: bool) -> None:
    """The first one overwrites the logits that the forward pass kept."""
    layer = random_layer(7, 48)
    loss = objective(token_logprobs(*layer, torch.arange(7), head(48, 0.7, with_entropy, limit)))
    first = torch.autograd.grad(loss, layer, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, layer), first)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_logits_never_exist_together(with_entropy: bool) -> None:
    """In forward and backward passes, no tensor is larger than a block or the layer's weight."""
    layer = random_layer(64, 320)
    with Largest() as largest:
        objective(token_logprobs(*layer, torch.arange(64), head(311, with_entropy=with_entropy, block_logits=64 * 32))).backward()
    assert 0 < largest.elements <= max(64 * 32, layer[1].numel()) < 64 * 311
