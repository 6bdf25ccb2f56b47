"""The scored answers to held-out prompts: single responses that the rewards score, or episodes of an environment.

Invariant: every token of an answer is one version's. Nothing of it reaches the experience log.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import xxhash

from polyreme.config.evaluation import EvaluationSet
from polyreme.experience.ledger import Admission
from polyreme.experience.metric_records import EvaluationProgress
from polyreme.experience.records import GroupRecord, RewardPart, episode_fields
from polyreme.experience.run import Run
from polyreme.process.tasks import together
from polyreme_trainer.data.prompt_store import Prompt
from polyreme_trainer.orchestrator.environment.episodes import Episodes
from polyreme_trainer.orchestrator.environment.finished import Finished
from polyreme_trainer.orchestrator.environment.protocol import Environment, EpisodeError, Task
from polyreme_trainer.orchestrator.generation.generate import Generation
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollout, Span
from polyreme_trainer.orchestrator.generation.sampler import ReplicaSampler
from polyreme_trainer.orchestrator.prompts.prompt_order import sequence_seed
from polyreme_trainer.orchestrator.scoring.reward_client import RewardClient
from polyreme_trainer.orchestrator.scoring.score_call import Question

PROGRESS_SECONDS = 10.0
"""Seconds between two progress reports of an evaluation. A shorter evaluation has no report."""
_SCORED_AT_ONCE = 64


class EvaluationError(Exception):
    """This version could not be evaluated. Training continues."""


@dataclass(frozen=True)
class HeldOutSet:
    """A set of held-out prompts, and how each is answered."""

    settings: EvaluationSet
    prompts: Sequence[Prompt]

    @cached_property
    def digest(self) -> str:
        """The digest of inputs that determine its results besides policy and rewards: the prompts and how each is answered."""
        settings = self.settings
        several = (settings.temperature, settings.pattern) if settings.answers > 1 else ()
        found = xxhash.xxh3_64(json.dumps([settings.answers, *several]).encode())
        for prompt in self.prompts:
            found.update(json.dumps([prompt.ids.tolist(), prompt.plain, prompt.label, prompt.metadata_json]).encode())
        return found.hexdigest()

    @property
    def temperature(self) -> float:
        """The temperature at which it is answered: 0, greedily, with a single answer."""
        return 0.0 if self.settings.answers == 1 else self.settings.temperature

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

    def add(self, answers: int, now: float) -> EvaluationProgress | None:
        """Counts at least one answer. Returns a record to emit if the previous, or the first answer, is PROGRESS_SECONDS old."""
        if not self.answered:
            self.began, self.reported, self.first = now, now, answers
        self.answered += answers
        if now - self.reported < PROGRESS_SECONDS:
            return None
        self.reported = now
        left = (now - self.began) * (self.asked - self.answered) / (self.answered - self.first)
        return EvaluationProgress(version=self.version, answered=self.answered, asked=self.asked, seconds_left=round(left, 1))


@dataclass(frozen=True)
class ScoredAnswer:
    """A scored answer.

    Attributes:
        tokens: number of sampled tokens.
        finish_reason: one of pb.FINISH_REASON_...
        more: further fields of its line.
    """

    prompt: Prompt
    response: str
    score: float
    parts: Sequence[RewardPart]
    tokens: int
    finish_reason: int
    more: Mapping[str, object] = field(default_factory=dict)


class HeldOutAnswers(Protocol):
    """Where a set's scored answers come from."""

    @property
    def measure_correctness(self) -> bool:
        """Whether every score is 1 for a right or 0 for a wrong answer."""

    async def answer(self, pace: EvaluationPace, held_out: HeldOutSet, first: int) -> list[ScoredAnswer]:
        """The answers, prompt by prompt. Their seeds depend on the prompt's position in its set and not on the version.

        Args:
            first: the number of the set's first answer within the evaluation.

        Raises:
            EvaluationError, GenerateError, ScoreError, EpisodeError, DataError: there is no answer to a prompt.
            UnavailableError: there is no replica, or no server that scores.
        """


def make_answers(
    run: Run, sampler: ReplicaSampler, rewards: RewardClient | None, environments: Mapping[str, Environment]
) -> dict[str, HeldOutAnswers]:
    """The answers in each environment, by its name in `RunConfig.environments`; none where nothing scores them."""
    config = sampler.config
    rewarded = {each.played_in: config.is_rewarded(each) for each in config.evaluation_sets}
    made: dict[str, HeldOutAnswers] = {}
    for name, environment in environments.items():
        scorer = rewards if rewarded.get(name) else None
        if isinstance(environment, Episodes):
            made[name] = EpisodeAnswers(run, sampler, environment, scorer, config.environments[name].correctness)
        elif scorer is not None:
            made[name] = SingleAnswers(run, sampler, scorer)
    return made


class SingleAnswers:
    """One response to each prompt, scored by the rewards."""

    def __init__(self, run: Run, sampler: ReplicaSampler, rewards: RewardClient) -> None:
        self._run, self._sampler, self._rewards = run, sampler, rewards

    @property
    def measure_correctness(self) -> bool:
        return self._rewards.measure_correctness

    async def answer(self, pace: EvaluationPace, held_out: HeldOutSet, first: int) -> list[ScoredAnswer]:
        capacity = _capacity(self._sampler, held_out)
        asked = [self._sampled(pace, held_out, position, capacity) for position in range(len(held_out.prompts))]
        samples = [sample for group in await together(asked) for sample in group]
        ids = [sample.token_ids().tolist() for sample in samples]
        clean, raw = (self._sampler.template.decode(ids, special=special) for special in (False, True))
        questions = [
            Question(
                (self._run.run_id, "eval", pace.version, first + i),
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
        starts = range(0, len(questions), _SCORED_AT_ONCE)
        batches = await together([self._rewards.score(questions[start : start + _SCORED_AT_ONCE]) for start in starts])
        results = [result for batch in batches for result in batch]
        return [
            ScoredAnswer(
                prompt,
                response,
                result.score,
                [RewardPart(part.name, part.raw, part.weighted) for part in result.parts],
                sample.length,
                sample.finish_reason,
            )
            for prompt, sample, response, result in zip(held_out.asked(), samples, clean, results, strict=True)
        ]

    async def _sampled(
        self, pace: EvaluationPace, held_out: HeldOutSet, position: int, capacity: asyncio.Semaphore
    ) -> list[PartialRollout]:
        config, version, count = self._sampler.config, pace.version, held_out.settings.answers
        wanted = Generation(
            run_id=self._run.run_id,
            name="-".join(filter(None, ("eval", str(version), held_out.settings.name, str(position)))),
            prompt_ids=held_out.prompts[position].ids,
            count=count,
            max_new=config.rollout.max_new_tokens,
            temperature=held_out.temperature,
            stop_ids=self._sampler.template.stop_ids,
            seed=partial(sequence_seed, config.seed, position, 0),
            min_version=version,
        )
        async with capacity:
            samples = await self._sampler.sample(wanted)
        _check_version(version, [span for sample in samples for span in sample.spans])
        await _report(self._run, pace, count)
        return samples


class EpisodeAnswers:
    """Episodes of each prompt's task, scored as in training. One that fails in its environment is played again, as there.

    Args:
        rewards: score the episodes; None: their environment does.
        correctness: whether the environment's reward is 1 for a success and 0 for a failure.
    """

    def __init__(
        self, run: Run, sampler: ReplicaSampler, episodes: Episodes, rewards: RewardClient | None, correctness: bool
    ) -> None:
        self._run, self._sampler, self._episodes, self._rewards = run, sampler, episodes, rewards
        self._correctness = correctness

    @property
    def measure_correctness(self) -> bool:
        return self._correctness if self._rewards is None else self._rewards.measure_correctness

    async def answer(self, pace: EvaluationPace, held_out: HeldOutSet, first: int) -> list[ScoredAnswer]:
        capacity = _capacity(self._sampler, held_out)
        played = [self._played(pace, held_out, position, capacity, first) for position in range(len(held_out.prompts))]
        return [answer for answers in await together(played) for answer in answers]

    async def _played(
        self, pace: EvaluationPace, held_out: HeldOutSet, position: int, capacity: asyncio.Semaphore, first: int
    ) -> list[ScoredAnswer]:
        prompt, count = held_out.prompts[position], held_out.settings.answers
        async with capacity:
            found = await together([self._episode(pace.version, held_out, position, number) for number in range(count)])
        names = [(self._run.run_id, "eval", pace.version, first + position * count + number) for number in range(count)]
        found = await self._episodes.scored(Task(Admission(position, 0, pace.version), prompt), found, names)
        _check_version(pace.version, [span for samples, _ in found for sample in samples for span in sample.spans])
        await _report(self._run, pace, count)
        return [_answer(prompt, each) for each in found]

    async def _episode(self, version: int, held_out: HeldOutSet, position: int, number: int) -> Finished:
        attempts = self._sampler.config.max_attempts
        for attempt in range(attempts):  # from 0, those of training from 1
            task = Task(Admission(position, attempt, version), held_out.prompts[position])
            try:
                return await self._episodes.play_one(task, number, temperature=held_out.temperature)
            except EpisodeError:
                if attempt == attempts - 1:
                    raise
        raise AssertionError("max_attempts is at least 1")


def _answer(prompt: Prompt, episode: Finished) -> ScoredAnswer:
    """An episode as an answer, shown by its last trajectory."""
    samples, record = episode
    last = samples[-1]
    group = GroupRecord(0, 1, prompt.ids, samples, episodes=[record])
    tokens = sum(sample.sampled_tokens for sample in samples)
    return ScoredAnswer(prompt, last.text, last.score, last.parts, tokens, last.finish_reason, episode_fields(group, last))


def _capacity(sampler: ReplicaSampler, held_out: HeldOutSet) -> asyncio.Semaphore:
    """Of the prompts that are answered at the same time: as many as the replicas have slots for."""
    return asyncio.Semaphore(max(1, sampler.config.rollout.max_num_seqs * max(1, len(sampler.pool)) // held_out.settings.answers))


def _check_version(version: int, spans: Sequence[Span]) -> None:
    if strays := {span[0] for span in spans} - {version}:
        raise EvaluationError(f"expected version {version} throughout its evaluation; found tokens of {sorted(strays)}")


async def _report(run: Run, pace: EvaluationPace, answers: int) -> None:
    if record := pace.add(answers, time.monotonic()):
        await run.emit(record)
