"""Evaluates one policy version: one greedy answer or several sampled ones to each prompt of each held-out set, by the replicas,
and the rewards or the environment, of training.

Invariant: a result belongs to exactly one version, and its samples never reach the experience log: they are in the run directory,
samples/evaluation_VERSION.jsonl, before the result is on record.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from polyreme.api.v1.experience_pb2 import FinishReason
from polyreme.config.evaluation import best_metric
from polyreme.config.run import RunConfig
from polyreme.errors import DataError
from polyreme.experience.metric_records import Evaluation, ServiceNotice
from polyreme.experience.run import Run
from polyreme.rundir.evaluations import evaluation_of
from polyreme.rundir.run_records import write_atomically
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError
from polyreme_trainer.orchestrator.evaluation.answer_metrics import answer_metrics
from polyreme_trainer.orchestrator.evaluation.answers import (
    EvaluationError,
    EvaluationPace,
    HeldOutAnswers,
    HeldOutSet,
    ScoredAnswer,
)
from polyreme_trainer.orchestrator.generation.generate import GenerateError
from polyreme_trainer.orchestrator.scoring.score_call import ScoreError

EXAMPLES = 5

Value = TypeVar("Value")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Result:
    """The results of a set's evaluation: its metrics and the means of its rewards by name, and a line for each answer."""

    metrics: Mapping[str, float]
    parts: Mapping[str, float]
    lines: Sequence[dict[str, object]]


class Evaluator:
    """Evaluates versions on sets of held-out prompts, one set after the other.

    Args:
        answers: those in the environment of each set, by its name.
    """

    def __init__(self, run: Run, config: RunConfig, sets: Sequence[HeldOutSet], answers: Mapping[str, HeldOutAnswers]) -> None:
        self._run, self._config, self._sets, self._answers = run, config, sets, answers

    async def evaluate(self, version: int) -> float:
        """Emits the `eval` record of a version, and returns the result that decides about the best version.

        Raises:
            EvaluationError: generation, scoring or environment failed, another version sampled tokens, or no metric `eval_best`.
            UnavailableError: there is no replica, or no server that scores.
        """
        begin = time.monotonic()
        results: list[_Result] = []
        pace = EvaluationPace(version, sum(len(each.asked()) for each in self._sets))
        try:
            for held_out in self._sets:
                rows = sum(len(each.prompts) for each in self._sets[: len(results)])
                results.append(await self._evaluate_set(pace, held_out, rows, sum(len(each.lines) for each in results)))
        except (GenerateError, ScoreError, EpisodeError, DataError) as error:
            raise EvaluationError(f"version {version} could not be evaluated: {error}") from error
        await self._write(version, [line for each in results for line in each.lines])
        found = list(zip(self._sets, results, strict=True))
        named = [(each.settings, result) for each, result in found]
        digest, best = self._deciding(found)
        record = Evaluation(
            version=version,
            metrics={
                **{settings.metric(name): value for settings, result in named for name, value in result.metrics.items()},
                **{
                    f"{each.name}/reward/{part}": mean
                    for each, result in named
                    if each.name
                    for part, mean in result.parts.items()
                },
            },
            held_out=digest,
            result=best,
            parts=next((dict(result.parts) for each, result in named if not each.name), {}),
            samples=sum(len(each.prompts) for each in self._sets),
            seconds=time.monotonic() - begin,
            examples=[
                {key: line[key] for key in ("prompt", "response", "label", "score")}
                for line in results[0].lines[: EXAMPLES * self._sets[0].settings.answers : self._sets[0].settings.answers]
            ],
        )
        await self._run.emit(record)
        return evaluation_of(record)[1]

    def _deciding(self, found: Sequence[tuple[HeldOutSet, _Result]]) -> tuple[str, dict[str, object] | None]:
        """The digest of the set that decides about the best version, and the deciding metric with its value; None: it is the mean
        of the first set, which has no name."""
        config = self._config
        settings, metric = best_metric([each.settings for each, _ in found], config.eval_best, config.part_names)
        chosen, result = next((each, result) for each, result in found if each.settings is settings)
        if config.eval_best is None and not settings.name:
            return chosen.digest, None
        values = {**result.metrics, **{f"reward/{name}": mean for name, mean in result.parts.items()}}
        name = next(iter(result.metrics)) if metric == "mean" else metric
        if name not in values:
            raise EvaluationError(
                f"expected the metric eval_best = {config.eval_best}; found {', '.join(map(settings.metric, values))}. "
                "pass@k exists only if each score is 1 for a right or 0 for a wrong answer. Fix eval_best."
            )
        return chosen.digest, {"metric": settings.metric(name), "value": values[name]}

    async def _evaluate_set(self, pace: EvaluationPace, held_out: HeldOutSet, first_row: int, first_answer: int) -> _Result:
        """Args: first_row, first_answer: the numbers of the set's first prompt and answer within the evaluation."""
        settings, count = held_out.settings, held_out.settings.answers
        played = self._answers[settings.played_in]
        answers = await played.answer(pace, held_out, first_answer)
        scores, responses = [answer.score for answer in answers], [answer.response for answer in answers]
        lines = [
            {
                "version": pace.version,
                "row": first_row + place // count,
                **({"set": settings.name} if settings.name else {}),
                **({"answer": place % count} if count > 1 else {}),
                **answer_line(answer),
            }
            for place, answer in enumerate(answers)
        ]
        name = metric_name(played.measure_correctness, scores)
        several = answer_metrics(_groups(scores, count), _groups(responses, count), name == "accuracy", settings.pattern)
        return _Result({name: sum(scores) / len(scores), **several}, part_means(answers), lines)

    async def _write(self, version: int, lines: Sequence[dict[str, object]]) -> None:
        """Writes the file of a version's answers. If this fails, emits a notice, since the result itself is known."""
        path = self._config.run_dir / "samples" / f"evaluation_{version:04d}.jsonl"
        text = "".join(json.dumps(line) + "\n" for line in lines)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(write_atomically, path, text)
        except OSError as error:
            logger.warning("no file of the answers of version %d: %s", version, error)
            notice = f"the answers of the evaluation of version {version} could not be written: {error}"
            await self._run.emit(ServiceNotice(service="orchestrator", text=notice))


def _groups(values: Sequence[Value], count: int) -> list[Sequence[Value]]:
    """Consecutive values, `count` at a time."""
    return [values[start : start + count] for start in range(0, len(values), count)]


def answer_line(answer: ScoredAnswer) -> dict[str, object]:
    """The line of an answer, with the fields of a training sample's line."""
    return {
        "prompt": answer.prompt.text,
        "response": answer.response,
        "label": answer.prompt.label,
        "score": answer.score,
        "parts": {part.name: {"raw": part.raw, "weighted": part.weighted} for part in answer.parts},
        "tokens": answer.tokens,
        "finish_reason": FinishReason.Name(answer.finish_reason).removeprefix("FINISH_REASON_").lower(),
        **answer.more,
    }


def part_means(answers: Sequence[ScoredAnswer]) -> dict[str, float]:
    """The mean raw value of each part, over the answers that have it."""
    values: dict[str, list[float]] = {}
    for answer in answers:
        for part in answer.parts:
            values.setdefault(part.name, []).append(part.raw)
    return {name: sum(each) / len(each) for name, each in values.items()}


def metric_name(correctness: bool, scores: Sequence[float]) -> str:
    """The name of an evaluation's mean score: `accuracy` when every score is 1 for a right or 0 for a wrong answer, else `score`.

    Args:
        correctness: whether the reward is 1 for a right and 0 for a wrong answer (a weight may still scale it).
    """
    return "accuracy" if correctness and set(scores) <= {0.0, 1.0} else "score"
