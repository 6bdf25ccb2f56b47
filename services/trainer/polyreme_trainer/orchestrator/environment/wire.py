"""Messages on the stream of an episode.

Invariant: what a server says is checked before it reaches a record.
"""

import asyncio
import math
from contextlib import suppress

import grpc

from polyreme.api.v1 import environment_pb2
from polyreme.experience.records import ToolCall
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError

_SHOWN_CHARS = 1 << 14


async def send(call: grpc.aio.StreamStreamCall, request: environment_pb2.RunRequest) -> None:
    """Sends a message. A call that has ended says so, and why, at the next read."""
    with suppress(asyncio.InvalidStateError):
        await call.write(request)


class Outbox:
    """Sends the messages to an agent's server in their order. What is told of a turn while earlier messages wait is one message."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self._call = call
        self._waiting: list[environment_pb2.RunRequest] = []
        self._deltas: dict[int, environment_pb2.Delta] = {}  # those that wait, by the numbers of their requests
        self._filled = asyncio.Event()

    def put(self, request: environment_pb2.RunRequest) -> None:
        """Adds a message."""
        self._waiting.append(request)
        self._filled.set()

    def tell(self, delta: environment_pb2.Delta) -> None:
        """Adds to what is told of a turn."""
        if (waiting := self._deltas.get(delta.number)) is not None:
            waiting.text += delta.text
            return
        self.put(request := environment_pb2.RunRequest(delta=delta))
        self._deltas[delta.number] = request.delta

    async def run(self) -> None:
        """Sends. Never returns."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._waiting:
                request = self._waiting.pop(0)
                self._deltas.pop(request.delta.number, None)
                await send(self._call, request)


def read_calls(message: environment_pb2.Ask | environment_pb2.Ending | environment_pb2.SessionExchange) -> list[ToolCall]:
    """The tool calls of a message."""
    return [
        ToolCall(call.name, call.arguments, call.result[:_SHOWN_CHARS], max(0.0, call.seconds), call.error)
        for call in message.calls
    ]


def finite(reward: float) -> float:
    """The reward. Raises EpisodeError."""
    if not math.isfinite(reward):
        raise EpisodeError(f"expected a finite reward; found {reward}")
    return reward
