"""What plays the episodes of a server, as the service knows it.

Invariant: every call of an episode has an outcome by its deadline, whatever user code does.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from polyreme.api.v1 import environment_pb2 as pb
from polyreme_environment.contract import Moved


class FullError(Exception):
    """No further episode can be played at the moment."""


class EpisodeLostError(Exception):
    """What this episode needs was lost through no fault of it: its process, because of another one, or a server of tools."""


class WorkerLostError(EpisodeLostError):
    """Its process was lost. The server plays on in others."""


class ToolLostError(EpisodeLostError):
    """A tool of it was lost. The server plays on."""


class PlayError(Exception):
    """The environment failed in this episode."""


class HostedEpisode(Protocol):
    """One episode on a server. Its calls raise PlayError, EpisodeLostError or FullError."""

    async def reset(self, row: dict[str, object], seed: int) -> Moved:
        """Begins."""

    async def step(self, answer: pb.Answer) -> Moved:
        """Takes the policy's answer."""


@dataclass(frozen=True)
class AgentMoved(Moved):
    """A request of an agent, in place of messages, or the end.

    Attributes:
        withdrawn: the number of a request that is withdrawn, in place of all else; 0: none.
        rewards: since the last one, by the numbers of their turns.
        seconds: wall-clock seconds since the last one in which no turn was sampled.
    """

    agent: pb.AgentRequest = field(default_factory=pb.AgentRequest)
    rewards: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    withdrawn: int = 0


@runtime_checkable
class StreamedEpisode(Protocol):
    """One episode that asks for turns when it likes, several at a time: an agent's, or a turn of a running product."""

    def play(self, row: dict[str, object], answers: AsyncIterator[pb.RunRequest]) -> AsyncGenerator[AgentMoved, None]:
        """Yields what it asks for, and at last how it ended; nothing more when the answers end. Raises as a `HostedEpisode`."""


class Pool(Protocol):
    """What plays the episodes of a server.

    Attributes:
        draining: that no further episode may begin.
    """

    draining: bool

    @property
    def about(self) -> tuple[str, str]:
        """Version and description of the environment."""

    @property
    def available(self) -> bool:
        """Whether an episode could be played."""

    async def start(self) -> None:
        """Raises ConfigError or UnavailableError when there is no environment."""

    async def close(self) -> None: ...

    def episode(self) -> AbstractAsyncContextManager[HostedEpisode | StreamedEpisode]:
        """An episode, until the end of the block. Raises FullError or EpisodeLostError."""
