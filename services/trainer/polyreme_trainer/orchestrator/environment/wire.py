"""Messages on the stream of an episode.

Invariant: what a server says is checked before it reaches a record.
"""

import asyncio
import math
from contextlib import suppress
from typing import Any

from polyreme.api.v1 import environment_pb2
from polyreme.experience.records import ToolCall
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError

_SHOWN_CHARS = 1 << 14


async def send(call: Any, request: environment_pb2.RunRequest) -> None:
    """Sends a message. A call that has ended says so, and why, at the next read."""
    with suppress(asyncio.InvalidStateError):
        await call.write(request)


def read_calls(message: Any) -> list[ToolCall]:
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
