"""Rewards per token through whole recipes, compared with loops over Python numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest

from polyreme.config.recipes.presets import PRESETS, resolve
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import TokenBatch
from polyreme_trainer.algorithms.state import AlgorithmState, Moments
from support.token_batches import full_batch, with_greedy

LONGEST = 10


def process_batch(seed: int = 0) -> TokenBatch:
    """A batch with process rewards. Those of masked tokens count only in the score."""
    batch = full_batch(seed)
    return replace(batch, token_rewards=np.random.default_rng(seed + 7).normal(size=batch.tokens).astype(np.float32))


def naive_rewards(batch: TokenBatch, scores: list[float], std: float = 1.0, kl_coef: float = 0.0) -> list[dict[int, float]]:
    """The reward of each trained token of each sequence: its own, and at the last token also the rest of the score."""
    assert batch.token_rewards is not None and batch.old is not None and batch.reference is not None
    sequences = []
    for i in range(len(batch)):
        where = [t for t in range(batch.offsets[i], batch.offsets[i + 1]) if batch.mask[t]]
        own = {t: float(batch.token_rewards[t]) / std for t in where}
        if where:
            own[where[-1]] += scores[i] - math.fsum(own.values())
        sequences.append({t: r - kl_coef * (float(batch.old[t]) - float(batch.reference[t])) for t, r in own.items()})
    return sequences


def test_gae_uses_rewards_at_their_tokens() -> None:
    batch, gamma, lam = process_batch(), 0.9, 0.8
    recipe = resolve("ppo", {"advantage": {"gamma": gamma, "lam": lam, "whiten": False}, "kl": {"coef": 0.3}})
    found = Algorithm(recipe, LONGEST).advantages(batch)
    assert batch.values is not None and found.returns is not None
    for rewards in naive_rewards(batch, list(batch.score), kl_coef=0.3):
        advantage = value_after = 0.0
        for t in reversed(rewards):
            value = float(batch.values[t])
            advantage = rewards[t] + gamma * value_after - value + gamma * lam * advantage
            value_after = value
            assert found.advantages[t] == pytest.approx(advantage, rel=1e-5, abs=1e-5)
            assert found.returns[t] == pytest.approx(advantage + value, rel=1e-5, abs=1e-5)


def test_returns_to_go_use_rewards_at_their_tokens() -> None:
    batch = process_batch()
    recipe = resolve("reinforce_pp", {"advantage": {"gamma": 0.7, "whiten": False}, "kl": None})
    found = Algorithm(recipe, LONGEST).advantages(batch).advantages
    for rewards in naive_rewards(batch, list(batch.score)):
        to_come = 0.0
        for t in reversed(rewards):
            to_come = rewards[t] + 0.7 * to_come
            assert found[t] == pytest.approx(to_come, rel=1e-5, abs=1e-5)


def test_the_greedy_baseline_is_taken_off_rewards_to_go() -> None:
    batch = with_greedy(process_batch())
    found = Algorithm(resolve("remax", {}), LONGEST).advantages(batch).advantages
    for i, rewards in enumerate(naive_rewards(batch, list(batch.score))):
        baseline = float(batch.score[(batch.group == batch.group[i]) & batch.greedy][0])
        to_come = 0.0
        for t in reversed(rewards):
            to_come += rewards[t]
            assert found[t] == pytest.approx(to_come - baseline, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gdpo", "raft", "reinforce_pp_baseline"])
def test_estimators_of_whole_responses_read_the_score_alone(name: str) -> None:
    batch, algorithm = process_batch(), Algorithm(PRESETS[name], LONGEST)
    found, plain = (algorithm.advantages(each) for each in (batch, replace(batch, token_rewards=None)))
    np.testing.assert_array_equal(found.advantages, plain.advantages)
    assert found.metrics == plain.metrics


@pytest.mark.parametrize(
    "shaping",
    [
        {"clip": [-0.3, 0.3]},
        {"normalise": True},
        {"normalise": True, "clip": [-0.5, 0.5], "overlong": {"buffer": 0.5}, "truncation_penalty": 0.25},
    ],
)
def test_shaped_rewards_add_up_to_the_shaped_score(shaping: dict[str, object]) -> None:
    """Normalisation divides rewards per token and the score by the same number. All other shaping is at the last token."""
    batch = process_batch()
    overrides = {"advantage": {"gamma": 1.0, "whiten": False}, "kl": None, "shaping": shaping}
    algorithm, state = Algorithm(resolve("reinforce_pp", overrides), LONGEST), AlgorithmState(scores=Moments(2.0, 0.0, 8.0))
    found, plain = algorithm.advantages(batch, state), algorithm.advantages(replace(batch, token_rewards=None), state)
    std = plain.state.scores.std if "normalise" in shaping else 1.0
    for i in range(len(batch)):
        where = [t for t in range(batch.offsets[i], batch.offsets[i + 1]) if batch.mask[t]]
        scores = [0.0] * len(batch)
        scores[i] = float(plain.advantages[where[0]])  # without process rewards, the shaped score is at the last token
        rewards, to_come = naive_rewards(batch, scores, std)[i], 0.0
        for t in reversed(where):
            to_come += rewards[t]
            assert found.advantages[t] == pytest.approx(to_come, rel=1e-5, abs=1e-5)
        assert found.advantages[where[0]] == pytest.approx(scores[i], rel=1e-5, abs=1e-5)
    assert found.metrics["reward"] == pytest.approx(plain.metrics["reward"])


def test_groups_of_equal_scores_may_differ_in_their_tokens() -> None:
    """Rewards-to-go of single tokens give a gradient even if the scores of the group are equal."""
    batch = replace(process_batch(), score=np.ones(12))
    found = Algorithm(resolve("reinforce_pp", {"kl": None}), LONGEST).advantages(batch).advantages
    assert found[batch.trained].std() > 0.1
    assert (Algorithm(resolve("grpo", {"kl": None}), LONGEST).advantages(batch).advantages == 0).all()
