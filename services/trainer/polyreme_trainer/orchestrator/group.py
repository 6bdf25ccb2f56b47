"""One attempt at a group: its prompt by its index, generated, decoded, scored, as a record for the log."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from polyreme.api.v1 import reward_pb2
from polyreme.config.recipe import GreedyBaseline
from polyreme.config.run import RunConfig
from polyreme.experience.ledger import Admission
from polyreme.experience.records import GroupRecord, RewardPart, SampleRecord
from polyreme_trainer.data.prompts import Prompt
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.generate import Generation, generate
from polyreme_trainer.orchestrator.partial_rollout_log import Snapshots
from polyreme_trainer.orchestrator.partial_rollouts import Draft, Drafts
from polyreme_trainer.orchestrator.prompt_order import row_of, slot_seed
from polyreme_trainer.orchestrator.replica_pool import Fleet
from polyreme_trainer.orchestrator.reward_client import Question, Rewards


class GroupMaker:
    """Makes groups from admissions. The prompt, the seeds and so (on one replica) the tokens follow from index and attempt."""

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        template: Template,
        prompts: Sequence[Prompt],
        fleet: Fleet,
        rewards: Rewards,
        snapshots: Snapshots,
    ) -> None:
        self._run_id, self._config, self._template, self._prompts = run_id, config, template, prompts
        self._fleet, self._rewards, self.snapshots = fleet, rewards, snapshots

    async def make(self, admission: Admission) -> GroupRecord:
        """One attempt.

        Raises:
            GenerateError, ScoreError: the attempt failed.
            UnavailableError: there is no replica or no reward server.
        """
        prompt = self._prompts[row_of(self._config.seed, admission.index, len(self._prompts))]
        wanted = self._generation(admission, prompt)
        with self.snapshots.of(admission, prompt.ids, wanted.blank()) as drafts:
            return await self._make(admission, prompt, wanted, drafts)

    async def _make(self, admission: Admission, prompt: Prompt, wanted: Generation, begun: Drafts) -> GroupRecord:
        begin = time.monotonic()
        rollout = self._config.rollout
        drafts = await generate(self._fleet, wanted, silence=rollout.chunk_timeout, patience=rollout.start_timeout, begun=begun)
        if isinstance(self._config.recipe.advantage, GreedyBaseline):
            drafts = [*drafts, await self._greedy(wanted)]
        generated = time.monotonic()
        ids = [draft.token_ids().tolist() for draft in drafts]
        texts = self._template.decode(ids, special=False)
        raw = self._template.decode(ids, special=True)
        results = await self._rewards.score(
            [
                Question(
                    (self._run_id, admission.index, admission.attempt, draft.index),
                    prompt.plain,
                    texts[draft.index],
                    raw[draft.index],
                    prompt.label,
                    prompt.metadata_json,
                    prompt.text,
                )
                for draft in drafts
            ]
        )
        return GroupRecord(
            index=admission.index,
            attempt=admission.attempt,
            prompt_ids=prompt.ids,
            samples=[
                _sample(*parts, trained=parts[0].index < wanted.count) for parts in zip(drafts, texts, results, strict=True)
            ],
            prompt=prompt.text,
            label=prompt.label,
            generate_seconds=generated - begin,
            score_seconds=time.monotonic() - generated,
        )

    async def _greedy(self, wanted: Generation) -> Draft:
        """A greedy sample of the same prompt, the baseline of the others; it has the index after theirs."""
        greedy, rollout = replace(wanted, name=f"{wanted.name}-greedy", count=1, temperature=0.0), self._config.rollout
        (draft,) = await generate(self._fleet, greedy, silence=rollout.chunk_timeout, patience=rollout.start_timeout)
        return replace(draft, index=wanted.count)

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
            seed=partial(slot_seed, config.seed, admission.index, admission.attempt),
            min_version=admission.version,
        )


def _sample(draft: Draft, text: str, result: reward_pb2.ScoreResult, trained: bool) -> SampleRecord:
    return SampleRecord(
        token_ids=draft.token_ids(),
        logprobs=draft.token_logprobs(),
        loss_mask=np.full(draft.length, trained, dtype=np.uint8),
        finish_reason=draft.finish_reason,
        spans=draft.spans,
        score=result.score,
        parts=[RewardPart(part.name, part.raw, part.weighted, part.plugin_version) for part in result.parts],
        text=text,
    )
