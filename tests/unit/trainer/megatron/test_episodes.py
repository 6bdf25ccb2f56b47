"""Episodes of several turns and trajectories, from their records to the loss, compared with loops over the sampled tokens alone."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polyreme.config.recipes.presets import PRESETS, resolve
from polyreme.experience.record_checks import check_group
from polyreme.experience.record_codec import TrainedSamples
from polyreme.experience.records import GroupRecord
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import Advantages, TokenBatch
from polyreme_trainer.algorithms.metrics import combine, finish
from polyreme_trainer.algorithms.state import AlgorithmState
from polyreme_trainer.megatron.batches.batch import IGNORE, Sequences, pack
from polyreme_trainer.megatron.batches.samples import collect
from polyreme_trainer.megatron.training.iteration import Iteration, episodes_of, fresh_sequences
from polyreme_trainer.megatron.training.losses import IterationLosses
from polyreme_trainer.megatron.training.roles import everything
from polyreme_trainer.megatron.training.step import step_means, trained_samples
from support.episodes import VOCABULARY, branched, episode_group, plain_episodes, single_group, with_turns

CPU = torch.device("cpu")
LONGEST = 16
ALGORITHMS = {
    **{name: Algorithm(recipe, LONGEST) for name, recipe in PRESETS.items()},
    "turn_norm": Algorithm(resolve("grpo", {"advantage": {"kind": "turn_norm", "gamma": 0.4}}), LONGEST),
    "corrected": Algorithm(resolve("grpo", {"correction": [{"kind": "sequence_tis"}, {"kind": "veto", "low": 0.3}]}), LONGEST),
    "vapo": Algorithm(resolve("ppo", {"advantage": {"lam": {"alpha": 0.5}, "bootstrap_truncated": True}}), LONGEST),
    "shaped": Algorithm(
        resolve("dapo", {"shaping": {"normalise": True, "truncation_mask": True, "repetition": {"ngram": 2, "factor": 0.5}}}),
        LONGEST,
    ),
}


def gathered(algorithm: Algorithm, groups: Sequence[GroupRecord]) -> tuple[Sequences, TokenBatch]:
    """The groups with every input that the algorithm needs: random numbers that depend on a token's id and number among the trained ones."""
    for group in groups:
        check_group(group)
    sequences, tokens = collect(groups, {"a": 0.5, "b": 1.0} if algorithm.needs.parts else None, algorithm.needs.greedy)
    assert tokens.ids is not None

    def near(seed: int, scale: float) -> np.ndarray:
        noise = np.random.default_rng(seed).normal(0, scale, int(tokens.trained.sum()))
        result = np.full(tokens.tokens, np.nan, dtype=np.float32)
        result[tokens.trained] = tokens.behaviour[tokens.trained] + noise
        return result

    return sequences, replace(
        tokens,
        old=near(1, 0.1),
        reference=near(2, 0.3),
        teacher=near(3, 0.3),
        values=near(4, 1.0),
        final_values=np.random.default_rng(5).normal(size=len(tokens)).astype(np.float32),
    )


def greedy_last(group: GroupRecord) -> GroupRecord:
    """The group with its last episode as a greedy baseline."""
    last = group.episode_of[-1]
    blank = [
        replace(sample, loss_mask=np.zeros(len(sample), np.uint8)) if episode == last else sample
        for sample, episode in zip(group.samples, group.episode_of, strict=True)
    ]
    return replace(group, samples=blank)


def prepared(algorithm: Algorithm, groups: Sequence[GroupRecord]) -> list[GroupRecord]:
    return [greedy_last(group) for group in groups] if algorithm.needs.greedy else list(groups)


def step_on(
    algorithm: Algorithm, sequences: Sequences, tokens: TokenBatch
) -> tuple[Advantages, float, np.ndarray, dict[str, float], TrainedSamples]:
    """Advantages, loss, gradient by token id and metrics of one optimizer step of a model with one log-probability per token id."""
    every = np.arange(len(sequences))
    advantages = algorithm.advantages(tokens)
    batch = Iteration(2, sequences, tokens, [every], AlgorithmState(), 1e-3)
    loss = IterationLosses(batch, algorithm, tokens, advantages).policy(every)
    table = torch.linspace(-2.0, -0.5, VOCABULARY, dtype=torch.float64, requires_grad=True)
    packed = pack(sequences, everything(sequences), CPU)
    output: Any = table[packed.targets[packed.targets != IGNORE]]
    value, metrics = loss(packed, output)
    (gradient,) = torch.autograd.grad(value, table)
    found = finish(step_means(combine([metrics]), steps=1))
    return advantages, value.item(), gradient.numpy(), found, trained_samples(batch, advantages, loss.weight)


def test_the_records_advantages_are_those_of_the_sampled_tokens() -> None:
    """The environment's tokens between the turns have none, and a token that is not trained on has 0."""
    groups = [branched(episode_group(0, index, masked=0.2)) for index in range(3)]
    advantages, *_, used = step_on(ALGORITHMS["turn_norm"], *gathered(ALGORITHMS["turn_norm"], groups))
    samples = [sample for group in groups for sample in group.samples]
    assert any(sample.sampled_tokens < len(sample) for sample in samples)
    written = used.advantages
    assert written.shape == (sum(sample.sampled_tokens for sample in samples),)
    trained = np.concatenate([sample.loss_mask[turn.start : turn.end] for sample in samples for turn in sample.turns]) == 1
    np.testing.assert_array_equal(written[trained], advantages.advantages[gathered_mask(groups)])
    assert not written[~trained].any()


def gathered_mask(groups: Sequence[GroupRecord]) -> np.ndarray:
    return gathered(ALGORITHMS["turn_norm"], groups)[1].trained


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "turn_norm"])
def test_a_response_that_is_cut_into_turns_has_the_same_loss(name: str) -> None:
    algorithm = ALGORITHMS[name]
    whole = prepared(algorithm, [single_group(0, index, masked=0.2) for index in range(3)])
    (one, loss, gradient, metrics, _), (other, cut_loss, cut_gradient, cut_metrics, _) = (
        step_on(algorithm, *gathered(algorithm, groups)) for groups in (whole, [with_turns(group, 3) for group in whole])
    )
    np.testing.assert_array_equal(one.advantages, other.advantages)
    np.testing.assert_array_equal(one.weight, other.weight)
    if one.returns is not None and other.returns is not None:
        np.testing.assert_array_equal(one.returns, other.returns)
    assert (one.metrics, one.state, metrics, loss) == (other.metrics, other.state, cut_metrics, cut_loss)
    np.testing.assert_array_equal(gradient, cut_gradient)
    assert np.abs(gradient).max() > 0


MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def plain_loss(table: torch.Tensor, groups: Sequence[GroupRecord], mode: str, ratio: str) -> torch.Tensor:
    """GRPO's loss around the sampling policy, as a loop over episodes, trajectories and tokens."""
    episodes = plain_episodes(groups)
    sums = []
    for episode in episodes:
        scores = [other.score for other in episodes if other.group == episode.group]
        mean = sum(scores) / len(scores)
        std = math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
        advantage, total = (episode.score - mean) / (std + 1e-6), table.new_zeros(())
        for number in {token.trajectory for token in episode.tokens}:
            mine = [token for token in episode.tokens if token.trajectory == number]
            log_ratios = [table[token.id] - token.behaviour for token in mine]
            if ratio == "sequence":
                center = sum(each.detach() for each in log_ratios) / len(log_ratios)
                log_ratios = [center + each - each.detach() for each in log_ratios]
            for log_ratio in log_ratios:
                r = log_ratio.exp()
                total = total + torch.maximum(-advantage * r, -advantage * r.clamp(0.8, 1.2))
        if episode.tokens:  # one that is masked as a whole does not count
            sums.append((total, len(episode.tokens)))
    if mode == "token-mean":
        return torch.stack([total for total, _ in sums]).sum() / sum(count for _, count in sums)
    divisors = {"seq-mean-token-mean": None, "seq-mean-token-sum": 1, "seq-mean-token-sum-norm": LONGEST}
    return torch.stack([total / (divisors[mode] or count) for total, count in sums]).mean()


@pytest.mark.parametrize(("mode", "ratio"), [*((mode, "token") for mode in MODES), ("seq-mean-token-mean", "sequence")])
@pytest.mark.parametrize("branches", [False, True], ids=["one trajectory", "branches"])
def test_the_loss_is_that_of_a_loop_over_the_sampled_tokens(mode: str, ratio: str, branches: bool) -> None:
    recipe = resolve(
        "grpo", {"kl": None, "aggregation": mode, "anchor": "behaviour", "loss": {"low": 0.2, "high": 0.2, "ratio": ratio}}
    )
    groups = [episode_group(2, index, masked=0.1) for index in range(3)]
    if branches:
        groups = [branched(group) for group in groups]
        assert sum(len(group.samples) for group in groups) > 12
    _, loss, gradient, _, _ = step_on(Algorithm(recipe, LONGEST), *collect(groups))
    table = torch.linspace(-2.0, -0.5, VOCABULARY, dtype=torch.float64, requires_grad=True)
    expected = plain_loss(table, groups, mode, ratio)
    (expected_gradient,) = torch.autograd.grad(expected, table)
    assert loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient.numpy(), rtol=1e-5, atol=1e-6)
    assert np.abs(gradient).max() > 1e-3


PER_TRAJECTORY = ("gspo", "corrected")
"""They have one ratio, or one weight, per trajectory, so their loss depends on where an episode branches. Its advantages do not."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_episode_counts_once_however_many_trajectories_it_has(name: str) -> None:
    """Two trajectories, of which the second one begins with the first, have the same sampled tokens as a single one."""
    algorithm = ALGORITHMS[name]
    whole = prepared(algorithm, [episode_group(4, index, masked=0.1) for index in range(3)])
    (sequences, tokens), (cut_sequences, cut_tokens) = (
        gathered(algorithm, groups) for groups in (whole, [branched(group) for group in whole])
    )
    assert (len(tokens), len(sequences)) == (len(cut_tokens), 12) and len(cut_sequences) > 12
    one, loss, gradient, metrics, _ = step_on(algorithm, sequences, tokens)
    other, cut_loss, cut_gradient, cut_metrics, _ = step_on(algorithm, cut_sequences, cut_tokens)
    np.testing.assert_array_equal(one.advantages[tokens.trained], other.advantages[cut_tokens.trained])
    assert one.metrics == other.metrics and one.state == other.state
    if name not in PER_TRAJECTORY:
        assert cut_loss == pytest.approx(loss, rel=1e-9, abs=1e-12) and cut_metrics == pytest.approx(metrics)
        np.testing.assert_allclose(cut_gradient, gradient, rtol=1e-9, atol=1e-12)


def test_the_critic_s_loss_has_each_token_s_own_numbers() -> None:
    algorithm = ALGORITHMS["vapo"]
    sequences, tokens = gathered(algorithm, [branched(episode_group(4, masked=0.1))])
    advantages, every = algorithm.advantages(tokens), np.arange(len(sequences))
    batch = Iteration(2, sequences, tokens, [every], AlgorithmState(), 1e-3)
    packed = pack(sequences, everything(sequences)[::-1], CPU)
    new = torch.linspace(-1.0, 1.0, len(packed.tokens))
    loss, _ = IterationLosses(batch, algorithm, tokens, advantages).critic(every)(packed, new)
    assert tokens.values is not None and advantages.returns is not None
    old, target = tokens.values[packed.tokens], advantages.returns[packed.tokens]
    bounded = np.clip(new.numpy(), old - 0.5, old + 0.5)
    expected = np.maximum((new.numpy() - target) ** 2, (bounded - target) ** 2).mean() / 2
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_an_episode_is_overlong_only_beyond_all_its_contexts() -> None:
    """Its trajectories have a context each, and its turns in common."""
    whole = episode_group(4)
    cut = branched(whole)
    longest = 1 + max(sample.sampled_tokens for sample in cut.samples)
    recipe = resolve("dapo", {"shaping": {"overlong": {"buffer": 0.01}}})

    def penalty(group: GroupRecord, most: int) -> float:
        metrics = Algorithm(recipe, longest, most=most).advantages(collect([group])[1]).metrics
        return metrics["reward"][0] - metrics["score"][0]

    assert penalty(whole, 2 * longest) <= -1 and penalty(cut, 2 * longest) == 0
    assert penalty(cut, longest) == penalty(whole, longest) <= -1


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.floats(0, 0.9), st.booleans())
def test_every_preset_is_finite_and_leaves_the_environment_alone(name: str, seed: int, masked: float, branches: bool) -> None:
    """The environment's tokens have no old, reference, teacher's or critic's number here."""
    algorithm = ALGORITHMS[name]
    groups = prepared(algorithm, [episode_group(seed, index, masked=masked) for index in range(2)])
    groups = [branched(group) for group in groups] if branches else groups
    sequences, tokens = gathered(algorithm, groups)
    assume(tokens.trained.any())
    advantages, loss, gradient, metrics, used = step_on(algorithm, sequences, tokens)
    outside = ~tokens.trained
    assert np.isfinite(advantages.advantages).all() and math.isfinite(loss) and np.isfinite(gradient).all()
    assert all(math.isfinite(value) for value in metrics.values())
    assert (advantages.advantages[outside] == 0).all()
    assert (algorithm.coefficients(tokens, advantages, np.arange(len(tokens)))[outside] == 0).all()
    if advantages.returns is not None:
        assert (advantages.returns[outside] == 0).all()
        assert (algorithm.critic_coefficients(tokens, np.arange(len(tokens)))[outside] == 0).all()
    samples = [sample for group in groups for sample in group.samples]
    lengths = [sample.sampled_tokens for sample in samples]
    for sample, fields in zip(samples, used.fields(lengths), strict=True):
        trained = np.concatenate([sample.loss_mask[turn.start : turn.end] for turn in sample.turns]) == 1
        recorded = np.broadcast_to(fields["advantage"], sample.sampled_tokens)
        assert (recorded[~trained] == 0).all()


@pytest.mark.parametrize("branches", [False, True], ids=["one trajectory", "branches"])
def test_gae_takes_the_rewards_of_turns_from_sampled_token_to_sampled_token(branches: bool) -> None:
    """The value after a turn's last token is that before the next sampled one, behind the environment's answer."""
    gamma, lam = 0.9, 0.8
    settings = {"gamma": gamma, "lam": lam, "whiten": False, "bootstrap_truncated": True}
    algorithm = Algorithm(resolve("ppo", {"advantage": settings, "kl": None}), LONGEST)
    groups = [episode_group(5, index, masked=0.2) for index in range(3)]
    groups = [branched(group) for group in groups] if branches else groups
    _, tokens = gathered(algorithm, groups)
    found = algorithm.advantages(tokens)
    assert tokens.values is not None and tokens.final_values is not None and found.returns is not None
    assert tokens.truncated.any() and not tokens.truncated.all()
    for number, episode in enumerate(plain_episodes(groups)):
        where = [t for t in range(tokens.offsets[number], tokens.offsets[number + 1]) if tokens.mask[t]]
        advantage, after = 0.0, float(tokens.final_values[number]) if tokens.truncated[number] else 0.0
        for t, token in reversed(list(zip(where, episode.tokens, strict=True))):
            value = float(tokens.values[t])
            advantage = token.reward + gamma * after - value + gamma * lam * advantage
            after = value
            assert found.advantages[t] == pytest.approx(advantage, rel=1e-5, abs=1e-5)
            assert found.returns[t] == pytest.approx(advantage + value, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("branches", [False, True], ids=["one trajectory", "branches"])
def test_returns_take_the_rewards_of_turns(branches: bool) -> None:
    algorithm = Algorithm(resolve("reinforce_pp", {"advantage": {"gamma": 0.7, "whiten": False}, "kl": None}), LONGEST)
    groups = [episode_group(6, index) for index in range(3)]
    groups = [branched(group) for group in groups] if branches else groups
    tokens = collect(groups)[1]
    found = algorithm.advantages(tokens).advantages[tokens.trained].tolist()
    expected = []
    for episode in plain_episodes(groups):
        to_come, mine = 0.0, []
        for token in reversed(episode.tokens):
            to_come = token.reward + 0.7 * to_come
            mine.append(to_come)
        expected += mine[::-1]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_turns_are_compared_with_all_turns_of_the_group() -> None:
    """A turn's return is its rewards plus the discounted return of the next turn."""
    algorithm = Algorithm(resolve("grpo", {"advantage": {"kind": "turn_norm", "gamma": 0.4, "std_floor": 0.1}}), LONGEST)
    groups = [branched(episode_group(7, index, masked=0.3)) for index in range(3)]
    tokens = collect(groups)[1]
    episodes = plain_episodes(groups)
    returns: dict[tuple[int, int], float] = {}
    for number, episode in enumerate(episodes):
        to_come = 0.0
        for turn in sorted({token.turn for token in episode.tokens}, reverse=True):
            to_come = sum(token.reward for token in episode.tokens if token.turn == turn) + 0.4 * to_come
            returns[number, turn] = to_come
    expected = []
    for number, episode in enumerate(episodes):
        peers = [value for (other, _), value in returns.items() if episodes[other].group == episode.group]
        mean = sum(peers) / len(peers)
        std = math.sqrt(sum((value - mean) ** 2 for value in peers) / (len(peers) - 1)) + 0.1
        expected += [(returns[number, token.turn] - mean) / std for token in episode.tokens]
    found = algorithm.advantages(tokens).advantages
    assert found[tokens.trained].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert len(set(expected)) > len(episodes)


def test_single_responses_are_compared_as_by_group_norm() -> None:
    kinds = ({"kind": kind, "std_floor": 0.1} for kind in ("turn_norm", "group_norm"))
    turns, plain = (Algorithm(resolve("grpo", {"advantage": kind}), LONGEST) for kind in kinds)
    tokens = collect([single_group(8, index) for index in range(3)])[1]
    np.testing.assert_allclose(turns.advantages(tokens).advantages, plain.advantages(tokens).advantages, rtol=1e-6)


def test_a_turn_without_another_one_has_no_advantage() -> None:
    """All other episodes of the group are masked."""
    group = episode_group(9, turns=1)
    blank = [replace(sample, loss_mask=np.zeros(len(sample), np.uint8)) for sample in group.samples[1:]]
    tokens = collect([replace(group, samples=[group.samples[0], *blank])])[1]
    assert (ALGORITHMS["turn_norm"].advantages(tokens).advantages == 0).all()


def test_trajectories_of_an_episode_stay_apart_for_the_models() -> None:
    """A trajectory that another version sampled is not fresh, and the episode's other one is."""
    group = branched(episode_group(4, turns=4))
    pairs = np.flatnonzero(np.bincount(group.episode_of) == 2)
    first = group.episode_of.index(int(pairs[0]))
    stale = replace(group.samples[first], spans=[(0, start, end) for _, start, end in group.samples[first].spans])
    sequences, tokens = collect([replace(group, samples=[*group.samples[:first], stale, *group.samples[first + 1 :]])])
    batch = Iteration(2, sequences, tokens, [np.arange(len(sequences))], AlgorithmState(), 1e-3)
    assert fresh_sequences(batch).tolist() == [k for k in range(len(sequences)) if k != first]
    assert episodes_of(sequences, tokens).tolist() == group.episode_of
