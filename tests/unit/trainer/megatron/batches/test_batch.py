"""The planner keeps every sequence, the budget and the weights of tokens for any lengths and layout."""

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.experience.records import GroupRecord, SampleRecord
from polyreme_trainer.megatron.batches.batch import (
    IGNORE,
    Cost,
    Sequences,
    cost_of,
    pack,
    plan_micro_batches,
    plan_ranks,
    share,
    split_steps,
    supervised,
)
from polyreme_trainer.megatron.batches.samples import collect
from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from support.published import CONFIGS

lengths_of = st.lists(st.integers(2, 60), min_size=0, max_size=40).map(lambda x: np.array(x, dtype=np.int64))


@given(lengths_of, st.integers(1, 400))
def test_every_sequence_once_within_the_budget(lengths: np.ndarray, budget: int) -> None:
    plan = plan_micro_batches(lengths, np.arange(len(lengths)), budget)
    assert sorted(itertools.chain.from_iterable(part.tolist() for part in plan)) == list(range(len(lengths)))
    for part in plan:
        assert len(part) == 1 or lengths[part].sum() <= budget
    in_order = [length for part in plan for length in lengths[part].tolist()]
    assert in_order == sorted(in_order, reverse=True)


@settings(deadline=None)
@given(st.lists(st.integers(2, 20), min_size=1, max_size=8), st.integers(1, 80))
def test_no_cut_of_the_sorted_sequences_has_fewer_parts_or_a_smaller_largest_one(values: list[int], budget: int) -> None:
    lengths = np.array(sorted(values, reverse=True), dtype=np.int64)
    possible = []
    for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(lengths)]
        parts = [lengths[a:b] for a, b in itertools.pairwise(edges)]
        if all(len(part) == 1 or part.sum() <= budget for part in parts):
            possible.append((len(parts), max(part.sum() for part in parts)))
    plan = plan_micro_batches(lengths, np.arange(len(lengths)), budget)
    assert (len(plan), max(lengths[part].sum() for part in plan)) == min(possible)


@given(lengths_of, st.integers(1, 5))
def test_the_shares_of_the_ranks_are_a_balanced_partition(lengths: np.ndarray, ranks: int) -> None:
    indices = np.arange(len(lengths))
    shares = share(lengths.astype(np.float64), indices, ranks)
    assert sorted(itertools.chain.from_iterable(s.tolist() for s in shares)) == indices.tolist()
    totals = [int(lengths[s].sum()) for s in shares]
    assert max(totals) - min(totals) <= (lengths.max() if len(lengths) else 0)


@given(lengths_of, st.integers(1, 5), st.integers(1, 400), st.builds(Cost, st.floats(0, 1)), st.integers(1, 4))
def test_every_rank_runs_as_many_micro_batches_and_every_sequence_once(
    lengths: np.ndarray, ranks: int, budget: int, cost: Cost, group: int
) -> None:
    indices = np.arange(len(lengths))[::-1]
    plans = plan_ranks(lengths, cost.of(lengths), indices, ranks, budget, group)
    assert len(plans) == ranks
    (count,) = {len(plan) for plan in plans}
    assert count % group == 0
    assert count < group + max(map(len, plan_ranks(lengths, cost.of(lengths), indices, ranks, budget)))
    parts = [part for plan in plans for part in plan]
    assert sorted(itertools.chain.from_iterable(part.tolist() for part in parts)) == sorted(indices.tolist())
    for part in parts:
        assert len(part) <= 1 or lengths[part].sum() <= budget
    for mine, plan in zip(share(cost.of(lengths), indices, ranks), plans, strict=True):
        assert sorted(mine.tolist()) == sorted(itertools.chain.from_iterable(part.tolist() for part in plan))
        assert len(mine) < len(plan) or all(len(part) for part in plan)  # empty only if there are too few sequences
    again = plan_ranks(lengths.copy(), cost.of(lengths), indices.copy(), ranks, budget, group)
    assert all((a == b).all() for ours, theirs in zip(plans, again, strict=True) for a, b in zip(ours, theirs, strict=True))


def test_ranks_share_what_attention_costs_too() -> None:
    """Balanced by tokens, the rank with the long sequence would work longest: its attention costs as much as another 8,000 tokens."""
    lengths = np.array([8000, *[500] * 32])
    cost = Cost(attention=1 / 8000)
    alone, others = share(cost.of(lengths), np.arange(len(lengths)), 2)
    by_tokens, _ = share(lengths.astype(np.float64), np.arange(len(lengths)), 2)
    assert (len(by_tokens), len(alone), len(others)) == (9, 2, 31)
    work = [float(cost.of(lengths[each]).sum()) for each in (alone, others)]
    assert max(work) < 1.05 * min(work) and float(cost.of(lengths[by_tokens]).sum()) > 1.2 * min(work)


def test_the_cost_of_a_published_model() -> None:
    """494 million weights, and 24 layers whose queries have 896 features: at 2,048 tokens, attention costs 9% of the weights' products."""
    cost = cost_of(read_architecture(HfConfig(CONFIGS["Qwen2.5-0.5B-Instruct"], "config.json")))
    assert cost.attention * 2048 == pytest.approx(24 * 896 * 2048 / 494e6, rel=1e-3)
    assert cost.of(np.array([2048]))[0] == pytest.approx(2048 * 1.089, rel=1e-3)


def test_a_micro_batch_without_sequences_trains_nothing() -> None:
    sequences, _ = collect([group(0, [5, 6], [[8]])])
    batch = pack(sequences, np.array([], dtype=np.int64), torch.device("cpu"))
    assert (batch.ids.ids.tolist(), batch.ids.lengths) == ([0], (1,))
    assert batch.targets.tolist() == [IGNORE]
    assert (len(batch.tokens), len(batch.sequence), batch.padding) == (0, 0, 1)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9))
def test_steps_take_whole_groups_once_per_epoch(groups: int, samples: int, steps: int, epochs: int, seed: int) -> None:
    group = np.repeat(np.arange(groups), samples)
    parts = split_steps(group, steps, epochs, (seed, 1))
    assert len(parts) == epochs * min(steps, groups)
    per_epoch = len(parts) // epochs
    for epoch in range(epochs):
        taken = np.concatenate(parts[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert sorted(taken.tolist()) == list(range(groups * samples))
    for part in parts:
        assert (np.bincount(part // samples, minlength=groups) % samples == 0).all()
    again = split_steps(group, steps, epochs, (seed, 1))
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def test_one_step_keeps_the_order_of_the_log() -> None:
    assert split_steps(np.array([0, 0, 1, 1, 2, 2]), 1, 1, (0, 1))[0].tolist() == list(range(6))


def group(index: int, prompt: list[int], responses: list[list[int]], first_masked: bool = False) -> GroupRecord:
    samples = []
    for response in responses:
        mask = np.ones(len(response), dtype=np.uint8)
        mask[0] = 0 if first_masked else 1
        samples.append(
            SampleRecord(
                token_ids=np.array(response, dtype=np.int32),
                logprobs=-0.1 * np.arange(1, len(response) + 1, dtype=np.float32),
                loss_mask=mask,
                finish_reason=1,
                spans=[(0, 0, len(response))],
                score=0.0,
                parts=[],
                text="",
            )
        )
    return GroupRecord(
        index=index,
        attempt=1,
        prompt_ids=np.array(prompt, dtype=np.int32),
        samples=samples,
        prompt="",
        label="",
        generate_seconds=0.0,
        score_seconds=0.0,
    )


def test_packing_puts_every_token_over_its_prediction() -> None:
    sequences, tokens = collect([group(0, [5, 6, 7], [[8, 9], [8]]), group(1, [3], [[4, 4, 4, 4], [2, 1]])])
    assert sequences.lengths.tolist() == [5, 4, 5, 3]
    assert sequences.trained.tolist() == [2, 1, 4, 2]
    batch = pack(sequences, np.array([0, 3]), torch.device("cpu"))
    assert (batch.ids.ids.tolist(), batch.ids.lengths) == ([5, 6, 7, 8, 3, 2], (4, 2))
    assert batch.targets.tolist() == [IGNORE, IGNORE, 8, 9, 2, 1]
    assert batch.padding == 0
    aligned = pack(sequences, np.array([0, 3]), torch.device("cpu"), multiple=4)
    assert (aligned.ids.ids.tolist(), aligned.ids.lengths) == ([5, 6, 7, 8, 3, 2, 0, 0], (4, 2, 2))
    assert (aligned.targets.tolist(), aligned.padding) == ([*batch.targets.tolist(), IGNORE, IGNORE], 2)
    assert aligned.real.tolist() == [True] * 6 + [False] * 2
    assert batch.sequence.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(batch.take(tokens.behaviour), torch.tensor([-0.1, -0.2, -0.1, -0.2]))
    assert tokens.ids is not None
    assert batch.take(tokens.ids).tolist() == [8, 9, 2, 1]


lengths_and_masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=9)


@given(lengths_and_masks, st.randoms(use_true_random=False))
def test_a_micro_batch_takes_the_trained_tokens_in_the_order_of_its_targets(masks: list[list[bool]], random: Random) -> None:
    ids = [np.arange(100 * row, 100 * row + len(mask) + 1) for row, mask in enumerate(masks)]
    sequences = Sequences(ids, np.concatenate([np.array(mask, dtype=np.float32) for mask in masks]))
    following = np.concatenate([x[1:] for x in ids])
    chosen = np.array(random.sample(range(len(ids)), random.randint(1, len(ids))))
    batch = pack(sequences, chosen, torch.device("cpu"))
    trained = batch.targets != IGNORE
    assert batch.take(following).tolist() == batch.targets[trained].tolist()
    rows = np.repeat(np.arange(len(chosen)), [len(masks[row]) for row in chosen])
    assert batch.sequence.tolist() == rows[trained.numpy()].tolist()
    assert batch.ids.ids.tolist() == np.concatenate([ids[row][:-1] for row in chosen]).tolist()


def test_samples_of_a_prompt_have_its_tokens_in_common() -> None:
    """All but the last token of the prompt, whose prediction is a trained one of each sample."""
    sequences, tokens = collect([group(0, [5, 6, 7], [[8, 9], [8]]), group(1, [5, 6], [[4, 2]])])
    batch = pack(sequences, np.arange(3), torch.device("cpu"), 4, joins_beginnings=True)
    assert (batch.ids.ids.tolist(), batch.ids.lengths) == ([5, 6, 7, 8, 7, 5, 6, 4], (4, 3, 3))
    assert batch.ids.places is not None
    assert batch.ids.places.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7]
    assert batch.targets.tolist() == [IGNORE, IGNORE, 8, 9, 8, IGNORE, 4, 2]
    assert (batch.padding, batch.sequence.tolist()) == (0, [0, 0, 1, 2, 2])
    assert tokens.ids is not None
    assert batch.take(tokens.ids).tolist() == [8, 9, 8, 4, 2]


binary_rows = st.lists(st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=9)


@given(binary_rows, st.integers(1, 4))
def test_tokens_in_common_are_untrained_beginnings(rows: list[list[tuple[int, bool]]], multiple: int) -> None:
    ids = [np.array([*(token for token, _ in row), 1]) for row in rows]
    sequences = Sequences(ids, np.array([mask for row in rows for _, mask in row], dtype=np.float32))
    every = np.arange(len(rows))
    plain = pack(sequences, every, torch.device("cpu"), multiple)
    joined = pack(sequences, every, torch.device("cpu"), multiple, joins_beginnings=True)
    count = sum(map(len, rows))
    places = np.arange(count) if joined.ids.places is None else joined.ids.places[:count]
    assert joined.ids.ids[places].tolist() == plain.ids.ids[:count].tolist()
    assert joined.tokens.tolist() == plain.tokens.tolist() and joined.sequence.tolist() == plain.sequence.tolist()
    assert joined.targets[joined.targets != IGNORE].tolist() == plain.targets[plain.targets != IGNORE].tolist()
    assert int(joined.real.sum()) == len(set(places.tolist())) == len(joined.targets) - joined.padding
    known: dict[tuple[int, ...], list[int]] = {}  # equal untrained beginnings have the same tokens; no other token has two places
    for start, row in zip(sequences.offsets[:-1], rows, strict=True):
        length = next((number for number, (_, mask) in enumerate(row) if mask), len(row))
        mine, rest = places[start : start + length].tolist(), places[start + length : start + len(row)].tolist()
        assert known.setdefault(tuple(token for token, _ in row[:length]), mine) == mine
        assert all((places == place).sum() == 1 for place in rest)


def test_versions_and_groups_are_per_token_and_per_sequence() -> None:
    made = group(4, [5, 6], [[8, 9], [8, 1], [7]])
    spans = [[(3, 0, 2)], [(2, 0, 1), (3, 1, 2)], [(2, 0, 1)]]
    made = replace(made, samples=[replace(sample, spans=span) for sample, span in zip(made.samples, spans, strict=True)])
    _, tokens = collect([made, made])
    assert tokens.version.tolist() == [-1, 3, 3, -1, 2, 3, -1, 2] * 2
    assert tokens.group.tolist() == [0, 0, 0, 1, 1, 1]


def test_masked_tokens_do_not_count() -> None:
    sequences, tokens = collect([group(0, [5, 6], [[8, 9, 1], [8, 1]], first_masked=True)])
    assert sequences.trained.tolist() == [2, 1]
    assert tokens.mask.tolist() == [0, 0, 1, 1, 0, 0, 1]


def test_samples_without_a_trained_token_are_greedy_where_the_algorithm_asks_for_one() -> None:
    made = group(0, [5], [[8, 9], [8]])
    made = replace(made, samples=[*made.samples, replace(made.samples[0], loss_mask=np.zeros(2, dtype=np.uint8))])
    assert collect([made], greedy=True)[1].greedy.tolist() == [False, False, True]
    assert collect([made])[1].greedy.tolist() == [False, False, False]


def test_numbers_per_token_stand_at_their_tokens_where_a_response_has_them() -> None:
    made = group(0, [5, 6, 7], [[8, 9], [8]])
    assert (collect([made])[1].token_rewards, collect([made])[1].teacher) == (None, None)
    rewarded = replace(made.samples[0], token_rewards=np.array([0.5, -1], np.float32))
    taught = [replace(each, teacher_logprobs=np.full(len(each), -2, np.float32)) for each in (rewarded, made.samples[1])]
    tokens = collect([replace(made, samples=taught)])[1]
    assert tokens.token_rewards is not None and tokens.teacher is not None
    assert tokens.token_rewards.tolist() == [0, 0, 0.5, -1, 0, 0, 0]
    assert tokens.teacher[tokens.trained].tolist() == [-2, -2, -2]
    with pytest.raises(ValueError, match="teacher"):
        collect([replace(made, samples=[taught[0], made.samples[1]])])


def test_only_the_response_of_a_supervised_row_is_trained_on() -> None:
    ids = [np.array([5, 1], dtype=np.int32), np.array([5, 6, 7, 1], dtype=np.int32)]
    sequences = supervised(ids, [np.array([0, 1], dtype=np.uint8), np.array([0, 0, 1, 1], dtype=np.uint8)])
    assert [x.tolist() for x in sequences.ids] == [[5, 1], [5, 6, 7, 1]]
    assert sequences.mask.tolist() == [1, 0, 1, 1]
    assert sequences.trained.tolist() == [1, 2]
