"""Log-probabilities and entropies of one rank's logits against torch's distributions, values and gradients."""

import pytest
import torch
from torch import Tensor

from polyreme_trainer.megatron.logprobs import token_logprobs


def random_logits(rows: int) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_padded_columns_are_left_out(temperature: float, with_entropy: bool) -> None:
    logits = random_logits(6)
    targets = torch.tensor([0, 4, 2, 2, 1, 3])
    distribution = torch.distributions.Categorical(logits=logits[:, :5] / temperature)
    want = [distribution.log_prob(targets), distribution.entropy()][: 1 + with_entropy]
    got = token_logprobs(logits, targets, start=0, valid=5, temperature=temperature, with_entropy=with_entropy)
    assert len(got) == len(want)
    weights = torch.linspace(-1, 1, 6), torch.linspace(2, 1, 6)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
    ours, theirs = (
        torch.autograd.grad(sum((part * weight).sum() for part, weight in zip(parts, weights, strict=False)), logits)[0]
        for parts in (got, want)
    )
    torch.testing.assert_close(ours, theirs)
    assert (ours[:, 5:] == 0).all()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_wanted_token_is_no_gradient(with_entropy: bool) -> None:
    logits = random_logits(0)
    nobody = torch.empty(0, dtype=torch.int64)
    got = token_logprobs(logits, nobody, start=0, valid=5, temperature=1.0, with_entropy=with_entropy)
    torch.cat(got).sum().backward()
    assert all(part.shape == (0,) for part in got)
