"""Judgements are composed of scores and teacher log-probabilities."""

from typing import Any

import numpy as np
import pytest

from polyreme.api.v1 import experience_pb2, reward_pb2
from polyreme.experience.records import RewardCall, RewardPart
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollout
from polyreme_trainer.orchestrator.scoring.score_call import Question
from polyreme_trainer.orchestrator.scoring.scoring import Scoring, by_rewards
from polyreme_trainer.orchestrator.scoring.teacher_client import TeacherError

PROMPT = np.array([1, 2], np.int32)


class Rewards:
    """Scores every question with the length of its response."""

    async def score(self, questions: list[Question], calls: list[list[RewardCall]]) -> list[reward_pb2.ScoreResult]:
        for each in calls:
            each.append(RewardCall("reward-1", "ok"))
        return [reward_pb2.ScoreResult(score=float(len(question.response))) for question in questions]


class Teacher:
    """A teacher that gives each token the log-probability -id and refuses tokens with id 9."""

    async def logprobs(self, prompt_ids: list[int], response_ids: list[int]) -> np.ndarray:
        assert prompt_ids == [1, 2]
        if 9 in response_ids:
            raise TeacherError("refused")
        return -np.array(response_ids, np.float32)


def scoring(rewards: Any, teacher: Any) -> Scoring:
    return Scoring(rewards, teacher)


def samples(*responses: list[int]) -> tuple[list[PartialRollout], list[Question]]:
    rollouts = [
        PartialRollout(index, bytearray(np.array(ids, "<i4").tobytes()), bytearray(np.full(len(ids), -0.5, "<f4").tobytes()))
        for index, ids in enumerate(responses)
    ]
    return rollouts, [Question(("q", index), "p", "x" * len(ids), "", "", "") for index, ids in enumerate(responses)]


async def test_without_rewards_the_score_is_the_mean_log_ratio() -> None:
    judged = await scoring(None, Teacher()).score(PROMPT, *samples([3, 4], [1]), trained=2)
    assert [each.score for each in judged] == [-3.0, -0.5]
    assert judged[0].parts == [RewardPart("teacher", -3.0, -3.0)]
    assert judged[0].teacher_logprobs is not None and judged[0].teacher_logprobs.tolist() == [-3, -4]


async def test_rewards_and_teacher_are_both_heard_and_a_greedy_sample_needs_no_teacher() -> None:
    judged = await scoring(Rewards(), Teacher()).score(PROMPT, *samples([3, 4], [9]), trained=1)
    assert [each.score for each in judged] == [2.0, 1.0]
    assert [each.teacher_logprobs is None for each in judged] == [False, True]
    assert [each.calls for each in judged] == [(RewardCall("reward-1", "ok"),)] * 2


async def test_a_teacher_that_fails_for_one_sample_fails_the_attempt() -> None:
    with pytest.raises(TeacherError):
        await scoring(Rewards(), Teacher()).score(PROMPT, *samples([3], [9]), trained=2)


def test_a_result_becomes_a_judgement() -> None:
    part = experience_pb2.RewardPart(name="a", raw=1.5, weighted=3.0, plugin_version="v")
    found = by_rewards(reward_pb2.ScoreResult(score=3.0, parts=[part], token_rewards=[1.0, 2.0]), None)
    assert (found.score, found.parts) == (3.0, [RewardPart("a", 1.5, 3.0, "v")])
    assert found.token_rewards is not None and found.token_rewards.dtype == np.float32
    assert by_rewards(reward_pb2.ScoreResult(score=3.0), None).token_rewards is None
