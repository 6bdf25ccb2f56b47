"""Finished episodes' scores: those of their environment, or of the run's rewards; and the teacher's view of what was sampled.

Invariant: with rewards, an episode's score is theirs alone; what its environment gave is kept as a part without weight. A reward
is asked once about an episode, with the whole conversation. The teacher is asked about every trajectory that is trained on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from polyreme.experience.records import EpisodeRecord, SampleRecord
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.environment.finished import Finished
from polyreme_trainer.orchestrator.environment.protocol import Task
from polyreme_trainer.orchestrator.scoring.score_call import Question
from polyreme_trainer.orchestrator.scoring.scoring import Float32, Scored, Scoring, by_rewards

EpisodeName = tuple[str | int, ...]
"""What distinguishes an episode from all others of the run."""
_SHOWN_CHARS = 1 << 14


async def scored(
    scoring: Scoring, template: Template, task: Task, episodes: Sequence[Finished], names: Sequence[EpisodeName]
) -> list[Finished]:
    """The episodes with their final scores. Raises ScoreError, TeacherError, UnavailableError as `Scoring.score`."""
    taught = [sample for samples, _ in episodes for sample in samples if sample.loss_mask.any()]
    results, logprobs = await scoring.ask(
        [_question(template, task, *pair) for pair in zip(episodes, names, strict=True)] if scoring.rewards else (),
        [(_prompt(task, sample), sample.token_ids) for sample in taught],
    )
    by_sample = {id(sample): numbers for sample, numbers in zip(taught, logprobs, strict=bool(logprobs))}
    found = [([_taught(sample, by_sample.get(id(sample))) for sample in samples], record) for samples, record in episodes]
    found = [_rewarded(*pair) for pair in zip(found, results, strict=True)] if results else found
    return [(samples, _shown(record)) for samples, record in found]


def _question(template: Template, task: Task, episode: Finished, name: EpisodeName) -> Question:
    _, record = episode
    sample, start, end = _last_answer(episode)
    context = np.concatenate([_prompt(task, sample), sample.token_ids[:start]]).tolist()
    ids, prompt = sample.token_ids[start:end].tolist(), task.prompt
    (response,), (seen, raw) = template.decode([ids], special=False), template.decode([context, ids], special=True)
    messages = [
        {key: value for key, value in message.items() if key not in ("trajectory", "turn")}
        for message in json.loads(record.messages)
        if not message.get("withdrawn")
    ]
    return Question(
        name, prompt.plain, response, raw, prompt.label, prompt.metadata_json, seen, tuple(ids), json.dumps(messages)
    )  # fmt: skip


def _last_answer(episode: Finished) -> tuple[SampleRecord, int, int]:
    """The trajectory of the answer that was sampled last, and its tokens there."""
    samples, record = episode
    last = next(message for message in reversed(json.loads(record.messages)) if "turn" in message)
    sample = samples[last["trajectory"]]
    turn = sample.turns[last["turn"]]
    return sample, turn.start, turn.end


def _rewarded(episode: Finished, scored: Scored) -> Finished:
    """The episode with the rewards' score. Numbers per token are those of its last answer."""
    samples, record = episode
    last, start, end = _last_answer(episode)
    judged = by_rewards(scored[0], None, scored[1])
    parts = [*judged.parts, *(part._replace(weighted=0.0) for part in samples[0].parts)]
    rewarded = []
    for sample in samples:
        turns = tuple(turn._replace(reward=0.0) for turn in sample.turns)
        numbers = None
        if judged.token_rewards is not None and sample is last:
            numbers = np.zeros(len(sample), np.float32)
            numbers[start:end] = judged.token_rewards
        rewarded.append(
            replace(sample, score=judged.score, parts=parts, turns=turns, token_rewards=numbers, calls=judged.calls)
        )  # fmt: skip
    return rewarded, record


def _taught(sample: SampleRecord, logprobs: Float32 | None) -> SampleRecord:
    """The sample with the teacher's log-probabilities, 0 outside of the turns."""
    if logprobs is None:
        return sample
    sampled = np.zeros(len(sample), dtype=bool)
    for turn in sample.turns:
        sampled[turn.start : turn.end] = True
    return replace(sample, teacher_logprobs=np.where(sampled, logprobs, np.float32(0.0)))


def _prompt(task: Task, sample: SampleRecord) -> np.ndarray:
    return task.prompt.ids if sample.prompt_ids is None else sample.prompt_ids


def _shown(record: EpisodeRecord) -> EpisodeRecord:
    """The record with messages that are cut for display."""
    return record._replace(messages=json.dumps([_cut(message) for message in json.loads(record.messages)]))


def _cut(message: Mapping[str, object]) -> Mapping[str, object]:
    content = message.get("content")
    is_long = isinstance(content, str) and len(content) > _SHOWN_CHARS
    return {**message, "content": f"{content[:_SHOWN_CHARS]} ..."} if is_long and isinstance(content, str) else message
