"""The environment of a single turn: the policy answers the prompt once, then the run's rewards or its teacher score the answer.

Invariant: on one replica, index and attempt determine the tokens. A group's samples are one request and one call of the rewards.
"""

import time
from dataclasses import replace
from functools import partial

import numpy as np

from polyreme.experience.records import SampleRecord
from polyreme_trainer.orchestrator.environment.protocol import Played, Task
from polyreme_trainer.orchestrator.generation.generate import GenerateOptions, Generation
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollout, PartialRollouts
from polyreme_trainer.orchestrator.generation.rollout_parts import RolloutParts
from polyreme_trainer.orchestrator.generation.sampler import Sampler
from polyreme_trainer.orchestrator.generation.token_budget import TokenBudget
from polyreme_trainer.orchestrator.scoring.score_call import Question
from polyreme_trainer.orchestrator.scoring.scoring import Judgement, Scoring


class SingleTurn:
    """Generates and scores the samples of a group. `partial_log` and `budget` are those of the run."""

    def __init__(
        self, sampler: Sampler, scoring: Scoring, partial_log: PartialRolloutLog, budget: TokenBudget | None = None
    ) -> None:
        self._sampler, self._scoring, self._partial_log, self._budget = sampler, scoring, partial_log, budget

    async def wait_ready(self) -> None:
        """See `Environment`. The rewards are those of evaluations too, so the run waits for them itself."""

    async def refresh(self) -> None:
        await self._scoring.refresh()

    async def close(self) -> None:
        await self._scoring.close()

    async def collect(self) -> bool:
        return False

    async def metrics(self) -> dict[str, float]:
        return {}

    async def play(self, task: Task) -> Played:
        """See `Environment`."""
        wanted = self._sampler.of_group(task.admission, task.prompt.ids)
        with self._partial_log.track(task.admission, RolloutParts(task.prompt.ids, wanted.blank())) as parts:
            begin = time.monotonic()
            samples = await self._sample(task, wanted, parts.rollouts)
            generated = time.monotonic()
            texts, questions = self._questions(task, samples)
            judgements = await self._scoring.score(task.prompt.ids, samples, questions, wanted.count)
            records = [
                _record(*each, trained=each[0].index < wanted.count) for each in zip(samples, texts, judgements, strict=True)
            ]
            return Played(records, generate_seconds=generated - begin, score_seconds=time.monotonic() - generated)

    async def _sample(self, task: Task, wanted: Generation, rollouts: PartialRollouts) -> list[PartialRollout]:
        next_part = None if self._budget is None else partial(self._budget.next_part, task.admission.index)
        samples = await self._sampler.sample(wanted, GenerateOptions(rollouts, next_part))
        if not self._sampler.config.recipe.advantage.needs_greedy:
            return samples
        # The baseline of the others is a greedy sample of the same prompt. Its index follows theirs, and it has no token budget.
        greedy = replace(wanted, name=f"{wanted.name}-greedy", count=1, temperature=0.0)
        (baseline,) = await self._sampler.sample(greedy)
        return [*samples, replace(baseline, index=wanted.count)]

    def _questions(self, task: Task, samples: list[PartialRollout]) -> tuple[list[str], list[Question]]:
        """The samples' texts, and the questions to the rewards about them."""
        prompt, admission, template = task.prompt, task.admission, self._sampler.template
        ids = [sample.token_ids().tolist() for sample in samples]
        texts, raw = template.decode(ids, special=False), template.decode(ids, special=True)
        questions = [
            Question(
                (self._sampler.run_id, admission.index, admission.attempt, sample.index),
                prompt.plain,
                texts[sample.index],
                raw[sample.index],
                prompt.label,
                prompt.metadata_json,
                prompt.text,
                tuple(ids[sample.index]),
            )
            for sample in samples
        ]
        return texts, questions


def _record(sample: PartialRollout, text: str, judged: Judgement, trained: bool) -> SampleRecord:
    return SampleRecord(
        token_ids=sample.token_ids(),
        logprobs=sample.token_logprobs(),
        loss_mask=np.full(sample.length, trained, dtype=np.uint8),
        finish_reason=sample.finish_reason,
        spans=sample.spans,
        score=judged.score,
        parts=judged.parts,
        text=text,
        token_rewards=judged.token_rewards,
        teacher_logprobs=judged.teacher_logprobs,
        routes=sample.token_routes(),
        replicas=tuple(sample.replicas),
        calls=judged.calls,
    )
