"""Evaluates one policy version: one greedy answer or several sampled ones to each held-out prompt, by the replicas and rewards of training.

Invariant: a result belongs to exactly one version, and its samples never reach the experience log: they are in the run directory,
samples/evaluation_VERSION.jsonl, before the result is on record.
"""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from polyreme.api.v1 import reward_pb2
from polyreme.api.v1.experience_pb2 import FinishReason
from polyreme.cli.run_records import write_atomically
from polyreme.config.run import RunConfig
from polyreme.experience.run import Run
from polyreme_trainer.data.prompt_store import Prompt
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.answer_metrics import answer_metrics
from polyreme_trainer.orchestrator.generate import GenerateError, Generation, generate
from polyreme_trainer.orchestrator.partial_rollouts import PartialRollout
from polyreme_trainer.orchestrator.prompt_order import sequence_seed
from polyreme_trainer.orchestrator.replica_pool import ReplicaPool
from polyreme_trainer.orchestrator.reward_client import RewardClient
from polyreme_trainer.orchestrator.score_call import Question, ScoreError
from polyreme_trainer.orchestrator.tasks import together

EXAMPLES = 5
_SCORED_AT_ONCE = 64

Value = TypeVar("Value")
logger = logging.getLogger(__name__)


class EvaluationError(Exception):
    """This version could not be evaluated. Training continues."""


class Evaluator:
    """Evaluates versions on the first `eval_samples` held-out prompts."""

    def __init__(
        self, run: Run, config: RunConfig, template: Template, prompts: Sequence[Prompt], pool: ReplicaPool, rewards: RewardClient
    ) -> None:
        self._run, self._config, self._template, self._pool, self._rewards = run, config, template, pool, rewards
        self._prompts = prompts[: config.eval_samples]

    async def evaluate(self, version: int) -> float:
        """Emits the `eval` record of a version, and returns the mean score.

        Raises:
            EvaluationError: generation or scoring failed, or another version sampled some tokens.
            UnavailableError: there is no replica or no reward server.
        """
        begin, count = time.monotonic(), self._config.eval_answers
        try:
            samples = await self._answers(version)
            responses, questions = self._questions(version, samples)
            starts = range(0, len(questions), _SCORED_AT_ONCE)
            batches = await together([self._rewards.score(questions[start : start + _SCORED_AT_ONCE]) for start in starts])
        except (GenerateError, ScoreError) as error:
            raise EvaluationError(f"version {version} could not be evaluated: {error}") from error
        results = [result for batch in batches for result in batch]
        scores = [result.score for result in results]
        lines = [
            {"version": version, "row": place // count, **({"answer": place % count} if count > 1 else {}), **answer_line(*parts)}
            for place, parts in enumerate(zip(self._asked(), samples, responses, results, strict=True))
        ]
        await self._write(version, lines)
        name = metric_name(self._rewards.measure_correctness, scores)
        several = answer_metrics(_groups(scores, count), _groups(responses, count), name == "accuracy", self._config.eval_pattern)
        await self._run.emit(
            {
                "kind": "eval",
                "version": version,
                name: sum(scores) / len(scores),
                **several,
                "parts": part_means(results),
                "samples": len(self._prompts),
                "seconds": time.monotonic() - begin,
                "examples": [
                    {key: line[key] for key in ("prompt", "response", "label", "score")}
                    for line in lines[: EXAMPLES * count : count]
                ],
            }
        )
        return sum(scores) / len(scores)

    def _asked(self) -> list[Prompt]:
        """The prompt of each answer."""
        return [prompt for prompt in self._prompts for _ in range(self._config.eval_answers)]

    async def _write(self, version: int, lines: Sequence[dict[str, Any]]) -> None:
        """Writes the file of a version's answers; one that cannot be written is a notice, since the result is known all the same."""
        path = self._config.run_dir / "samples" / f"evaluation_{version:04d}.jsonl"
        text = "".join(json.dumps(line) + "\n" for line in lines)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(write_atomically, path, text)
        except OSError as error:
            logger.warning("no file of the answers of version %d: %s", version, error)
            notice = f"the answers of the evaluation of version {version} could not be written: {error}"
            await self._run.emit({"kind": "notice", "service": "orchestrator", "text": notice})

    async def _answers(self, version: int) -> list[PartialRollout]:
        """`eval_answers` answers to each prompt, prompt by prompt. Their seeds depend on the prompt's position and not on the version."""
        config, count = self._config, self._config.eval_answers
        capacity = asyncio.Semaphore(max(1, config.rollout.max_num_seqs * max(1, len(self._pool)) // count))

        async def answer(position: int, prompt: Prompt) -> list[PartialRollout]:
            wanted = Generation(
                run_id=self._run.run_id,
                name=f"eval-{version}-{position}",
                prompt_ids=prompt.ids,
                count=count,
                max_new=config.rollout.max_new_tokens,
                temperature=0.0 if count == 1 else config.eval_temperature,
                stop_ids=self._template.stop_ids,
                seed=partial(sequence_seed, config.seed, position, 0),
                min_version=version,
            )
            async with capacity:
                rollout = config.rollout
                samples = await generate(
                    self._pool, wanted, chunk_timeout=rollout.chunk_timeout, progress_timeout=rollout.start_timeout
                )
            if strays := {span[0] for sample in samples for span in sample.spans} - {version}:
                raise EvaluationError(f"expected version {version} throughout its evaluation; found tokens of {sorted(strays)}")
            return list(samples)

        groups = await together([answer(position, prompt) for position, prompt in enumerate(self._prompts)])
        return [sample for group in groups for sample in group]

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
            for i, prompt in enumerate(self._asked())
        ]
        return clean, questions


def _groups(values: Sequence[Value], count: int) -> list[Sequence[Value]]:
    """Consecutive values, `count` at a time."""
    return [values[start : start + count] for start in range(0, len(values), count)]


def answer_line(prompt: Prompt, sample: PartialRollout, response: str, result: reward_pb2.ScoreResult) -> dict[str, Any]:
    """An answer for people and tools, with the fields of a training sample's line."""
    return {
        "prompt": prompt.text,
        "response": response,
        "label": prompt.label,
        "score": result.score,
        "parts": {part.name: {"raw": part.raw, "weighted": part.weighted} for part in result.parts},
        "tokens": sample.length,
        "finish_reason": FinishReason.Name(sample.finish_reason).removeprefix("FINISH_REASON_").lower(),
    }


def part_means(results: Sequence[reward_pb2.ScoreResult]) -> dict[str, float]:
    """The mean raw value of each part, over the results that have it."""
    values: dict[str, list[float]] = {}
    for result in results:
        for part in result.parts:
            values.setdefault(part.name, []).append(part.raw)
    return {name: sum(each) / len(each) for name, each in values.items()}


def metric_name(correctness: bool, scores: Sequence[float]) -> str:
    """The name of an evaluation's mean score: `accuracy` when every score is 1 for a right or 0 for a wrong answer, else `score`.

    Args:
        correctness: whether the rewards' value is that of right and wrong answers (a weight may still scale it).
    """
    return "accuracy" if correctness and set(scores) <= {0.0, 1.0} else "score"
