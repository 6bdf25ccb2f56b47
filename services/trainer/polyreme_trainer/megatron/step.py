"""One iteration of training, and its parts: gradients summed over micro-batches and data ranks, then one optimizer step.

The loss of a step is the sum over its trained tokens divided by their number over all data ranks, samples without gradient
included, so neither the layout nor the cut into micro-batches changes it. Metrics come from sums over ranks in the same way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from polyreme.config.algorithm import AlgorithmConfig
from polyreme_trainer.algorithms.losses import clipped_surrogate, importance_weights, k3, mismatch_kl
from polyreme_trainer.megatron.batch import (
    OVERHEAD_FLOPS,
    FloatArray,
    IntArray,
    MicroBatch,
    Sequences,
    freshly_sampled,
    pad,
    plan_micro_batches,
    share,
    split_steps,
    with_gradient,
)
from polyreme_trainer.megatron.optimizer import Optimizer
from polyreme_trainer.megatron.policy import Policy

PROBE = 16
"""Sequences that measure the mismatch when none has a gradient."""


@dataclass(frozen=True)
class Layout:
    """What this rank works on.

    Args:
        device: where tensors go.
        data_rank, data_ranks: this rank's part of every step.
        sum_over_data: adds a tensor up over the data-parallel ranks, in place.
        micro_batch_tokens: padded tokens of one micro-batch at most.
        parameters: of the whole model; decides how many tokens the fixed cost of a micro-batch is worth.
    """

    device: torch.device
    data_rank: int
    data_ranks: int
    sum_over_data: Callable[[Tensor], None]
    micro_batch_tokens: int
    parameters: int

    def micro_batches(self, sequences: Sequences, indices: IntArray) -> Iterator[MicroBatch]:
        """This rank's share of `indices`, padded."""
        return self.cut(sequences, share(sequences.lengths, indices, self.data_rank, self.data_ranks))

    def cut(self, sequences: Sequences, mine: IntArray) -> Iterator[MicroBatch]:
        """All of `mine`, padded."""
        overhead = OVERHEAD_FLOPS / (6 * self.parameters)
        for part in plan_micro_batches(sequences.lengths, mine, self.micro_batch_tokens, overhead):
            yield pad(sequences, part, self.device)


@dataclass(frozen=True)
class Trained:
    """What an iteration's training did, the same on every rank."""

    policy_loss: float
    kl: float
    """k3 to the reference per token; 0 without one."""
    clip_fraction: float
    """Of the tokens that were run through the model."""
    mismatch_kl: float | None
    """Per token, over the tokens that were run through the model and that its own version sampled; None: there were none."""
    off_policy_kl: float
    """KL(behaviour || policy before the step) per token, over all tokens that were run: the mismatch, and staleness."""
    importance_weight: float | None
    """Mean over the tokens that were run, after truncation; None: without correction."""
    truncated_fraction: float | None
    """Of the tokens that were run: those whose importance weight was cut to the cap."""
    grad_norm: float
    """Mean over the optimizer steps, before clipping."""
    trained_samples: int
    """Samples with an advantage other than zero. (Under a KL penalty the others have a gradient too, but perhaps none at first.)"""


class PolicyLoss:
    """The clipped surrogate, plus `kl_coef` times k3, as this micro-batch's part of a step's token mean.

    With an `importance_cap` the surrogate of each token has its truncated importance weight as a factor. Adds up per-token sums of
    what it sees in `sums`, float64, in the order of `SUMS`.
    """

    SUMS = ("surrogate", "kl", "clipped", "off_policy", "weights", "truncated", "tokens", "mismatch", "fresh_tokens")

    def __init__(self, algorithm: AlgorithmConfig, device: torch.device, importance_cap: float | None = None) -> None:
        self._algorithm, self._cap = algorithm, importance_cap
        self.sums = torch.zeros(len(self.SUMS), dtype=torch.float64, device=device)

    def __call__(self, batch: MicroBatch, logprobs: Tensor, tokens: float) -> Tensor:
        algorithm, mask = self._algorithm, batch.mask
        first = logprobs.detach()
        old = first if batch.old is None else batch.old
        surrogate = clipped_surrogate(logprobs, old, batch.advantages, algorithm.clip_low, algorithm.clip_high)
        weights = torch.ones_like(first) if self._cap is None else importance_weights(old, batch.behaviour, self._cap)
        loss = surrogate = (surrogate * weights * mask).sum()
        kl = torch.zeros_like(surrogate)
        if batch.reference is not None:
            kl = (k3(logprobs, batch.reference) * mask).sum()
            loss = loss + algorithm.kl_coef * kl
        with torch.no_grad():
            ratio = torch.exp(first - old)
            clipped = (ratio < 1 - algorithm.clip_low) | (ratio > 1 + algorithm.clip_high)
            distance, fresh = mismatch_kl(old, batch.behaviour), batch.fresh * mask
            truncated = weights >= (torch.inf if self._cap is None else self._cap)
            tokenwise = [(x * mask).sum() for x in (clipped, distance, weights, truncated)]
            self.sums += torch.stack([surrogate, kl, *tokenwise, mask.sum(), (distance * fresh).sum(), fresh.sum()])
        return loss / tokens


def optimize(
    model: Policy,
    optimizer: Optimizer,
    layout: Layout,
    sequences: Sequences,
    indices: IntArray,
    loss: Callable[[MicroBatch, Tensor], Tensor],
    temperature: float,
    lr: float,
) -> float:
    """One optimizer step on `indices`, shared out over the data ranks.

    Args:
        loss: (micro-batch, logprobs [b, w]) -> the scalar to differentiate; over all micro-batches and ranks they add up
            to the step's loss.

    Returns:
        The norm of the whole gradient before clipping.
    """
    optimizer.zero_grad()
    for batch in layout.micro_batches(sequences, indices):
        loss(batch, model.logprobs(batch.ids, batch.targets, temperature)).backward()
    optimizer.set_lr(lr)
    return optimizer.step()


def train_iteration(
    policy: Policy,
    reference: Policy | None,
    optimizer: Optimizer,
    layout: Layout,
    sequences: Sequences,
    group_size: int,
    algorithm: AlgorithmConfig,
    temperature: float,
    lr: float,
    seed: tuple[int, int],
    importance_cap: float | None = None,
) -> Trained:
    """Every optimizer step of one iteration: epochs x minibatches of them.

    With a single step the policy that is trained is the policy of the old log-probabilities, so they are taken from its own
    forward pass; with more they are computed first. Sequences without gradient are not run at all (see `with_gradient`), except
    that an iteration in which none has one runs a few first, to measure the mismatch. The optimizer steps in any case: its moments decay.

    Args:
        importance_cap: of the tokens' importance weights; None: no correction for who sampled them.
    """
    steps = split_steps(len(sequences) // group_size, group_size, algorithm.minibatches, algorithm.epochs, seed)
    moving = with_gradient(sequences, algorithm.kl_coef)
    parts = [np.intersect1d(step, moving) for step in steps]
    if len(steps) > 1:
        sequences = replace(sequences, old=_logprobs(policy, layout, sequences, parts, temperature))
    if reference is not None:
        sequences = replace(sequences, reference=_logprobs(reference, layout, sequences, parts, temperature))
    loss = PolicyLoss(algorithm, layout.device, importance_cap)
    if len(moving) == 0:
        with torch.no_grad():
            probed = replace(sequences, old=None)  # those of a sequence that is not trained on were not computed
            for batch in layout.micro_batches(probed, freshly_sampled(sequences)[:PROBE]):
                loss(batch, policy.logprobs(batch.ids, batch.targets, temperature), tokens=1.0)
    norms = []
    for step, part in zip(steps, parts, strict=True):
        tokens = max(1.0, float(sequences.tokens[step].sum()))
        norms.append(optimize(policy, optimizer, layout, sequences, part, partial(loss, tokens=tokens), temperature, lr))
    layout.sum_over_data(loss.sums)
    sums = dict(zip(PolicyLoss.SUMS, loss.sums.tolist(), strict=True))
    run, corrected = max(1.0, sums["tokens"]), importance_cap is not None
    tokens = max(1.0, algorithm.epochs * float(sequences.tokens.sum()))
    return Trained(
        policy_loss=sums["surrogate"] / tokens,
        kl=sums["kl"] / tokens,
        clip_fraction=sums["clipped"] / run,
        mismatch_kl=sums["mismatch"] / sums["fresh_tokens"] if sums["fresh_tokens"] else None,
        off_policy_kl=sums["off_policy"] / run,
        importance_weight=sums["weights"] / run if corrected else None,
        truncated_fraction=sums["truncated"] / run if corrected else None,
        grad_norm=float(np.mean(norms)),
        trained_samples=len(with_gradient(sequences, kl_coef=0.0)),
    )


def _logprobs(model: Policy, layout: Layout, sequences: Sequences, parts: list[IntArray], temperature: float) -> list[FloatArray]:
    """float32 [len - 1] log-probabilities of the sequences that this rank will train on in `parts`; zeros for all others."""
    result = [np.zeros(length - 1, dtype=np.float32) for length in sequences.lengths]
    done = np.zeros(len(sequences), dtype=bool)
    with torch.no_grad():
        for part in parts:
            mine = share(sequences.lengths, part, layout.data_rank, layout.data_ranks)
            for batch in layout.cut(sequences, mine[~done[mine]]):
                values = model.logprobs(batch.ids, batch.targets, temperature).cpu().numpy()
                for row, index in enumerate(batch.indices):
                    result[index] = values[row, : sequences.lengths[index] - 1]
            done[mine] = True
    return result
