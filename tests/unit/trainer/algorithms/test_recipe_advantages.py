"""Advantages of whole recipes compared with loops over Python numbers: rewards, baselines, state, and required inputs."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polyreme.config.recipes.presets import resolve
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import TokenBatch
from polyreme_trainer.algorithms.state import AlgorithmState, Moments
from support.token_batches import full_batch, token_batch, with_greedy

LONGEST = 10


def algorithm_of(preset: str, **overrides: object) -> Algorithm:
    return Algorithm(resolve(preset, overrides), LONGEST)


def test_ppo_rewards_are_the_score_minus_the_kl() -> None:
    """With gamma = lam = 1, values of 0 and no whitening, the advantage of a token is its reward-to-go."""
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


def test_a_kl_target_per_token_is_that_of_verl_and_openrlhf() -> None:
    """They measure the mean over responses of the mean over a response's tokens."""
    controller = {"target": 0.15, "horizon": 120, "unit": "token"}
    batch = full_batch(0)
    assert batch.old is not None and batch.reference is not None
    kl = (batch.old - batch.reference) * batch.mask
    parts = [slice(batch.offsets[i], batch.offsets[i + 1]) for i in range(12)]
    measured = sum(float(kl[part].sum() / batch.mask[part].sum()) for part in parts) / 12
    controller["target"] = measured / 1.1  # an error of 10%, inside the controller's bounds
    algorithm = Algorithm(resolve("reinforce_pp", {"kl": {"coef": 0.1, "estimator": "k1", "adaptive": controller}}), LONGEST)
    assert algorithm.advantages(batch).state.kl_coef == pytest.approx(0.1 * (1 + 0.1 * 12 / 120), rel=1e-6)


def test_a_fixed_coefficient_is_the_recipes() -> None:
    batch, algorithm = full_batch(0), algorithm_of("reinforce_pp")
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
    assert found.metrics["reward"] == pytest.approx((sum(rewards), 12.0))
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
    found = algorithm_of("reinforce_pp_baseline").advantages(batch).advantages
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
    found = algorithm_of("remax").advantages(batch)
    for t in np.flatnonzero(batch.trained):
        i = batch.sequence_of[t]
        greedy = batch.score[(batch.group == batch.group[i]) & batch.greedy]
        assert found.advantages[t] == pytest.approx(batch.score[i] - greedy[0], rel=1e-5, abs=1e-6)
    assert found.metrics["score"][1] == 9.0
    with pytest.raises(ValueError, match="greedy"):
        algorithm_of("grpo").advantages(batch)


def test_the_greedy_answer_is_shaped_as_the_others_are() -> None:
    """An answer equal to it has no advantage, however long it is and however often it repeats itself."""
    batch = TokenBatch(
        offsets=np.array([0, 9, 18]),
        mask=np.repeat([0.0, 1.0], 9).astype(np.float32),
        behaviour=np.full(18, -1.0, np.float32),
        version=np.zeros(18, np.int32),
        group=np.zeros(2, np.int64),
        score=np.full(2, 0.5),
        truncated=np.zeros(2, bool),
        greedy=np.array([True, False]),
        ids=np.tile([1, 2, 1], 6),
    )
    found = algorithm_of("remax", shaping={"overlong": {}, "repetition": {"ngram": 2, "factor": 0.5}}).advantages(batch)
    assert not found.advantages.any() and found.metrics["reward"][0] < -0.1


@pytest.mark.parametrize("with_old", [False, True])
def test_a_teacher_that_is_the_student_teaches_exactly_nothing(with_old: bool) -> None:
    recipe = resolve("grpo", {"advantage": {"kind": "zero"}, "kl": None, "teacher_coef": 1.0})
    batch = full_batch(0) if with_old else full_batch(0, old=None)
    student = batch.policy
    assert (Algorithm(recipe, LONGEST).advantages(replace(batch, teacher=student)).advantages == 0).all()
    found = Algorithm(recipe, LONGEST).advantages(batch).advantages
    assert batch.teacher is not None
    np.testing.assert_allclose(found, np.where(batch.trained, batch.teacher - student, 0), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "overrides", "field"),
    [("ppo", {}, "values"), ("ppo", {}, "reference"), ("gdpo", {}, "parts"), ("dr_grpo", {"teacher_coef": 1.0}, "teacher")],
)
def test_what_a_recipe_needs_must_be_there(name: str, overrides: dict[str, object], field: str) -> None:
    absent: dict[str, Any] = {field: None} if field != "parts" else {"parts": None, "part_names": (), "part_weights": ()}
    with pytest.raises(ValueError, match=field):
        algorithm_of(name, **overrides).advantages(full_batch(0, **absent))


def test_needs_follow_the_recipe() -> None:
    def needs(name: str, **overrides: object) -> set[str]:
        found = algorithm_of(name, **overrides).needs
        return {field for field in found.__dataclass_fields__ if getattr(found, field)}

    assert needs("dapo") == set()
    assert needs("grpo") == {"reference"}
    assert needs("ppo") == {"reference", "critic", "old"}
    assert needs("ppo", kl=None, advantage={"bootstrap_truncated": True}) == {"critic", "final_values"}
    assert needs("gdpo", entropy_coef=0.1) == {"parts", "entropy"}
    assert needs("remax", shaping={"repetition": {"ngram": 2, "factor": 1.0}}) == {"greedy", "ids"}
    assert needs("grpo", teacher_coef=1.0, kl=None) == {"teacher", "old"}, "the KL to the teacher is that of the trained policy"


def test_policy_and_critic_have_a_lambda_each() -> None:
    """VAPO: the lambda of the advantages follows the length of a response, and that of the returns is the critic's."""
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


def test_the_explained_variance_of_returns() -> None:
    batch = full_batch(0)
    found = algorithm_of("ppo").advantages(batch)
    assert found.returns is not None and batch.values is not None
    returns, values = found.returns[batch.trained].astype(float), batch.values[batch.trained].astype(float)
    mean, error = returns.mean(), returns - values
    expected = 1 - ((error - error.mean()) ** 2).sum() / ((returns - mean) ** 2).sum()
    assert found.metrics["explained_variance"] == pytest.approx((expected, 1.0), rel=1e-5)
