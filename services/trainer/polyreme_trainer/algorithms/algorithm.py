"""Composes a recipe into the functions that training calls: the advantages of an iteration and the losses of a micro-batch.

Invariant: these are pure functions of their arguments. All that outlives an iteration is in the state that `advantages` returns.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from polyreme.config.recipes.recipe import Gae, Kl, Recipe
from polyreme_trainer.algorithms import advantages, correction, shaping
from polyreme_trainer.algorithms.aggregation import token_coefficients
from polyreme_trainer.algorithms.batch import Advantages, Bool, Float32, Float64, Int64, TokenBatch, sequence_sums
from polyreme_trainer.algorithms.filters import informative
from polyreme_trainer.algorithms.groups import Groups
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.kl import adapt, estimate
from polyreme_trainer.algorithms.losses import SURROGATES, value_loss
from polyreme_trainer.algorithms.metrics import Metrics, mean_of
from polyreme_trainer.algorithms.rewards import Rewards, required, rewards_of, shaped_scores
from polyreme_trainer.algorithms.state import INITIAL, AlgorithmState


@dataclass(frozen=True)
class Needs:
    """The optional inputs of a recipe, besides scores, the sampler's log-probabilities and, for several optimizer steps, `old`.

    Attributes:
        reference: log-probabilities under the reference policy.
        critic: a critic, and its values before the first optimizer step.
        final_values: the critic's value after the last token.
        old: log-probabilities before the first optimizer step, in the batch, even when an iteration has one step.
        entropy: the policy's entropy, with gradient.
        teacher: log-probabilities under a teacher.
        parts: the reward's components.
        ids: token ids.
        greedy: a greedy sample in every group.
    """

    reference: bool
    critic: bool
    final_values: bool
    old: bool
    entropy: bool
    teacher: bool
    parts: bool
    ids: bool
    greedy: bool


@dataclass(frozen=True)
class Algorithm:
    """A recipe as the functions that training calls.

    Args:
        recipe: a checked recipe.
        longest: the largest number of tokens that the policy may sample in a trajectory; of a single turn, in a response.
        most: the same in an episode, whose trajectories may be several; None: `longest`.
    """

    recipe: Recipe
    longest: int
    most: int | None = field(default=None, kw_only=True)

    @property
    def needs(self) -> Needs:
        recipe, estimator = self.recipe, self.recipe.advantage
        return Needs(
            reference=recipe.kl is not None,
            critic=estimator.needs_critic,
            final_values=isinstance(estimator, Gae) and estimator.bootstrap_truncated,
            old=recipe.teacher_coef > 0 or (recipe.kl is not None and recipe.kl.place == "reward"),
            entropy=recipe.entropy_coef > 0,
            teacher=recipe.teacher_coef > 0,
            parts=estimator.needs_parts,
            ids=recipe.shaping.repetition is not None,
            greedy=estimator.needs_greedy,
        )

    def advantages(self, batch: TokenBatch, state: AlgorithmState = INITIAL) -> Advantages:
        """The advantages of a whole iteration. Raises ValueError when the batch lacks an input that the recipe needs."""
        recipe = self.recipe
        longest = np.minimum(self.longest * (1 if batch.trajectories is None else batch.trajectories), self.most or self.longest)
        scores, moments = shaped_scores(recipe.shaping, batch, longest, state.scores)
        kl, coef = None, state.kl_coef
        if recipe.kl is not None and recipe.kl.place == "reward":
            kl, coef = self._kl_in_reward(recipe.kl, batch), coef if recipe.kl.adaptive and coef is not None else recipe.kl.coef
        std = moments.std if recipe.shaping.normalise else 1.0
        rewards = rewards_of(batch, scores, None if kl is None or coef is None else coef * kl, std)
        advantages, returns = self.estimate(batch, rewards)
        if recipe.teacher_coef > 0:
            teacher = required(batch.teacher, "teacher")
            advantages = advantages + shaping.distillation_advantages(teacher, batch.policy, batch.mask, recipe.teacher_coef)
        dropped = batch.truncated & recipe.shaping.truncation_mask
        return Advantages(
            advantages=advantages.astype(np.float32),
            returns=None if returns is None else returns.astype(np.float32),
            weight=(~dropped[batch.sequence_of]).astype(np.float32),
            metrics=summary(batch, rewards, advantages, returns, dropped, kl, coef),
            state=AlgorithmState(kl_coef=self._next_coef(batch, kl, coef), scores=moments),
        )

    def estimate(self, batch: TokenBatch, rewards: Rewards) -> tuple[Float64, Float64 | None]:
        """The advantages of a batch and, with a critic, its returns: float64 [t], 0 where masked."""
        return advantages.estimate(self.recipe.advantage, batch, rewards)

    def coefficients(self, batch: TokenBatch, advantages: Advantages, step: Int64) -> Float32:
        """float32 [t], the `LossInputs.weight` of every token in an optimizer step on the episodes `step`; 0 for other tokens.

        With dynamic sampling, a group of equal scores counts as dropped, so the divisor excludes it.
        """
        if self.recipe.dynamic_sampling:
            step = step[informative(batch.score, batch.group)[step]]
        return advantages.weight * token_coefficients(batch.mask, batch.offsets, step, self.recipe.aggregation, self.longest)

    def critic_coefficients(self, batch: TokenBatch, step: Int64) -> Float32:
        """The same for `critic_loss`: the mean over all trained tokens. Samples masked for the policy still train the critic."""
        return token_coefficients(batch.mask, batch.offsets, step, "token-mean")

    def has_gradient(self, batch: TokenBatch, advantages: Advantages) -> Bool:
        """bool [n], whether an episode has a gradient for the policy. A backward pass without the others has the same result."""
        alive = batch.trained & (advantages.weight > 0)
        if self.recipe.dynamic_sampling:
            alive &= informative(batch.score, batch.group)[batch.sequence_of]
        if not (self.recipe.entropy_coef > 0 or (self.recipe.kl is not None and self.recipe.kl.place == "loss")):
            alive &= advantages.advantages != 0
        return sequence_sums(alive, batch.offsets) > 0

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """The policy's loss over a micro-batch and its metrics. The sum over micro-batches and ranks is the step's loss.

        The correction factor multiplies the surrogate only: KL and entropy are not expectations over the sampler's tokens alone.
        """
        recipe = self.recipe
        anchor = inputs.old if recipe.anchor == "old" else inputs.behaviour
        surrogate = SURROGATES[type(recipe.loss)](inputs, anchor, **recipe.loss.model_dump(exclude={"kind"}))
        factor, metrics = correction.correct(recipe.correction, inputs)
        policy_loss = total = surrogate.loss * factor
        metrics |= {
            "policy_loss": mean_of(policy_loss, inputs.weight),
            "ppo_kl": mean_of(anchor - inputs.logprobs),
            **{name: mean_of(flag) for name, flag in surrogate.flags.items()},
        }
        if recipe.kl is not None and recipe.kl.place == "loss":
            kl = estimate(recipe.kl.estimator, inputs.logprobs, required(inputs.reference, "reference"))
            total = total + recipe.kl.coef * kl
            metrics["kl"] = mean_of(kl)
        if inputs.entropy is not None:
            metrics["entropy"] = mean_of(inputs.entropy)
        if recipe.entropy_coef > 0:
            total = total - recipe.entropy_coef * required(inputs.entropy, "entropy")
        return (inputs.weight * total).sum(), metrics

    def critic_loss(self, new: Tensor, values: Tensor, returns: Tensor, weight: Tensor) -> tuple[Tensor, Metrics]:
        """The critic's loss over the t trained tokens of a micro-batch and its metrics, as in `loss`.

        Args:
            new, values, returns: [t], see `value_loss`. `new` carries the gradient.
            weight: [t], the critic's coefficients.

        Raises:
            ValueError: the recipe has no critic.
        """
        if not isinstance(self.recipe.advantage, Gae):
            raise ValueError(f"expected a recipe with a critic; found {self.recipe.advantage.kind}, which has no critic")
        result = value_loss(new, values, returns, self.recipe.advantage.value_clip)
        metrics = {"value_loss": mean_of(result.loss, weight)}
        return (weight * result.loss).sum(), metrics | {name: mean_of(flag) for name, flag in result.flags.items()}

    def _kl_in_reward(self, kl: Kl, batch: TokenBatch) -> Float64:
        """The estimate at each token, float64 [t], 0 where masked."""
        reference = required(batch.reference, "reference")
        result, trained = np.zeros(batch.tokens), batch.trained
        policy, frozen = (torch.from_numpy(x[trained].astype(np.float64)) for x in (batch.policy, reference))
        result[trained] = estimate(kl.estimator, policy, frozen).numpy()
        return result

    def _next_coef(self, batch: TokenBatch, kl: Float64 | None, coef: float | None) -> float | None:
        """The next coefficient, adapted to this iteration's KL per episode or token; None without an adaptive controller."""
        samples = int((batch.lengths > 0).sum())
        if kl is None or coef is None or self.recipe.kl is None or self.recipe.kl.adaptive is None:
            return None
        if samples == 0:
            return coef
        controller = self.recipe.kl.adaptive
        if controller.unit == "token":  # the mean over responses of the mean over a response's tokens
            kl = kl / np.maximum(batch.lengths, 1)[batch.sequence_of]
        return adapt(coef, float(kl.sum()) / samples, controller.target, controller.horizon, samples)


def summary(
    batch: TokenBatch,
    rewards: Rewards,
    advantages: Float64,
    returns: Float64 | None,
    dropped: Bool,
    kl: Float64 | None,
    kl_coef: float | None,
) -> dict[str, tuple[float, float]]:
    """An iteration's metrics, name -> (sum, weight). All ranks compute the same from one batch: they are not summed over ranks.

    - Per sample, without greedy ones: `score` before shaping, `reward` after shaping and with process rewards and KL penalty,
      `truncated_sample_fraction`, `masked_sample_fraction`.
    - Per trained token: `advantage`, `return`, `value`, `reward_kl`, `teacher_kl` (log p of the policy minus the teacher's).
    - `_max` and `_min` of `score`, `reward`, `advantage`, `return` and `value`.
    - Per group: `zero_variance_group_fraction`.
    - `explained_variance` of the returns by the values, unless the returns are constant; `kl_coef`, the coefficient used.
    """
    sampled, trained = ~batch.greedy, batch.trained
    series = {"score": batch.score[sampled], "reward": rewards.totals[sampled], "advantage": advantages[trained]}
    if returns is not None:
        series["return"] = returns[trained]
    if returns is not None and batch.values is not None:
        series["value"] = batch.values[trained].astype(np.float64)
    metrics: dict[str, tuple[float, float]] = {}
    for name, x in series.items():
        if len(x):
            metrics[name] = (float(x.sum()), float(len(x)))
            metrics[f"{name}_max"], metrics[f"{name}_min"] = (float(x.max()), 1.0), (float(x.min()), 1.0)
    samples = float(sampled.sum())
    metrics["truncated_sample_fraction"] = (float(batch.truncated[sampled].sum()), samples)
    metrics["masked_sample_fraction"] = (float(dropped[sampled].sum()), samples)
    groups = Groups(batch.group[sampled])
    constant = groups.constant(rewards.scores[sampled])
    metrics["zero_variance_group_fraction"] = (float((constant / groups.sizes[groups.member_of]).sum()), float(len(groups)))
    if "value" in series and (variance := float(series["return"].var()) if len(series["return"]) else 0.0) > 0:
        metrics["explained_variance"] = (1.0 - float((series["return"] - series["value"]).var()) / variance, 1.0)
    if batch.teacher is not None:
        metrics["teacher_kl"] = (float((batch.policy - batch.teacher)[trained].astype(np.float64).sum()), float(trained.sum()))
    if kl is not None and kl_coef is not None:
        metrics["reward_kl"], metrics["kl_coef"] = (float(kl.sum()), float(trained.sum())), (kl_coef, 1.0)
    return metrics
