"""Whole recipes: advantages of an iteration and losses of micro-batches, and what must not change them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from polyreme.config.presets import PRESETS, resolve
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import Advantages, TokenBatch
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.metrics import combine, finish
from polyreme_trainer.algorithms.state import AlgorithmState, Moments
from support.token_batches import loss_inputs, token_batch

LONGEST = 10


def full_batch(seed: int, equal_group: bool = True, **fields: object) -> TokenBatch:
    """With everything that any recipe needs; group 1 has equal scores."""
    batch = token_batch(seed)
    random = np.random.default_rng(seed + 1)
    score = np.where((batch.group == 1) & equal_group, 0.5, batch.score)
    parts = np.stack([score, 0.2 * score], 1)

    def near(scale: float) -> np.ndarray:
        return (batch.behaviour + random.normal(0, scale, batch.tokens)).astype(np.float32)

    made = {
        "score": score,
        "parts": parts,
        "part_names": ("a", "b"),
        "part_weights": (0.5, 1.0),
        "old": near(0.1),
        "reference": near(0.3),
        "teacher": near(0.3),
        "values": random.normal(size=batch.tokens).astype(np.float32),
        "final_values": random.normal(size=len(batch)).astype(np.float32),
        "ids": random.integers(0, 5, batch.tokens),
        "truncated": random.random(len(batch)) < 0.3,
    }
    return replace(batch, **{**made, **fields})  # type: ignore[arg-type]


def with_greedy(batch: TokenBatch) -> TokenBatch:
    """The first sample of every group as a greedy one."""
    greedy = np.zeros(len(batch), dtype=bool)
    greedy[np.unique(batch.group, return_index=True)[1]] = True
    return replace(batch, greedy=greedy, mask=np.where(greedy[batch.sequence_of], 0, batch.mask).astype(np.float32))


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
        value.backward()  # type: ignore[no-untyped-call]
        loss += value.item()
        metrics.append(measured)
    assert logprobs.grad is not None
    return loss, logprobs.grad.numpy(), finish(combine(metrics))


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


@pytest.mark.parametrize("name", sorted(set(GROUPED) - {"dapo", "gmpo", "masked", "distilled"}))
def test_a_group_of_equal_scores_has_exactly_no_gradient(name: str) -> None:
    """Those left out have something beside the score that differs within the group: the length, the teacher."""
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
    loss, metrics = algorithm.critic_loss(replace(inputs, values=values, returns=returns, new_values=new))
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
        VARIANTS["grpo"].critic_loss(inputs)


def test_ppo_rewards_are_the_score_minus_the_kl() -> None:
    """gamma = lam = 1, values 0, no whitening: the advantage of a token is what is still to come."""
    recipe = resolve("ppo", {"advantage": {"lam": 1.0, "whiten": False}, "kl": {"coef": 0.3}})
    batch = full_batch(0, values=np.zeros(token_batch(0).tokens, dtype=np.float32))
    found = Algorithm(recipe, LONGEST).advantages(batch)
    assert batch.old is not None and batch.reference is not None and found.returns is not None
    for i in range(len(batch)):
        to_come = batch.score[i]
        for t in reversed(range(batch.offsets[i], batch.offsets[i + 1])):
            if batch.mask[t]:
                to_come -= 0.3 * (float(batch.old[t]) - float(batch.reference[t]))
                assert found.advantages[t] == pytest.approx(to_come, rel=1e-5, abs=1e-6)
    np.testing.assert_array_equal(found.returns, found.advantages)


def test_returns_are_taken_before_whitening() -> None:
    batch = full_batch(0)
    white, plain = (
        Algorithm(resolve("ppo", {"advantage": {"whiten": whiten}}), LONGEST).advantages(batch) for whiten in (True, False)
    )
    np.testing.assert_array_equal(white.returns, plain.returns)
    trained = white.advantages[batch.trained]
    assert trained.mean() == pytest.approx(0, abs=1e-6) and trained.std() == pytest.approx(1, abs=1e-5)
    assert white.metrics["explained_variance"] == plain.metrics["explained_variance"]


def test_only_truncated_responses_are_bootstrapped() -> None:
    batch = full_batch(0)
    recipe = resolve("ppo", {"advantage": {"whiten": False, "lam": 0.0, "bootstrap_truncated": True}, "kl": None})
    plain = resolve("ppo", {"advantage": {"whiten": False, "lam": 0.0}, "kl": None})
    gained = Algorithm(recipe, LONGEST).advantages(batch).advantages - Algorithm(plain, LONGEST).advantages(batch).advantages
    expected = np.zeros(batch.tokens)
    assert batch.final_values is not None and batch.truncated.any() and not batch.truncated.all()
    for i in np.flatnonzero(batch.truncated):
        last = max(t for t in range(batch.offsets[i], batch.offsets[i + 1]) if batch.mask[t])
        expected[last] = batch.final_values[i]
    np.testing.assert_allclose(gained, expected, atol=1e-6)


def test_the_kl_controller_follows_the_kl_of_a_response() -> None:
    recipe = resolve("reinforce_pp", {"kl": {"coef": 0.1, "adaptive": {"target": 2.0, "horizon": 120}}})
    algorithm, batch = Algorithm(recipe, LONGEST), full_batch(0)
    assert batch.old is not None and batch.reference is not None
    kl = float(((batch.old - batch.reference) * batch.mask).sum()) / 12
    first = algorithm.advantages(batch)
    assert first.metrics["kl_coef"] == (0.1, 1.0)
    expected = 0.1 * (1 + min(max(kl / 2.0 - 1, -0.2), 0.2) * 12 / 120)
    assert first.state.kl_coef == pytest.approx(expected, rel=1e-6)
    second = algorithm.advantages(batch, first.state)
    assert second.metrics["kl_coef"] == (first.state.kl_coef, 1.0)
    assert not np.array_equal(second.advantages, first.advantages)


def test_a_fixed_coefficient_is_the_recipes() -> None:
    batch, algorithm = full_batch(0), VARIANTS["reinforce_pp"]
    found = algorithm.advantages(batch, AlgorithmState(kl_coef=99.0))
    assert found.metrics["kl_coef"] == (0.01, 1.0) and found.state.kl_coef is None


def test_scores_are_shaped_in_order() -> None:
    batch = full_batch(0, truncated=np.arange(12) % 4 == 0)
    shaping = {
        "normalise": True,
        "clip": [-0.5, 0.5],
        "overlong": {"buffer": 0.5, "factor": 2.0},
        "truncation_penalty": 0.25,
        "repetition": {"ngram": 1, "factor": 3.0},
        "truncation_mask": True,
    }
    recipe = resolve("raft", {"shaping": shaping, "advantage": {"threshold": -1.0}})
    found = Algorithm(recipe, LONGEST).advantages(batch, AlgorithmState(scores=Moments(2.0, 0.0, 2.0)))
    seen = [-1.0, 1.0, *batch.score]
    mean = sum(seen) / 14
    std = math.sqrt(sum((x - mean) ** 2 for x in seen) / 13)
    rewards = []
    for i in range(12):
        where = [t for t in range(batch.offsets[i], batch.offsets[i + 1]) if batch.mask[t]]
        assert batch.ids is not None
        ids = [int(batch.ids[t]) for t in where]
        shaped = min(max((batch.score[i] - mean) / std, -0.5), 0.5)
        shaped -= 2.0 * min(max((len(ids) - 5) / 5, 0.0), 1.0) + 0.25 * (i % 4 == 0)
        rewards.append(shaped - 3.0 * (1 - len(set(ids)) / len(ids)))
        assert (found.advantages[where] == float(rewards[-1] > -1.0)).all()
        assert (found.weight[where] == float(i % 4 != 0)).all()
    assert found.metrics["reward"] == (pytest.approx(sum(rewards)), 12.0)
    assert found.metrics["reward_min"][0] == pytest.approx(min(rewards))
    assert found.state.scores.count == 14 and found.state.scores.mean == pytest.approx(mean)


def test_masked_samples_still_count_in_the_divisor() -> None:
    batch = full_batch(0, truncated=np.arange(12) == 0)
    step = np.arange(12)
    kept, masked = (Algorithm(resolve("grpo", {"shaping": {"truncation_mask": mask}}), LONGEST) for mask in (False, True))
    full, part = (
        kept.coefficients(batch, kept.advantages(batch), step),
        masked.coefficients(batch, masked.advantages(batch), step),
    )
    first = batch.sequence_of == 0
    assert (part[first] == 0).all() and (full[first & batch.trained] > 0).all()
    np.testing.assert_array_equal(part[~first], full[~first])
    assert masked.critic_coefficients(batch, step).sum() == pytest.approx(1.0)
    assert masked.advantages(batch).metrics["masked_sample_fraction"] == (1.0, 12.0)


def test_whitened_groups_of_equal_scores_stay_at_zero_and_count() -> None:
    batch = full_batch(0)
    found = VARIANTS["reinforce_pp_baseline"].advantages(batch).advantages
    centred = np.zeros(batch.tokens)
    for t in np.flatnonzero(batch.trained):
        i = batch.sequence_of[t]
        centred[t] = batch.score[i] - batch.score[batch.group == batch.group[i]].mean()
    x = centred[batch.trained]
    white = (x - x.mean()) / math.sqrt(x.var() + 1e-8)
    equal = (batch.group == 1)[batch.sequence_of[batch.trained]]
    np.testing.assert_allclose(found[batch.trained], np.where(equal, 0, white), rtol=1e-5, atol=1e-6)


def test_remax_compares_with_the_greedy_answer() -> None:
    batch = with_greedy(full_batch(0))
    found = VARIANTS["remax"].advantages(batch)
    for t in np.flatnonzero(batch.trained):
        i = batch.sequence_of[t]
        greedy = batch.score[(batch.group == batch.group[i]) & batch.greedy]
        assert found.advantages[t] == pytest.approx(batch.score[i] - greedy[0], rel=1e-5, abs=1e-6)
    assert found.metrics["score"][1] == 9.0
    with pytest.raises(ValueError, match="greedy"):
        VARIANTS["grpo"].advantages(batch)


@pytest.mark.parametrize("with_old", [False, True])
def test_a_teacher_that_is_the_student_teaches_exactly_nothing(with_old: bool) -> None:
    recipe = resolve("grpo", {"advantage": {"kind": "zero"}, "kl": None, "teacher_coef": 1.0})
    batch = full_batch(0) if with_old else full_batch(0, old=None)
    student = batch.policy
    assert (Algorithm(recipe, LONGEST).advantages(replace(batch, teacher=student)).advantages == 0).all()
    found = Algorithm(recipe, LONGEST).advantages(batch).advantages
    assert batch.teacher is not None
    np.testing.assert_allclose(found, np.where(batch.trained, batch.teacher - student, 0), atol=1e-6)


def test_process_rewards_add_to_the_score() -> None:
    batch = full_batch(0)
    process = np.random.default_rng(9).normal(size=batch.tokens).astype(np.float32)
    found = VARIANTS["dr_grpo"].advantages(replace(batch, token_rewards=process))
    sums = np.array([float((process * batch.mask)[a:b].sum()) for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)])
    expected = VARIANTS["dr_grpo"].advantages(replace(batch, score=batch.score + sums))
    np.testing.assert_allclose(found.advantages, expected.advantages, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "field"),
    [("ppo", "values"), ("ppo", "reference"), ("gdpo", "parts"), ("distilled", "teacher")],
)
def test_what_a_recipe_needs_must_be_there(name: str, field: str) -> None:
    absent: dict[str, object] = {field: None} if field != "parts" else {"parts": None, "part_names": (), "part_weights": ()}
    with pytest.raises(ValueError, match=field):
        VARIANTS[name].advantages(full_batch(0, **absent))


def test_needs_follow_the_recipe() -> None:
    def needs(name: str, **overrides: object) -> set[str]:
        found = Algorithm(resolve(name, overrides), LONGEST).needs
        return {field for field in found.__dataclass_fields__ if getattr(found, field)}

    assert needs("dapo") == set()
    assert needs("grpo") == {"reference"}
    assert needs("ppo") == {"reference", "critic", "old"}
    assert needs("ppo", kl=None, advantage={"bootstrap_truncated": True}) == {"critic", "final_values"}
    assert needs("gdpo", entropy_coef=0.1) == {"parts", "entropy"}
    assert needs("remax", shaping={"repetition": {"ngram": 2, "factor": 1.0}}) == {"greedy", "ids"}
    assert needs("grpo", teacher_coef=1.0, kl=None) == {"teacher"}


def test_policy_and_critic_have_a_lambda_each() -> None:
    """VAPO: the advantages' lambda follows the length of a response, that of the returns is the critic's own."""
    batch = full_batch(0)
    overrides = {"whiten": False, "lam": {"alpha": 0.5}, "value_lam": 1.0}
    found = Algorithm(resolve("ppo", {"advantage": overrides, "kl": None}), LONGEST).advantages(batch)
    assert batch.values is not None and found.returns is not None
    for i in range(len(batch)):
        where = [t for t in range(batch.offsets[i], batch.offsets[i + 1]) if batch.mask[t]]
        lam = max(0.0, 1 - 1 / (0.5 * len(where)))
        advantage = 0.0
        for k, t in reversed(list(enumerate(where))):
            last = t == where[-1]
            delta = (batch.score[i] if last else float(batch.values[where[k + 1]])) - float(batch.values[t])
            advantage = delta + lam * advantage
            assert found.advantages[t] == pytest.approx(advantage, rel=1e-5, abs=1e-6)
            assert found.returns[t] == pytest.approx(batch.score[i], rel=1e-5, abs=1e-6)


def test_greedy_scores_do_not_enter_the_running_moments() -> None:
    batch = with_greedy(full_batch(0))
    found = Algorithm(resolve("remax", {"shaping": {"normalise": True}}), LONGEST).advantages(batch)
    assert found.state.scores == Moments().update(batch.score[~batch.greedy])


def test_masked_samples_have_no_gradient() -> None:
    batch = full_batch(0, equal_group=False)
    found = VARIANTS["masked"].has_gradient(batch, VARIANTS["masked"].advantages(batch))
    assert found.tolist() == (~batch.truncated).tolist()


def test_the_explained_variance_of_returns() -> None:
    batch = full_batch(0)
    found = VARIANTS["ppo"].advantages(batch)
    assert found.returns is not None and batch.values is not None
    returns, values = found.returns[batch.trained].astype(float), batch.values[batch.trained].astype(float)
    mean, error = returns.mean(), returns - values
    expected = 1 - ((error - error.mean()) ** 2).sum() / ((returns - mean) ** 2).sum()
    assert found.metrics["explained_variance"] == (pytest.approx(expected, rel=1e-5), 1.0)
