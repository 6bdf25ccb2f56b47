"""Evaluates one policy version: one greedy answer or several sampled ones to each prompt of each held-out set, by the replicas and rewards
of training.

Invariant: a result belongs to exactly one version, and its samples never reach the experience log: they are in the run directory,
samples/evaluation_VERSION.jsonl, before the result is on record.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import xxhash

from polyreme.api.v1 import reward_pb2
from polyreme.api.v1.experience_pb2 import FinishReason
from polyreme.config.evaluation import EvaluationSet, best_metric
from polyreme.config.run import RunConfig
from polyreme.experience.run import Run
from polyreme.rundir.progress import evaluation_of
from polyreme.rundir.run_records import write_atomically
from polyreme_trainer.data.prompt_store import Prompt
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.evaluation.answer_metrics import answer_metrics
from polyreme_trainer.orchestrator.generation.generate import GenerateError, Generation, generate
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollout
from polyreme_trainer.orchestrator.prompts.prompt_order import sequence_seed
from polyreme_trainer.orchestrator.replicas.replica_pool import ReplicaPool
from polyreme_trainer.orchestrator.scoring.reward_client import RewardClient
from polyreme_trainer.orchestrator.scoring.score_call import Question, ScoreError
from polyreme_trainer.orchestrator.tasks import together

EXAMPLES = 5
PROGRESS_SECONDS = 10.0
"""Seconds between two progress reports of an evaluation. A shorter evaluation has no report."""
_SCORED_AT_ONCE = 64

Value = TypeVar("Value")
logger = logging.getLogger(__name__)


class EvaluationError(Exception):
    """This version could not be evaluated. Training continues."""


@dataclass(frozen=True)
class HeldOutSet:
    """A set of held-out prompts, and how each is answered."""

    settings: EvaluationSet
    prompts: Sequence[Prompt]

    @cached_property
    def digest(self) -> str:
        """The digest of the inputs that determine its results besides the policy and the rewards: the prompts, and how each is answered."""
        settings = self.settings
        several = (settings.temperature, settings.pattern) if settings.answers > 1 else ()
        found = xxhash.xxh3_64(json.dumps([settings.answers, *several]).encode())
        for prompt in self.prompts:
            found.update(json.dumps([prompt.ids.tolist(), prompt.plain, prompt.label, prompt.metadata_json]).encode())
        return found.hexdigest()

    def asked(self) -> list[Prompt]:
        """The prompt of each answer."""
        return [prompt for prompt in self.prompts for _ in range(self.settings.answers)]


@dataclass
class EvaluationPace:
    """The progress of a version's evaluation: `answered` of the `asked` answers have arrived, the `first` of them at `began`.

    Its rate counts from the first answers on, since an evaluation may have waited long for an engine that starts.
    """

    version: int
    asked: int
    began: float = 0.0
    reported: float = 0.0
    first: int = 0
    answered: int = 0

    def add(self, answers: int, now: float) -> dict[str, Any] | None:
        """Counts answers, at least one. Returns the record to emit if the previous one, or the first answer, is PROGRESS_SECONDS old."""
        if not self.answered:
            self.began, self.reported, self.first = now, now, answers
        self.answered += answers
        if now - self.reported < PROGRESS_SECONDS:
            return None
        self.reported = now
        left = (now - self.began) * (self.asked - self.answered) / (self.answered - self.first)
        return {
            **{"kind": "eval_progress", "version": self.version, "answered": self.answered, "asked": self.asked},
            "seconds_left": round(left, 1),
        }


@dataclass(frozen=True)
class _Result:
    """The results of a set's evaluation: its metrics and the means of its rewards by name, and a line for each answer."""

    metrics: Mapping[str, float]
    parts: Mapping[str, float]
    lines: Sequence[dict[str, Any]]


class Evaluator:
    """Evaluates versions on sets of held-out prompts, one set after the other."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        template: Template,
        sets: Sequence[HeldOutSet],
        pool: ReplicaPool,
        rewards: RewardClient,
    ) -> None:
        self._run, self._config, self._template, self._pool, self._rewards = run, config, template, pool, rewards
        self._sets = sets

    async def evaluate(self, version: int) -> float:
        """Emits the `eval` record of a version, and returns the result that decides about the best version.

        Raises:
            EvaluationError: generation or scoring failed, another version sampled some tokens, or there is no metric `eval_best`.
            UnavailableError: there is no replica or no reward server.
        """
        begin = time.monotonic()
        results: list[_Result] = []
        pace = EvaluationPace(version, sum(len(each.asked()) for each in self._sets))
        try:
            for held_out in self._sets:
                rows = sum(len(each.prompts) for each in self._sets[: len(results)])
                results.append(await self._evaluate_set(pace, held_out, rows, sum(len(each.lines) for each in results)))
        except (GenerateError, ScoreError) as error:
            raise EvaluationError(f"version {version} could not be evaluated: {error}") from error
        await self._write(version, [line for each in results for line in each.lines])
        found = list(zip(self._sets, results, strict=True))
        named = [(each.settings, result) for each, result in found]
        record = {
            "kind": "eval",
            "version": version,
            **{settings.metric(name): value for settings, result in named for name, value in result.metrics.items()},
            **{f"{each.name}/reward/{part}": mean for each, result in named if each.name for part, mean in result.parts.items()},
            **self._deciding(found),
            "parts": next((dict(result.parts) for each, result in named if not each.name), {}),
            "samples": sum(len(each.prompts) for each in self._sets),
            "seconds": time.monotonic() - begin,
            "examples": [
                {key: line[key] for key in ("prompt", "response", "label", "score")}
                for line in results[0].lines[: EXAMPLES * self._sets[0].settings.answers : self._sets[0].settings.answers]
            ],
        }
        await self._run.emit(record)
        return evaluation_of(record)[1]

    def _deciding(self, found: Sequence[tuple[HeldOutSet, _Result]]) -> dict[str, Any]:
        """The digest of the set that decides about the best version, and the deciding metric unless it is the mean of the first set, which
        has no name."""
        config = self._config
        settings, metric = best_metric([each.settings for each, _ in found], config.eval_best, config.reward_names)
        chosen, result = next((each, result) for each, result in found if each.settings is settings)
        if config.eval_best is None and not settings.name:
            return {"held_out": chosen.digest}
        values = {**result.metrics, **{f"reward/{name}": mean for name, mean in result.parts.items()}}
        name = next(iter(result.metrics)) if metric == "mean" else metric
        if name not in values:
            raise EvaluationError(
                f"expected the metric eval_best = {config.eval_best}; found {', '.join(map(settings.metric, values))}. "
                "pass@k exists only if each score is 1 for a right or 0 for a wrong answer. Fix eval_best."
            )
        return {"held_out": chosen.digest, "result": {"metric": settings.metric(name), "value": values[name]}}

    async def _evaluate_set(self, pace: EvaluationPace, held_out: HeldOutSet, first_row: int, first_answer: int) -> _Result:
        """Args: first_row, first_answer: the numbers of the set's first prompt and answer within the evaluation."""
        version = pace.version
        settings, count = held_out.settings, held_out.settings.answers
        samples = await self._answers(pace, held_out)
        responses, questions = self._questions(version, held_out, samples, first_answer)
        starts = range(0, len(questions), _SCORED_AT_ONCE)
        batches = await together([self._rewards.score(questions[start : start + _SCORED_AT_ONCE]) for start in starts])
        results = [result for batch in batches for result in batch]
        scores = [result.score for result in results]
        lines = [
            {
                "version": version,
                "row": first_row + place // count,
                **({"set": settings.name} if settings.name else {}),
                **({"answer": place % count} if count > 1 else {}),
                **answer_line(*parts),
            }
            for place, parts in enumerate(zip(held_out.asked(), samples, responses, results, strict=True))
        ]
        name = metric_name(self._rewards.measure_correctness, scores)
        several = answer_metrics(_groups(scores, count), _groups(responses, count), name == "accuracy", settings.pattern)
        return _Result({name: sum(scores) / len(scores), **several}, part_means(results), lines)

    async def _write(self, version: int, lines: Sequence[dict[str, Any]]) -> None:
        """Writes the file of a version's answers. If this fails, emits a notice, since the result itself is known."""
        path = self._config.run_dir / "samples" / f"evaluation_{version:04d}.jsonl"
        text = "".join(json.dumps(line) + "\n" for line in lines)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(write_atomically, path, text)
        except OSError as error:
            logger.warning("no file of the answers of version %d: %s", version, error)
            notice = f"the answers of the evaluation of version {version} could not be written: {error}"
            await self._run.emit({"kind": "notice", "service": "orchestrator", "text": notice})

    async def _answers(self, pace: EvaluationPace, held_out: HeldOutSet) -> list[PartialRollout]:
        """The answers to each prompt, prompt by prompt. Their seeds depend on the prompt's position in its set and not on the version."""
        version = pace.version
        config, count = self._config, held_out.settings.answers
        capacity = asyncio.Semaphore(max(1, config.rollout.max_num_seqs * max(1, len(self._pool)) // count))

        async def answer(position: int, prompt: Prompt) -> list[PartialRollout]:
            wanted = Generation(
                run_id=self._run.run_id,
                name="-".join(filter(None, ("eval", str(version), held_out.settings.name, str(position)))),
                prompt_ids=prompt.ids,
                count=count,
                max_new=config.rollout.max_new_tokens,
                temperature=0.0 if count == 1 else held_out.settings.temperature,
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
            if record := pace.add(count, time.monotonic()):
                await self._run.emit(record)
            return list(samples)

        groups = await together([answer(position, prompt) for position, prompt in enumerate(held_out.prompts)])
        return [sample for group in groups for sample in group]

    def _questions(
        self, version: int, held_out: HeldOutSet, samples: Sequence[PartialRollout], first: int
    ) -> tuple[list[str], list[Question]]:
        """The responses as text, and the questions to score. `first`: number of the set's first answer within the evaluation."""
        ids = [sample.token_ids().tolist() for sample in samples]
        clean, raw = self._template.decode(ids, special=False), self._template.decode(ids, special=True)
        questions = [
            Question(
                (self._run.run_id, "eval", version, first + i),
                prompt.plain,
                clean[i],
                raw[i],
                prompt.label,
                prompt.metadata_json,
                prompt.text,
                tuple(ids[i]),
            )
            for i, prompt in enumerate(held_out.asked())
        ]
        return clean, questions


def _groups(values: Sequence[Value], count: int) -> list[Sequence[Value]]:
    """Consecutive values, `count` at a time."""
    return [values[start : start + count] for start in range(0, len(values), count)]


def answer_line(prompt: Prompt, sample: PartialRollout, response: str, result: reward_pb2.ScoreResult) -> dict[str, Any]:
    """The line of an answer, with the fields of a training sample's line."""
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
        correctness: whether the reward is 1 for a right and 0 for a wrong answer (a weight may still scale it).
    """
    return "accuracy" if correctness and set(scores) <= {0.0, 1.0} else "score"
