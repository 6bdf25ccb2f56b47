"""One attempt at a group: generates, decodes and scores its samples, and returns the record for the experience log.

Invariant: prompt and seeds depend only on index and attempt.
"""

import time
from dataclasses import replace
from functools import partial

import numpy as np

from polyreme.config.recipe import GreedyBaseline
from polyreme.config.run import RunConfig
from polyreme.experience.ledger import Admission
from polyreme.experience.records import GroupRecord, SampleRecord
from polyreme_trainer.data.prompt_store import Prompt
from polyreme_trainer.data.prompts import Dataset
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.generate import Generation, generate
from polyreme_trainer.orchestrator.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.partial_rollouts import PartialRollout, PartialRollouts
from polyreme_trainer.orchestrator.prompt_order import PromptOrder, sequence_seed
from polyreme_trainer.orchestrator.replica_pool import ReplicaPool
from polyreme_trainer.orchestrator.score_call import Question
from polyreme_trainer.orchestrator.scoring import Judgement, Scoring
from polyreme_trainer.orchestrator.token_budget import TokenBudget


class GroupMaker:
    """Makes groups from admissions. On a single replica, index and attempt also determine the tokens."""

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        template: Template,
        dataset: Dataset,
        pool: ReplicaPool,
        scoring: Scoring,
        partial_log: PartialRolloutLog,
        budget: TokenBudget | None = None,
    ) -> None:
        self._run_id, self._config, self._template, self._prompts = run_id, config, template, dataset.prompts
        data = config.data
        seed = config.seed if data.shuffle_seed is None else data.shuffle_seed
        weights = [weight for weight in data.weights if weight is not None]
        self._order = PromptOrder(seed, dataset.sizes, weights or None, shuffled=data.shuffle)
        self._pool, self._scoring, self.partial_log, self.budget = pool, scoring, partial_log, budget

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a group."""
        return self._prompts[self._order.row_of(index)]

    async def make(self, admission: Admission) -> GroupRecord:
        """Runs one attempt.

        Raises:
            GenerateError, ScoreError, TeacherError: the attempt failed.
            UnavailableError: there is no replica, no reward server or no server of the teacher.
        """
        prompt = self.prompt_of(admission.index)
        wanted = self._generation(admission, prompt)
        with self.partial_log.track(admission, prompt.ids, wanted.blank()) as rollouts:
            return await self._make(admission, prompt, wanted, rollouts)

    async def _make(self, admission: Admission, prompt: Prompt, wanted: Generation, rollouts: PartialRollouts) -> GroupRecord:
        began, begin = time.time(), time.monotonic()
        rollout = self._config.rollout
        samples = await generate(
            self._pool,
            wanted,
            chunk_timeout=rollout.chunk_timeout,
            progress_timeout=rollout.start_timeout,
            partial=rollouts,
            next_part=None if self.budget is None else partial(self.budget.next_part, admission.index),
        )
        if isinstance(self._config.recipe.advantage, GreedyBaseline):
            samples = [*samples, await self._greedy(wanted)]
        generated = time.monotonic()
        ids = [sample.token_ids().tolist() for sample in samples]
        texts = self._template.decode(ids, special=False)
        raw = self._template.decode(ids, special=True)
        questions = [
            Question(
                (self._run_id, admission.index, admission.attempt, sample.index),
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
        judgements = await self._scoring.judge(prompt.ids, samples, questions, wanted.count)
        return GroupRecord(
            index=admission.index,
            attempt=admission.attempt,
            prompt_ids=prompt.ids,
            samples=[
                _sample(*parts, trained=parts[0].index < wanted.count) for parts in zip(samples, texts, judgements, strict=True)
            ],
            prompt=prompt.text,
            label=prompt.label,
            generate_seconds=generated - begin,
            score_seconds=time.monotonic() - generated,
            began=began,
        )

    async def _greedy(self, wanted: Generation) -> PartialRollout:
        """A greedy sample of the same prompt, the baseline of the others. Its index follows theirs, and it has no token budget."""
        greedy, rollout = replace(wanted, name=f"{wanted.name}-greedy", count=1, temperature=0.0), self._config.rollout
        (sample,) = await generate(
            self._pool, greedy, chunk_timeout=rollout.chunk_timeout, progress_timeout=rollout.start_timeout
        )
        return replace(sample, index=wanted.count)

    def _generation(self, admission: Admission, prompt: Prompt) -> Generation:
        config = self._config
        return Generation(
            run_id=self._run_id,
            name=f"group-{admission.index}-{admission.attempt}",
            prompt_ids=prompt.ids,
            count=config.group_size,
            max_new=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            stop_ids=self._template.stop_ids,
            seed=partial(sequence_seed, config.seed, admission.index, admission.attempt),
            min_version=admission.version,
        )


def _sample(sample: PartialRollout, text: str, judged: Judgement, trained: bool) -> SampleRecord:
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
