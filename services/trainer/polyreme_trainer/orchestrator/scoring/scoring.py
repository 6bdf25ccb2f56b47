"""Scores a group's samples: by the run's rewards, its teacher, or both at once. A run whose environment scores may have neither.

Invariant: every sample has a score, and every trained sample its teacher's log-probabilities where the run has a teacher;
otherwise the attempt at the group has failed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyreme.api.v1 import reward_pb2
from polyreme.experience.records import RewardCall, RewardPart
from polyreme.process.tasks import task_group, together
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollout
from polyreme_trainer.orchestrator.scoring.reward_client import RewardClient
from polyreme_trainer.orchestrator.scoring.score_call import Question
from polyreme_trainer.orchestrator.scoring.teacher_client import TeacherClient

Float32 = NDArray[np.float32]
Response = tuple[NDArray[np.int32], NDArray[np.int32]]
"""The ids of a prompt [p] and of the tokens that follow it [t]."""
Scored = tuple[reward_pb2.ScoreResult, list[RewardCall]]


@dataclass(frozen=True)
class Judgement:
    """A sample's score with its parts, its numbers per token (float32 [t]) if there are any, and its calls; see SampleRecord."""

    score: float
    parts: list[RewardPart]
    token_rewards: Float32 | None = None
    teacher_logprobs: Float32 | None = None
    calls: tuple[RewardCall, ...] = ()


class Scoring:
    """The run's rewards, its teacher, or both.

    Args:
        rewards, teacher: their clients, or None.
    """

    def __init__(self, rewards: RewardClient | None, teacher: TeacherClient | None) -> None:
        self.rewards, self._teacher = rewards, teacher

    @property
    def paused(self) -> bool:
        """Whether new groups should wait, because the rewards are down and pending groups still retry."""
        return self.rewards is not None and self.rewards.paused

    @property
    def proven(self) -> bool:
        """Whether anything was ever scored in this run, or nothing needs to be."""
        return self.rewards is None or self.rewards.health.proven

    async def refresh(self) -> None:
        """Updates the reward servers from their leases."""
        if self.rewards is not None:
            await self.rewards.refresh()

    async def close(self) -> None:
        for client in (self.rewards, self._teacher):
            if client is not None:
                await client.close()

    async def score(
        self, prompt_ids: NDArray[np.int32], samples: Sequence[PartialRollout], questions: Sequence[Question], trained: int
    ) -> list[Judgement]:
        """One judgement per sample, in order.

        Args:
            prompt_ids: int32 [p].
            questions: the question to the rewards about each sample.
            trained: the number of samples, from the first on, that need the teacher.

        Raises:
            ScoreError, TeacherError: the attempt at the group has failed.
            UnavailableError: no reward server, or no server of the teacher.
        """
        results, asked = await self.ask(questions, [(prompt_ids, sample.token_ids()) for sample in samples[:trained]])
        taught = [*asked, *[None] * len(samples)]
        if not results:
            return [by_teacher(*pair) for pair in zip(samples, taught, strict=False)]
        return [by_rewards(result, logprobs, calls) for (result, calls), logprobs in zip(results, taught, strict=False)]

    async def ask(self, questions: Sequence[Question], responses: Sequence[Response]) -> tuple[list[Scored], list[Float32]]:
        """The rewards' result for each question with the calls for it, and the teacher's log-probability of each token of each
        response. Empty without rewards, or without a teacher. Raises as `score`.
        """
        async with task_group() as group:
            scored = group.create_task(self._ask_rewards(questions))
            taught = group.create_task(self._ask_teacher(responses))
        return scored.result(), taught.result()

    async def _ask_rewards(self, questions: Sequence[Question]) -> list[Scored]:
        if self.rewards is None:
            return []
        calls: list[list[RewardCall]] = [[] for _ in questions]
        return list(zip(await self.rewards.score(questions, calls), calls, strict=True))

    async def _ask_teacher(self, responses: Sequence[Response]) -> list[Float32]:
        if self._teacher is None:
            return []
        return await together([self._teacher.logprobs(prompt.tolist(), ids.tolist()) for prompt, ids in responses])


def by_rewards(result: reward_pb2.ScoreResult, teacher_logprobs: Float32 | None, calls: Sequence[RewardCall] = ()) -> Judgement:
    """The rewards' score."""
    return Judgement(
        score=result.score,
        parts=[RewardPart(part.name, part.raw, part.weighted, part.plugin_version) for part in result.parts],
        token_rewards=np.array(result.token_rewards, dtype=np.float32) if result.token_rewards else None,
        teacher_logprobs=teacher_logprobs,
        calls=tuple(calls),
    )


def by_teacher(sample: PartialRollout, teacher_logprobs: Float32 | None) -> Judgement:
    """The score of a run without rewards: the mean over the tokens of log p_teacher - log p_sampler, minus an estimate of the KL
    to the teacher in nats per token."""
    if teacher_logprobs is None:
        raise ValueError("expected rewards or a teacher; found neither")
    score = float(np.mean(teacher_logprobs.astype(np.float64) - sample.token_logprobs()))
    return Judgement(score, [RewardPart("teacher", score, score)], teacher_logprobs=teacher_logprobs)
