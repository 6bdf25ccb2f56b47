"""Evaluates one policy version: greedy answers to held-out prompts, by the same replicas and rewards as training.

Invariant: a result belongs to exactly one version, and its samples never reach the experience log.
"""

import asyncio
import time
from collections.abc import Sequence

from polyreme.config.reward import RewardConfig
from polyreme.config.run import RunConfig
from polyreme.experience.run import Run
from polyreme_trainer.data.prompts import Prompt
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.generate import GenerateError, Generation, generate
from polyreme_trainer.orchestrator.partial_rollouts import PartialRollout
from polyreme_trainer.orchestrator.replica_pool import ReplicaPool
from polyreme_trainer.orchestrator.reward_client import Question, RewardClient, ScoreError
from polyreme_trainer.orchestrator.tasks import together

EXAMPLES = 5
_JUDGES = {"exact": "", "numeric": "", "choice": "", "math": "", "code": "partial", "knights_and_knaves": "scores"}
"""Built-in rewards that judge an answer right (1) or wrong (0), and the option that makes one of them give shares instead."""
_SCORED_AT_ONCE = 64


class EvaluationError(Exception):
    """This version could not be evaluated. Training continues."""


class Evaluator:
    """Evaluates versions on the first `eval_samples` held-out prompts."""

    def __init__(
        self, run: Run, config: RunConfig, template: Template, prompts: Sequence[Prompt], pool: ReplicaPool, rewards: RewardClient
    ) -> None:
        self._run, self._config, self._template, self._pool, self._rewards = run, config, template, pool, rewards
        self._prompts = prompts[: config.eval_samples]

    async def evaluate(self, version: int) -> None:
        """Emits the `eval` record of a version.

        Raises:
            EvaluationError: generation or scoring failed, or another version sampled some tokens.
            UnavailableError: there is no replica or no reward server.
        """
        begin = time.monotonic()
        try:
            samples = await self._answers(version)
            responses, questions = self._questions(version, samples)
            starts = range(0, len(questions), _SCORED_AT_ONCE)
            batches = await together([self._rewards.score(questions[start : start + _SCORED_AT_ONCE]) for start in starts])
        except (GenerateError, ScoreError) as error:
            raise EvaluationError(f"version {version} could not be evaluated: {error}") from error
        scores = [result.score for batch in batches for result in batch]
        examples = [
            {"prompt": prompt.text, "response": response, "label": prompt.label, "score": score}
            for prompt, response, score in zip(self._prompts[:EXAMPLES], responses, scores, strict=False)
        ]
        await self._run.emit(
            {
                "kind": "eval",
                "version": version,
                metric_name(self._config.reward, scores): sum(scores) / len(scores),
                "samples": len(scores),
                "seconds": time.monotonic() - begin,
                "examples": examples,
            }
        )

    async def _answers(self, version: int) -> list[PartialRollout]:
        capacity = asyncio.Semaphore(self._config.rollout.max_num_seqs * max(1, len(self._pool)))

        async def answer(position: int, prompt: Prompt) -> PartialRollout:
            wanted = Generation(
                run_id=self._run.run_id,
                name=f"eval-{version}-{position}",
                prompt_ids=prompt.ids,
                count=1,
                max_new=self._config.rollout.max_new_tokens,
                temperature=0.0,
                stop_ids=self._template.stop_ids,
                seed=lambda sample, prefix: 0,
                min_version=version,
            )
            async with capacity:
                rollout = self._config.rollout
                (sample,) = await generate(
                    self._pool, wanted, chunk_timeout=rollout.chunk_timeout, progress_timeout=rollout.start_timeout
                )
            if strays := {span[0] for span in sample.spans} - {version}:
                raise EvaluationError(f"expected version {version} throughout its evaluation; found tokens of {sorted(strays)}")
            return sample

        return await together([answer(position, prompt) for position, prompt in enumerate(self._prompts)])

    def _questions(self, version: int, samples: Sequence[PartialRollout]) -> tuple[list[str], list[Question]]:
        ids = [sample.token_ids().tolist() for sample in samples]
        clean, raw = self._template.decode(ids, special=False), self._template.decode(ids, special=True)
        questions = [
            Question(
                (self._run.run_id, "eval", version, i),
                prompt.plain,
                clean[i],
                raw[i],
                prompt.label,
                prompt.metadata_json,
                prompt.text,
                tuple(ids[i]),
            )
            for i, prompt in enumerate(self._prompts)
        ]
        return clean, questions


def metric_name(reward: RewardConfig, scores: Sequence[float]) -> str:
    """What the mean of an evaluation's scores is: `accuracy` where a rule has judged each answer right or wrong, else `score`."""
    first, *others = reward.rewards
    is_built_in = not (first.file or first.module or first.url or first.model)
    is_judged = not others and is_built_in and first.name in _JUDGES and _JUDGES[first.name] not in first.options
    return "accuracy" if is_judged and set(scores) <= {0.0, 1.0} else "score"
