"""Whole recipes: advantages of an iteration and losses of micro-batches, and their invariances."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from polyreme.config.recipes.presets import PRESETS, resolve
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import Advantages, TokenBatch
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.metrics import combine, finish
from support.token_batches import full_batch, loss_inputs, with_greedy

LONGEST = 10


def batch_for(algorithm: Algorithm, seed: int) -> TokenBatch:
    return with_greedy(full_batch(seed)) if algorithm.needs.greedy else full_batch(seed)


def micro_batch(
    algorithm: Algorithm, batch: TokenBatch, advantages: Advantages, step: list[int], part: list[int], logprobs: torch.Tensor
) -> LossInputs:
    """The trained tokens of the sequences `part` of an optimizer step, from `logprobs` [t] with gradient."""
    tokens = np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in part])
    where = tokens[batch.trained[tokens]]
    row = {i: k for k, i in enumerate(part)}

    def pick(array: np.ndarray | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(array[where].astype(np.float64))

    old, behaviour = pick(batch.old), pick(batch.behaviour)
    weight, values = pick(algorithm.coefficients(batch, advantages, np.array(step))), pick(advantages.advantages)
    assert old is not None and behaviour is not None and weight is not None and values is not None
    return LossInputs(
        logprobs=logprobs[torch.from_numpy(where)],
        old=old,
        behaviour=behaviour,
        advantages=values,
        weight=weight,
        sequence=torch.tensor([row[i] for i in batch.sequence_of[where]], dtype=torch.int64),
        sequences=len(part),
        reference=pick(batch.reference),
    )


def gradient_of(algorithm: Algorithm, batch: TokenBatch, parts: list[list[int]]) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, gradient in every log-probability [t] and metrics of one step over `parts`."""
    advantages = algorithm.advantages(batch)
    assert batch.old is not None
    shift = 0.2 * torch.randn(batch.tokens, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    logprobs = (torch.from_numpy(np.nan_to_num(batch.old).astype(np.float64)) + shift).requires_grad_(True)
    step = [i for part in parts for i in part]
    loss, metrics = 0.0, []
    for part in parts:
        value, measured = algorithm.loss(micro_batch(algorithm, batch, advantages, step, part, logprobs))
        value.backward()
        loss += value.item()
        metrics.append(measured)
    assert logprobs.grad is not None
    return loss, logprobs.grad.numpy(), finish(combine(metrics))


GEOMETRIC = {"kind": "geometric_mask", "low": 0.8, "high": 1.2}
CORRECTION = [{"kind": "token_tis", "cap": 1.05}, {"kind": "geometric_mask", "low": 0.95, "high": 1.05}]
VARIANTS = {
    **{name: Algorithm(recipe, LONGEST) for name, recipe in PRESETS.items()},
    "corrected": Algorithm(resolve("grpo", {"correction": CORRECTION}), LONGEST),
    "gmpo": Algorithm(resolve("dapo", {"loss": {"kind": "geometric_mean"}, "aggregation": "seq-mean-token-mean"}), LONGEST),
    "masked": Algorithm(resolve("dapo", {"shaping": {"truncation_mask": True, "truncation_penalty": 0.5}}), LONGEST),
    "distilled": Algorithm(resolve("dapo", {"teacher_coef": 0.5, "dynamic_sampling": False}), LONGEST),
    "vapo": Algorithm(resolve("ppo", {"advantage": {"lam": {"alpha": 0.5}, "value_lam": 1.0}}), LONGEST),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_does_not_depend_on_how_it_is_cut(name: str) -> None:
    algorithm = VARIANTS[name]
    batch = batch_for(algorithm, 0)
    loss, gradient, metrics = gradient_of(algorithm, batch, [list(range(12))])
    for parts in ([[i] for i in range(12)], [[11, 3, 5], [0, 1, 2, 4], [10, 9, 8, 7, 6]]):
        cut_loss, cut_gradient, cut_metrics = gradient_of(algorithm, batch, parts)
        assert cut_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
        np.testing.assert_allclose(cut_gradient, gradient, rtol=1e-9, atol=1e-12)
        assert cut_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert np.abs(gradient).max() > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_masked_tokens_change_nothing(name: str) -> None:
    algorithm = VARIANTS[name]
    batch = batch_for(algorithm, 1)
    noise = {
        field: np.where(batch.trained, getattr(batch, field), np.nan).astype(np.float32)
        for field in ("behaviour", "old", "reference", "teacher", "values")
    }
    other = replace(batch, **noise, token_rewards=np.where(batch.trained, 0, np.nan).astype(np.float32))  # type: ignore[arg-type]
    found, expected = algorithm.advantages(other), algorithm.advantages(batch)
    np.testing.assert_array_equal(found.advantages, expected.advantages)
    assert (found.advantages[~batch.trained] == 0).all()
    np.testing.assert_array_equal(found.weight, expected.weight)
    if expected.returns is not None:
        np.testing.assert_array_equal(found.returns, expected.returns)
    assert found.metrics == expected.metrics
    step = [list(range(12))]
    np.testing.assert_array_equal(gradient_of(algorithm, other, step)[1], gradient_of(algorithm, batch, step)[1])


@pytest.mark.parametrize("name", VARIANTS)
def test_the_order_of_samples_changes_nothing(name: str) -> None:
    algorithm = VARIANTS[name]
    batch = batch_for(algorithm, 2)
    order = np.random.default_rng(0).permutation(12)
    where = np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in order])
    tokens = ("mask", "behaviour", "version", "old", "reference", "teacher", "values", "ids")
    moved = {name: getattr(batch, name)[where] for name in tokens}
    moved |= {name: getattr(batch, name)[order] for name in ("group", "score", "truncated", "greedy", "parts", "final_values")}
    moved["offsets"] = np.concatenate([[0], np.cumsum(np.diff(batch.offsets)[order])])
    found, expected = algorithm.advantages(replace(batch, **moved)), algorithm.advantages(batch)
    np.testing.assert_allclose(found.advantages, expected.advantages[where], rtol=1e-5, atol=1e-6)


GROUPED = [n for n, a in VARIANTS.items() if a.recipe.advantage.kind not in ("gae", "returns", "greedy_baseline", "positives")]


@pytest.mark.parametrize("name", sorted(set(GROUPED) - {"dapo", "gmpo", "masked", "distilled", "distillation"}))
def test_a_group_of_equal_scores_has_exactly_no_gradient(name: str) -> None:
    """The omitted recipes use another input that differs within the group: the length, or the teacher."""
    algorithm = replace(VARIANTS[name], recipe=VARIANTS[name].recipe.model_copy(update={"kl": None}))
    batch = batch_for(algorithm, 3)
    equal = (batch.group == 1)[batch.sequence_of]
    advantages = algorithm.advantages(batch)
    assert (advantages.advantages[equal] == 0).all()
    assert algorithm.has_gradient(batch, advantages).tolist() == (batch.group != 1).tolist()
    _, gradient, _ = gradient_of(algorithm, batch, [list(range(12))])
    assert (gradient[equal] == 0).all() and (gradient[~equal & batch.trained] != 0).any()


def test_sequences_without_gradient_may_be_left_out() -> None:
    for algorithm in VARIANTS.values():
        batch = batch_for(algorithm, 4)
        moving = np.flatnonzero(algorithm.has_gradient(batch, algorithm.advantages(batch)))
        _, gradient, _ = gradient_of(algorithm, batch, [list(range(12))])
        still = ~np.isin(batch.sequence_of, moving)
        assert (gradient[still] == 0).all()


def test_with_kl_in_the_loss_every_sequence_has_a_gradient() -> None:
    algorithm = VARIANTS["grpo"]
    batch = full_batch(0)
    assert algorithm.has_gradient(batch, algorithm.advantages(batch)).all()


def test_the_loss_is_surrogate_and_kl_and_entropy() -> None:
    algorithm = Algorithm(resolve("grpo", {"entropy_coef": 0.01, "correction": [{"kind": "token_tis", "cap": 1.5}]}), LONGEST)
    inputs = loss_inputs(0, [3, 2, 4])
    inputs = replace(inputs, entropy=(inputs.old**2).requires_grad_(True))
    loss, metrics = algorithm.loss(inputs)
    assert inputs.reference is not None and inputs.entropy is not None
    columns = (inputs.logprobs, inputs.old, inputs.behaviour, inputs.reference, inputs.advantages, inputs.weight, inputs.entropy)
    total, surrogate, weights, kl_sum = 0.0, 0.0, 0.0, 0.0
    for p, old, mu, ref, a, c, entropy in zip(*(x.tolist() for x in columns), strict=True):
        r = math.exp(p - old)
        policy = max(-a * r, -a * min(max(r, 0.8), 1.2)) * min(math.exp(old - mu), 1.5)
        kl = math.exp(ref - p) - 1 + p - ref
        total += c * (policy + 0.04 * kl - 0.01 * entropy)
        surrogate, weights, kl_sum = surrogate + c * policy, weights + c, kl_sum + kl
    assert loss.item() == pytest.approx(total, rel=1e-9)
    found = finish(combine([metrics]))
    assert found["policy_loss"] == pytest.approx(surrogate / weights, rel=1e-9)
    assert found["kl"] == pytest.approx(kl_sum / 9, rel=1e-9)
    assert found["entropy"] == pytest.approx(sum(inputs.entropy.tolist()) / 9, rel=1e-9)
    assert found["ppo_kl"] == pytest.approx(float((inputs.old - inputs.logprobs.detach()).mean()), rel=1e-9)
    (gradient,) = torch.autograd.grad(loss, inputs.entropy)
    torch.testing.assert_close(gradient, -0.01 * inputs.weight)


KL_VALUES: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "abs": abs,
}


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs", "k1+", "k3+", "abs+"])
def test_the_gradient_of_a_corrected_loss_with_kl(estimator: str) -> None:
    """The gradient equals central differences of loops: factors carry no gradient, and "+" has that of k2."""
    overrides = {"kl": {"estimator": estimator, "coef": 0.3}, "correction": [{"kind": "token_tis", "cap": 1.2}, GEOMETRIC]}
    algorithm, inputs, sizes = Algorithm(resolve("grpo", overrides), LONGEST), loss_inputs(1, [3, 2, 4]), [3, 2, 4]
    assert inputs.reference is not None
    new, old, mu, ref, a, c = (
        x.tolist() for x in (inputs.logprobs, inputs.old, inputs.behaviour, inputs.reference, inputs.advantages, inputs.weight)
    )
    factors: list[float] = []
    for size in sizes:
        logs = [old[t] - mu[t] for t in range(len(factors), len(factors) + size)]
        kept = 0.8 <= math.exp(sum(logs) / size) <= 1.2
        factors += [min(math.exp(x), 1.2) * kept for x in logs]
    assert 0 < sum(factor == 0 for factor in factors) < 9

    def term(t: int, p: float, kl: str) -> float:
        r = math.exp(p - old[t])
        return c[t] * (factors[t] * max(-a[t] * r, -a[t] * min(max(r, 0.8), 1.2)) + 0.3 * KL_VALUES[kl](p - ref[t]))

    loss, _ = algorithm.loss(inputs)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    assert loss.item() == pytest.approx(sum(term(t, new[t], estimator.rstrip("+")) for t in range(9)), rel=1e-9)
    sloped, h = "k2" if estimator.endswith("+") else estimator, 1e-6
    for t in range(9):
        slope = (term(t, new[t] + h, sloped) - term(t, new[t] - h, sloped)) / (2 * h)
        assert gradient[t].item() == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_bypass_measures_the_ratio_from_the_sampler() -> None:
    bypass = Algorithm(resolve("dapo", {"anchor": "behaviour"}), LONGEST)
    inputs = loss_inputs(0, [3, 2, 4])
    loss, _ = bypass.loss(inputs)
    expected, _ = VARIANTS["dapo"].loss(replace(inputs, old=inputs.behaviour))
    assert loss.item() == expected.item()
    assert loss.item() != VARIANTS["dapo"].loss(inputs)[0].item()


def test_the_critic_loss_is_the_weighted_squared_error() -> None:
    algorithm = VARIANTS["ppo"]
    inputs = loss_inputs(0, [3, 2])
    values, returns = inputs.old, inputs.behaviour
    new = (values + torch.tensor([0.1, 0.9, -0.9, 0.2, 0.0], dtype=torch.float64)).requires_grad_(True)
    loss, metrics = algorithm.critic_loss(new, values, returns, inputs.weight)
    expected, clipped = 0.0, 0
    for v, old, g, c in zip(new.tolist(), values.tolist(), returns.tolist(), inputs.weight.tolist(), strict=True):
        bounded = min(max(v, old - 0.5), old + 0.5)
        expected += c * max((v - g) ** 2, (bounded - g) ** 2) / 2
        clipped += (bounded - g) ** 2 > (v - g) ** 2
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    found = finish(combine([metrics]))
    assert found["value_loss"] == pytest.approx(expected / float(inputs.weight.sum()), rel=1e-9)
    assert found["value_clip_fraction"] == clipped / 5
    with pytest.raises(ValueError, match="no critic"):
        VARIANTS["grpo"].critic_loss(new, values, returns, inputs.weight)


def test_masked_samples_have_no_gradient() -> None:
    batch = full_batch(0, equal_group=False)
    found = VARIANTS["masked"].has_gradient(batch, VARIANTS["masked"].advantages(batch))
    assert found.tolist() == (~batch.truncated).tolist()


def test_groups_that_dynamic_sampling_could_not_replace_do_not_count() -> None:
    batch, algorithm = full_batch(2), Algorithm(resolve("dapo", {}), longest=9)
    advantages, every = algorithm.advantages(batch), np.arange(len(batch))
    found = algorithm.coefficients(batch, advantages, every)
    kept = np.flatnonzero(batch.group != 1)
    assert found[batch.group[batch.sequence_of] == 1].max() == 0
    np.testing.assert_array_equal(found, algorithm.coefficients(batch, advantages, kept))
    assert found.sum() == pytest.approx(1.0)
    assert not algorithm.has_gradient(batch, advantages)[batch.group == 1].any()
    alone = algorithm.coefficients(batch, advantages, np.flatnonzero(batch.group == 1))
    assert not alone.any()
