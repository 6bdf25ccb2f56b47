"""What plays the episodes of a server, as the service knows it.

Invariant: every call of an episode has an outcome by its deadline, whatever user code does.
"""

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from polyreme.api.v1 import environment_pb2 as pb
from polyreme_environment.contract import Moved


class FullError(Exception):
    """No further episode can be played at the moment."""


class EpisodeLostError(Exception):
    """What this episode needs was lost through no fault of it: its process, because of another one, or a server of tools."""


class WorkerLostError(EpisodeLostError):
    """Its process was lost. The server plays on in others."""


class PlayError(Exception):
    """The environment failed in this episode."""


class HostedEpisode(Protocol):
    """One episode on a server. Its calls raise PlayError, EpisodeLostError or FullError."""

    async def reset(self, row: dict[str, object], seed: int) -> Moved:
        """Begins."""
        ...

    async def step(self, answer: pb.Answer) -> Moved:
        """Takes the policy's answer."""
        ...


class Pool(Protocol):
    """What plays the episodes of a server.

    Attributes:
        draining: that no further episode may begin.
    """

    draining: bool

    @property
    def about(self) -> tuple[str, str]:
        """Version and description of the environment."""
        ...

    @property
    def available(self) -> bool:
        """Whether an episode could be played."""
        ...

    async def start(self) -> None:
        """Raises ConfigError or UnavailableError when there is no environment."""

    async def close(self) -> None: ...

    def episode(self) -> AbstractAsyncContextManager[Any]:
        """An episode, until the end of the block: a HostedEpisode, or an AgentEpisode. Raises FullError."""
        ...
