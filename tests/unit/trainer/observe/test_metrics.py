"""The iteration's record and observation, from synthetic groups."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metric_rows import find

from polyreme.api.v1.experience_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, OUTCOME_STOP, OUTCOME_TURNS
from polyreme.experience.metric_records import fields_of
from polyreme.experience.record_checks import check_group
from polyreme.experience.records import EpisodeRecord, GroupRecord, RewardPart, SampleRecord, Turn
from polyreme_trainer.learner.leader import join, split
from polyreme_trainer.observe.metrics import iteration_record, observe
from support.configs import run_config

TRAINED = {"off_policy_kl": 1e-3, "mismatch_kl": 1e-9, "trained_samples": 2, "actor/lr": 1e-4}
SECONDS = {"iteration": 2.0, "learner_wait": 1.0, "train": 0.5, "write": 0.1}


def sample(length: int, score: float, reason: int = FINISH_REASON_STOP, version: int = 4) -> SampleRecord:
    return SampleRecord(
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.full(length, -0.5, dtype=np.float32),
        loss_mask=np.ones(length, dtype=np.uint8),
        finish_reason=reason,
        spans=[(version, 0, length)],
        score=score,
        parts=[RewardPart("exact", raw=score, weighted=2 * score)],
    )


GROUPS = [
    GroupRecord(0, 1, np.array([1], dtype=np.int32), [sample(4, 1.0), sample(20, 0.0)], generate_seconds=0.7, score_seconds=0.1),
    GroupRecord(
        1, 1, np.array([1], dtype=np.int32), [sample(1, 0.0), sample(15, 0.0, FINISH_REASON_LENGTH, 3)], generate_seconds=0.4
    ),
]


def test_the_record(tmp_path: Path) -> None:
    record = fields_of(iteration_record(5, GROUPS, TRAINED, SECONDS, 100.0, run_config(tmp_path)))
    json.dumps(record)
    assert record["reward/mean"] == 0.25
    assert (record["reward/exact"], record["reward_weighted/exact"]) == (0.25, 0.5)
    assert (record["response_length/mean"], record["response_length/max"]) == (10.0, 20)
    assert record["stop/length_fraction"] == 0.25
    assert record["entropy"] == pytest.approx(0.5)
    assert (record["staleness/mean"], record["staleness/max"], record["staleness/samples"]) == (0.25, 1, [3, 1])
    assert record["staleness/mixed_fraction"] == 0.0
    assert (record["off_policy_kl"], record["actor/lr"]) == (1e-3, 1e-4)
    assert (record["timing/rollout"], record["timing/rule_reward"], record["time/train"]) == (0.7, 0.1, 0.5)
    assert (record["tokens/generated"], record["tokens_per_second"], record["samples_per_second"]) == (40, 20.0, 2.0)


def test_a_sample_is_as_stale_as_its_oldest_token(tmp_path: Path) -> None:
    mixed = replace(sample(6, 1.0), spans=[(2, 0, 3), (4, 3, 6)])
    groups = [replace(GROUPS[0], samples=[mixed, sample(4, 0.0)])]
    record = fields_of(iteration_record(5, groups, TRAINED, SECONDS, 100.0, run_config(tmp_path)))
    assert (record["staleness/samples"], record["staleness/max"], record["staleness/mixed_fraction"]) == ([1, 0, 1], 2, 0.5)
    assert (record["partial/carried_samples"], record["partial/carried_tokens"]) == (1, 3)
    assert (record["partial/parts_mean"], record["partial/parts_max"]) == (1.5, 2)


def test_an_episode_is_scored_once_and_the_environments_tokens_are_not_generated(tmp_path: Path) -> None:
    """The first episode has two trajectories: 4 tokens, of which 1 is the environment's, and 2 tokens after a prompt of its own."""
    outside = np.array([0, 0, 1, 0], np.float32) == 1
    first = replace(
        sample(4, 1.0),
        logprobs=np.where(outside, np.float32(0), np.float32(-0.5)),
        loss_mask=np.where(outside, np.uint8(0), np.uint8(1)),
        spans=[(4, 0, 2), (4, 3, 4)],
        turns=(Turn(0, 2), Turn(3, 4)),
    )
    branch = replace(sample(2, 1.0), turns=(Turn(0, 2),), prompt_ids=np.arange(7, dtype=np.int32))
    other = replace(sample(2, 0.0), turns=(Turn(0, 2),), episode=1)
    ends = [EpisodeRecord(OUTCOME_STOP, seconds=1.0), EpisodeRecord(OUTCOME_TURNS)]
    groups = [replace(GROUPS[0], samples=[first, branch, other], episodes=ends)]
    check_group(groups[0])
    record = fields_of(iteration_record(5, groups, TRAINED, SECONDS, 100.0, run_config(tmp_path)))
    assert (record["reward/mean"], record["reward/exact"]) == (0.5, 0.5)
    assert (record["response_length/max"], record["tokens/generated"], record["entropy"]) == (3, 7, pytest.approx(0.5))
    assert (record["prompt_length/max"], record["prompt_length/min"]) == (7, 1)
    assert (record["episode/turns/mean"], record["episode/turns/max"], record["episode/environment_seconds"]) == (2.0, 3, 0.5)
    assert [record[f"episode/by_{name}"] for name in ("length", "turns", "tokens", "time")] == [0.0, 0.5, 0.0, 0.0]
    assert all(find(name) for name in record if name.startswith("episode/"))
    assert record["vllm_tps"] == pytest.approx((4 + 2 + 2 + 1 + 7 + 1) / 0.7)


def test_a_greedy_baseline_counts_as_generated_and_in_nothing_else(tmp_path: Path) -> None:
    """ReMax's greedy sample scores better than the samples that are trained on."""
    greedy = replace(sample(40, 1.0), loss_mask=np.zeros(40, dtype=np.uint8))
    groups = [replace(group, samples=[*group.samples, greedy]) for group in GROUPS]
    config = run_config(tmp_path)
    record, without = (fields_of(iteration_record(5, each, TRAINED, SECONDS, 100.0, config)) for each in (groups, GROUPS))
    assert (record.pop("tokens/generated"), record.pop("tokens_per_second"), record.pop("samples_per_second")) == (120, 60.0, 3.0)
    tokens = 120 + 6  # responses, and the prompt once for each of them
    assert (record.pop("e2e_tps"), record.pop("vllm_tps")) == pytest.approx((tokens / 2 / 2.0, tokens / 0.7))
    assert record == {name: without[name] for name in record}
    assert observe(5, groups, TRAINED, 7) == observe(5, GROUPS, TRAINED, 7)
    assert [group.mean_reward for group in groups] == [0.5, 0.0]


def test_the_observation() -> None:
    seen = observe(5, GROUPS, TRAINED, changed_tensors=7)
    assert (seen.reward_min, seen.reward_max) == (0.0, 1.0)
    assert (seen.empty_fraction, seen.repetitive_fraction, seen.length_stop_fraction) == (0.25, 0.0, 0.25)
    assert (seen.changed_tensors, seen.mismatch_kl) == (7, 1e-9)


def test_what_an_environment_repeats_is_no_repetition_of_the_policy() -> None:
    """The alarm reads the last turn. The environment wrote one token 40 times before it."""
    mask = np.array([1] * 20 + [0] * 40 + [1] * 20, np.uint8)

    def seen(last: np.ndarray) -> float:
        ids = np.concatenate([np.arange(20), np.zeros(40), last]).astype(np.int32)
        turns = (Turn(0, 20), Turn(60, 80))
        made = replace(sample(80, 1.0), token_ids=ids, loss_mask=mask, spans=[(0, 0, 20), (0, 60, 80)], turns=turns)
        group = replace(GROUPS[0], samples=[made], episodes=[EpisodeRecord(OUTCOME_STOP)])
        return observe(5, [group], TRAINED, 7).repetitive_fraction

    assert (seen(np.arange(20)), seen(np.zeros(20))) == (0.0, 1.0)
    assert seen(np.array([7] + 19 * [8])) == 1.0


@given(st.lists(st.binary(max_size=50), max_size=10))
def test_joined_payloads_come_apart_again(parts: list[bytes]) -> None:
    assert split(join(parts)) == parts
