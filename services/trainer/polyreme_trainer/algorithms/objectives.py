"""The objectives of the stages: the losses of `preference` and cross entropy, with the usual metrics of each.

Invariant: `loss` among the metrics is the mean that the step minimises.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyreme.config.stage import Dpo, Ipo, Kto, PreferenceLoss, SimPo
from polyreme_trainer.algorithms import preference
from polyreme_trainer.algorithms.metrics import Metrics, mean_of
from polyreme_trainer.algorithms.objective import Head, StageInputs


@dataclass(frozen=True)
class CrossEntropy:
    """Supervised training: the mean over all trained tokens of the step."""

    head: ClassVar[Head] = "language"
    needs_reference: ClassVar[bool] = False
    needs_baseline: ClassVar[bool] = False

    def loss(self, inputs: StageInputs) -> tuple[Tensor, Metrics]:
        return -inputs.output.sum() / max(1, inputs.tokens), {"loss": mean_of(-inputs.output)}


@dataclass(frozen=True)
class PairwiseScores:
    """A reward model: Bradley-Terry on the scores of pairs, with a penalty on scores far from 0."""

    center_coef: float = 0.0
    head: ClassVar[Head] = "value"
    needs_reference: ClassVar[bool] = False
    needs_baseline: ClassVar[bool] = False

    def loss(self, inputs: StageInputs) -> tuple[Tensor, Metrics]:
        scores = inputs.sequence_sum(inputs.output)
        chosen, rejected = pairs(scores)
        tie = inputs.columns["tie"] > 0
        losses = preference.bradley_terry(chosen, rejected, inputs.columns["margin"], tie)
        losses = losses + self.center_coef * (chosen + rejected) ** 2
        metrics = {
            "loss": mean_of(losses),
            "accuracy": mean_of(accuracy(chosen, rejected), (~tie).float()),
            "margin": mean_of(chosen - rejected, (~tie).float()),
            "mean_reward": mean_of(scores),
        }
        return losses.sum() / inputs.rows, metrics


@dataclass(frozen=True)
class PairwiseLogprobs:
    """DPO, IPO, SimPO and ORPO on pairs of answers."""

    config: PreferenceLoss
    head: ClassVar[Head] = "language"
    needs_baseline: ClassVar[bool] = False

    @property
    def needs_reference(self) -> bool:
        return self.config.needs_reference

    def loss(self, inputs: StageInputs) -> tuple[Tensor, Metrics]:
        losses, both = self._losses(inputs)
        rewards = self.config.beta * both[0].detach(), self.config.beta * both[1].detach()
        logps = pairs(inputs.sequence_sum(inputs.output.detach()))
        metrics = {
            "loss": mean_of(losses),
            "rewards/chosen": mean_of(rewards[0]),
            "rewards/rejected": mean_of(rewards[1]),
            "rewards/accuracies": mean_of(accuracy(*rewards)),
            "rewards/margins": mean_of(rewards[0] - rewards[1]),
            "logps/chosen": mean_of(logps[0]),
            "logps/rejected": mean_of(logps[1]),
        }
        return losses.sum() / inputs.rows, metrics

    def _losses(self, inputs: StageInputs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns the loss of each pair, and the quantities of both answers whose multiples are the rewards."""
        match self.config:
            case Dpo(beta=beta, label_smoothing=smoothing):
                both = pairs(inputs.sequence_sum(inputs.log_ratios()))
                return preference.dpo(*both, beta, smoothing), both
            case Ipo(beta=beta, per_token=per_token):
                log_ratios = inputs.log_ratios()
                both = pairs(inputs.sequence_sum(log_ratios))
                return preference.ipo(*(pairs(inputs.sequence_mean(log_ratios)) if per_token else both), beta), both
            case SimPo(beta=beta, gamma=gamma):
                both = pairs(inputs.sequence_mean(inputs.output))
                return preference.simpo(*both, beta, gamma), both
            case _:
                both = pairs(inputs.sequence_mean(inputs.output))
                return preference.orpo(*both, self.config.beta), both


@dataclass(frozen=True)
class LabelledLogprobs:
    """KTO on good and bad answers."""

    config: Kto
    head: ClassVar[Head] = "language"
    needs_reference: ClassVar[bool] = True
    needs_baseline: ClassVar[bool] = True

    def loss(self, inputs: StageInputs) -> tuple[Tensor, Metrics]:
        config, good = self.config, inputs.columns["good"] > 0
        log_ratio, logps = inputs.sequence_sum(inputs.log_ratios()), inputs.sequence_sum(inputs.output.detach())
        baseline = torch.full_like(log_ratio, inputs.baseline)
        losses = preference.kto(log_ratio, good, baseline, config.beta, config.desirable_weight, config.undesirable_weight)
        metrics: Metrics = {"loss": mean_of(losses), "kl": mean_of(baseline)}
        for name, chosen in (("chosen", good), ("rejected", ~good)):
            metrics[f"rewards/{name}"] = mean_of(config.beta * log_ratio, chosen.float())
            metrics[f"logps/{name}"] = mean_of(logps, chosen.float())
        return losses.sum() / inputs.rows, metrics


def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen and the rejected entries of x [2 n], [n] each."""
    chosen, rejected = x.view(-1, 2).unbind(1)
    return chosen, rejected


def accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 where the chosen one is larger, 0.5 where both are equal, otherwise 0; [n]."""
    return ((chosen > rejected).float() + (chosen >= rejected).float()) / 2
