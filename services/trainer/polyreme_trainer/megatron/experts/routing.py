"""The routers of one model on one rank: their statistics and the losses that balance them.

The balancing loss of an optimizer step is, averaged over the layers, experts x sum over experts e of f_e P_e: f_e is the number
of choices of e per token, P_e the mean of its probability (Fedus et al. 2021, equations 4 to 6, with f of the whole step as in
Qiu et al. 2025). With f known, this is a sum over tokens. So a step first counts the choices in a separate forward pass, then
each token adds its part of the loss. The z-loss is the mean square of the log-sum-exp of a token's router logits (Zoph et al.
2022, equation 5). The probabilities of a router whose scores are sigmoids are these scores, divided by their sum.

An expert bias balances without a loss: after each optimizer step, those of the experts that fewer tokens than the mean chose grow
by the update rate, and the others shrink by it (Wang et al. 2024, algorithm 1).

Invariant: padding is neither counted nor balanced, and every token counts once, even with recomputed activations. Metrics and
gradients of a step are sums over its tokens, so neither they nor the new expert biases depend on the layout or on micro-batches.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from polyreme.config.trainer import MoeConfig
from polyreme_trainer.algorithms.metrics import Metrics
from polyreme_trainer.megatron.batches.batch import MicroBatch
from polyreme_trainer.megatron.batches.context_cut import Cut
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank
from polyreme_trainer.megatron.mcore import parallel_state
from polyreme_trainer.megatron.parallel.collectives import sum_over


@dataclass(frozen=True)
class Rows:
    """A description of a micro-batch's positions for the routers of this rank, in the order in which layers compute them.

    Attributes:
        real: bool [rows], whether a position holds a token.
        routes: int64 [rows, expert layers, top_k], the experts of a position; -1 where the router decides. None: everywhere.
    """

    real: Tensor
    routes: Tensor | None


class Replayed:
    """Replaces the choice of the most probable experts, with the interface of megatron-core's RouterReplay (Ma et al. 2025). The
    router still computes the weights.

    Args:
        routes: int64 [rows, top_k], as in `Rows`.
    """

    def __init__(self, routes: Tensor) -> None:
        self.routes = routes

    def get_replay_topk(
        self, scores: Tensor, topk: int, groups: int | None, group_topk: int | None, choose: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices of the chosen experts, [rows, top_k], from the scores of all experts [rows, experts]."""
        own = choose(scores, topk, num_groups=groups, group_topk=group_topk)[1]
        chosen = torch.where(self.routes < 0, own, self.routes)
        return scores.gather(1, chosen), chosen


class Routing:
    """The state that all routers of one rank's model share.

    Args:
        arch, here: the model and this rank.
        recomputes: whether backward passes run the routers again.
        device: the device of the model.

    Attributes:
        biases: the expert biases that this rank's layers have, fp32 [experts], by the number among the model's expert layers.
    """

    def __init__(self, arch: Architecture, here: Rank, recomputes: bool, device: torch.device) -> None:
        self.arch, self.here, self.recomputes = arch, here, recomputes
        self.biases: dict[int, Tensor] = {}
        self.aux_coef = self.z_coef = self.bias_rate = 0.0
        self._phase: Literal["infer", "count", "train"] = "infer"
        self._batch: MicroBatch | None = None
        self._replays = False
        self._rows: Rows | None = None
        self._waiting: dict[int, deque[Rows | None]] = {}
        self._tokens = 0
        self._choices: Tensor | None = None
        """fp32 [expert layers, experts], how often each expert is chosen per token of the step; None when not counted."""
        self._observed = torch.zeros(arch.expert_layers, 2 * arch.experts + 1, dtype=torch.float64, device=device)
        """By expert layer, of the last step: each expert's choices and probability sum, and the sum of squared log-sum-exps."""

    def balance(self, moe: MoeConfig) -> None:
        """Sets the coefficients and the rate. The balancing loss has the coefficient of config.json unless one is configured."""
        self.aux_coef = self.arch.aux_loss_coef if moe.aux_loss_coef is None else moe.aux_loss_coef
        self.z_coef, self.bias_rate = moe.z_loss_coef, moe.bias_update_rate

    @property
    def balances(self) -> bool:
        """Whether an optimizer step changes the routers' choices for their balance, so tokens without another loss count too."""
        return bool(self.aux_coef or self.z_coef or self.bias_rate)

    @contextmanager
    def micro_batch(self, batch: MicroBatch, replays: bool) -> Iterator[None]:
        """Within the block, forward passes compute `batch`. `replays`: positions go to the experts of its routes."""
        self._batch, self._replays = batch, replays and batch.routes is not None
        try:
            yield
        finally:
            self._batch = self._rows = None

    def place(self, cut: Cut | None = None) -> None:
        """Begins a forward pass. `cut`: the tokens of this context rank; None: all."""
        self._rows, batch = None, self._batch
        if batch is None or (self._phase == "infer" and not self._replays):
            return
        routes = self._mine(batch.routes, cut) if self._replays and batch.routes is not None else None
        self._rows = Rows(self._mine(batch.real, cut), routes)

    def _mine(self, rows: Tensor, cut: Cut | None) -> Tensor:
        """This rank's rows: with sequence parallelism, each tensor rank has an equal run of the context rank's positions."""
        mine = rows if cut is None else rows.index_select(0, cut.tokens)
        return mine.chunk(self.here.tp)[self.here.tp_rank]

    @contextmanager
    def step(self, tokens: int, count: Callable[[], None], total: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """The context of the backward passes of an optimizer step.

        Args:
            tokens: the step's tokens, over all ranks.
            count: runs the step's micro-batches without gradient.
            total: sums a tensor over the data ranks and the stages.
        """
        self._tokens = tokens
        self._observed.zero_()
        try:
            if self.aux_coef and tokens:
                self._phase = "count"
                with torch.no_grad():
                    count()
                self._sum(total)
                self._choices = (self._observed[:, : self.arch.experts] / tokens).float()
            self._phase = "train"
            yield
        finally:
            counted, self._choices, self._phase = self._choices is not None, None, "infer"
            self._waiting.clear()
        if not counted:
            self._sum(total)

    def _sum(self, total: Callable[[Tensor], Tensor]) -> None:
        """Sums the statistics over all ranks. Collective."""
        total(self._observed)
        if parallel_state.get_tensor_and_context_parallel_world_size() > 1:
            sum_over(self._observed, parallel_state.get_tensor_and_context_parallel_group())

    def rows(self, layer: int) -> Rows | None:
        """The rows that `layer`'s router computes now. Backward passes recompute a layer's micro-batches in forward order."""
        if self._phase != "train" or not self.recomputes:
            return self._rows
        waiting = self._waiting.setdefault(layer, deque())
        if torch.is_grad_enabled():
            return waiting.popleft()
        waiting.append(self._rows)
        return self._rows

    def record_and_attach_loss(self, layer: int, rows: Rows | None, logits: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
        """Adds a router's decisions to statistics. Returns `probs`; differentiating them also differentiates the tokens' losses.

        Args:
            layer: the layer's number among those with experts in the whole model, from 0.
            rows: see `rows`.
            logits: fp32 [rows, experts].
            probs: the experts' weights, fp32 [rows, experts]; the result has the same values.
            chosen: bool [rows, experts].
        """
        if rows is None or self._phase == "infer" or (self._phase == "train" and not torch.is_grad_enabled()):
            return probs
        if self._choices is None:
            with torch.no_grad():
                shares, squares = self._per_token(logits, rows.real)
                every = [(chosen & rows.real.unsqueeze(1)).sum(0), shares.sum(0), squares.sum().view(1)]
                self._observed[layer] += torch.cat(every)
        if self._phase == "count" or not (self.aux_coef or self.z_coef):
            return probs
        shares, squares = self._per_token(logits, rows.real)
        loss = self.z_coef * squares.sum()
        if self._choices is not None:
            loss = loss + self.aux_coef * self.arch.experts * (shares.sum(0) * self._choices[layer]).sum()
        weighted: Tensor = _WithLoss.apply(probs, loss / (self._tokens * self.arch.expert_layers))
        return weighted

    def _per_token(self, logits: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """The experts' probabilities [rows, experts], and the squared log-sum-exp [rows], both 0 where there is no token."""
        if self.arch.family.scores == "sigmoid":
            probabilities = torch.nn.functional.normalize(logits.sigmoid(), p=1, dim=-1)
        else:
            probabilities = logits.softmax(-1)
        return probabilities * real.unsqueeze(1), logits.logsumexp(-1).square() * real

    @torch.no_grad()
    def update_biases(self) -> None:
        """Updates the expert biases of this rank's layers after an optimizer step. A step without tokens does not change them."""
        if not self.bias_rate:
            return
        for layer, bias in self.biases.items():
            bias.copy_(updated_bias(bias, self._observed[layer, : self.arch.experts], self.bias_rate))

    def metrics(self) -> Metrics:
        """The metrics of the last optimizer step, the same on every rank; none when it had no tokens."""
        if not self._tokens:
            return {}
        experts, observed = self.arch.experts, self._observed
        choices, shares = observed[:, :experts], observed[:, experts:-1]
        imbalance = choices.amax(-1) / choices.mean(-1)
        values = {
            "moe/aux_loss": experts * (choices * shares).sum(-1).mean() / self._tokens**2,
            "moe/z_loss": observed[:, -1].mean() / self._tokens,
            "moe/imbalance": imbalance.mean(),
            "moe/imbalance_max": imbalance.max(),
            "moe/unused_expert_fraction": (choices == 0).double().mean(),
        }
        return {name: (value, torch.ones_like(value)) for name, value in values.items()}


def updated_bias(bias: Tensor, choices: Tensor, rate: float) -> Tensor:
    """The expert bias after a step, fp32 [experts] (Wang et al. 2024, algorithm 1).

    Args:
        bias: fp32 [experts], before the step.
        choices: [experts], the number of the step's tokens that chose each expert.
        rate: the change of the bias of each expert that was not chosen exactly as often as the mean.
    """
    return bias + rate * (choices.mean() - choices).sign().to(bias.dtype)


class _WithLoss(Function):
    """Returns `output`. Its backward pass also differentiates the scalar `loss`, with the gradient 1."""

    @staticmethod
    def forward(ctx: object, output: Tensor, loss: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones(())
