"""The finished episodes of a group in flight, which survive the orchestrator.

Invariant: an episode that is in the log is played no second time, unless a resumed learner makes its tokens too old.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from polyreme.errors import DataError
from polyreme.experience.record_codec import decode_group, encode_group
from polyreme.experience.records import EpisodeRecord, GroupRecord, SampleRecord
from polyreme_trainer.orchestrator.environment.protocol import Task
from polyreme_trainer.orchestrator.generation.rollout_parts import PartialRolloutError

Finished = tuple[list[SampleRecord], EpisodeRecord]
"""An episode's trajectories, at least one, and the episode."""


class FinishedEpisodes:
    """The finished ones of a task's `count` episodes, as a `Recoverable`.

    A part has the numbers of its episodes (their count and each as a little-endian uint32), then a Group with these episodes.
    """

    cuts = 0

    def __init__(self, task: Task, count: int) -> None:
        self._task, self._count = task, count
        self._episodes: dict[int, Finished] = {}

    def missing(self) -> list[int]:
        """The numbers of the episodes that are not finished."""
        return [number for number in range(self._count) if number not in self._episodes]

    def add(self, number: int, episode: Finished) -> None:
        self._episodes[number] = episode

    def ordered(self) -> list[Finished]:
        """The episodes in the order of their numbers; its trajectories have its place."""
        return placed([self._episodes[number] for number in sorted(self._episodes)])

    def mark(self) -> frozenset[int]:
        return frozenset(self._episodes)

    def part_since(self, mark: frozenset[int] | None) -> bytes:
        numbers = sorted(self._episodes.keys() - (mark or frozenset()))
        episodes = placed([self._episodes[number] for number in numbers])
        admission, prompt = self._task.admission, self._task.prompt
        samples, records = [sample for each, _ in episodes for sample in each], [record for _, record in episodes]
        group = GroupRecord(admission.index, admission.attempt, prompt.ids, samples, episodes=records)
        return struct.pack(f"<{len(numbers) + 1}I", len(numbers), *numbers) + encode_group(group)

    def restore(self, parts: Sequence[bytes]) -> None:
        found: dict[int, Finished] = {}
        for part in parts:
            found |= self._read(part)
        self._episodes |= found

    def _read(self, part: bytes) -> dict[int, Finished]:
        """The episodes of a part that are new enough. Raises PartialRolloutError when it is of another task."""
        try:
            (count,) = struct.unpack_from("<I", part)
            numbers = struct.unpack_from(f"<{count}I", part, 4)
            group = decode_group(part[4 * (count + 1) :])
        except (struct.error, DataError) as error:
            raise PartialRolloutError(f"expected finished episodes; found other bytes ({error})") from error
        if not np.array_equal(group.prompt_ids, self._task.prompt.ids) or max(numbers) >= self._count:
            raise PartialRolloutError("expected episodes of this task; found others")
        oldest = self._task.admission.version
        found: dict[int, Finished] = {}
        for place, (number, record) in enumerate(zip(numbers, group.episodes, strict=True)):
            samples = [sample for sample in group.samples if sample.episode == place]
            if all(sample.oldest_version >= oldest for sample in samples):
                found[number] = samples, record
        return found


def placed(episodes: Sequence[Finished]) -> list[Finished]:
    """The episodes with their places at their trajectories."""
    return [([replace(sample, episode=place) for sample in samples], record) for place, (samples, record) in enumerate(episodes)]
