"""The seam between the orchestrator and its environments.

Invariant: the orchestrator's loop, log and learner know no environment by name. None knows the log's states or the learner.
"""

from dataclasses import dataclass, field
from typing import Protocol

from polyreme.errors import DataError
from polyreme.experience.ledger import Admission
from polyreme.experience.records import EpisodeRecord, SampleRecord
from polyreme_trainer.data.prompt_store import Prompt
from polyreme_trainer.orchestrator.generation.generate import GenerateError
from polyreme_trainer.orchestrator.scoring.score_call import ScoreError
from polyreme_trainer.orchestrator.scoring.teacher_client import TeacherError


@dataclass(frozen=True)
class Task:
    """One attempt at a group: its place in the run, and the prompt of its row."""

    admission: Admission
    prompt: Prompt


@dataclass(frozen=True)
class Played:
    """The episodes of a task.

    Attributes:
        samples, episodes: as in GroupRecord.
        generate_seconds, score_seconds: wall-clock time of generation, or of all episodes, and of scoring after that.
    """

    samples: list[SampleRecord]
    episodes: list[EpisodeRecord] = field(default_factory=list)
    generate_seconds: float = 0.0
    score_seconds: float = 0.0


class EpisodeError(Exception):
    """An episode failed in its environment, so the attempt at its group has failed. No number replaces its reward."""


ATTEMPT_ERRORS = (GenerateError, ScoreError, TeacherError, EpisodeError, DataError)
"""The attempt at a group failed. Another one may succeed."""


class Environment(Protocol):
    """Plays the episodes of tasks."""

    async def wait_ready(self) -> None:
        """Waits for the servers that it needs. Raises UnavailableError when they do not come in time."""

    async def refresh(self) -> None:
        """Updates its servers from their leases."""

    async def close(self) -> None: ...

    async def collect(self) -> bool:
        """Appends the groups that came from outside. Returns whether the run's groups come from there, so none is admitted."""

    async def metrics(self) -> dict[str, float]:
        """Further metrics of an iteration."""

    async def play(self, task: Task) -> Played:
        """All episodes of a task.

        Raises:
            ATTEMPT_ERRORS: the attempt failed.
            UnavailableError: there is no replica, or no server that the environment needs.
        """
