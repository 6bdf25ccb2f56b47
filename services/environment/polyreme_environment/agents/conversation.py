"""Which of an agent's earlier turns a request continues.

Invariant: a request continues the longest turn whose messages it repeats, and only if nothing behind them is an answer. What clients change in an
answer that they send back does not matter: its outer blanks, its thoughts, the blanks in the arguments of its calls, which are known by their
ids. Pure.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, Any]


class AgentConversation:
    """The turns of a session, in the order of sampling."""

    def __init__(self) -> None:
        self._turns: dict[bytes, int] = {}  # digest of the messages up to and with the answer -> number of the turn, from 1
        self._count = 0

    def place(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> tuple[int, list[Message]]:
        """The number of the turn that a request follows, and the messages behind it; (0, all messages) if it follows none.

        Args:
            messages: at least one; the last one is not an answer.
            tools: those of the request. Other tools are another conversation, since the template shows them at its beginning.
        """
        digests = list(_digests(messages, tools))
        for end in range(len(messages) - 1, 0, -1):
            if messages[end]["role"] == "assistant":
                break
            if (turn := self._turns.get(digests[end - 1])) is not None:
                return turn, list(messages[end:])
        return 0, list(messages)

    def add(self, messages: Sequence[Message], answer: Message, tools: Sequence[Message] = ()) -> int:
        """Adds the answer to a request. Returns the number of the turn."""
        self._count += 1
        *_, digest = _digests([*messages, answer], tools)
        self._turns[digest] = self._count
        return self._count


def _digests(messages: Sequence[Message], tools: Sequence[Message]) -> Iterator[bytes]:
    """A digest of the tools and the messages up to each one."""
    digest = json.dumps(tools, sort_keys=True).encode()
    for message in messages:
        digest = hashlib.sha256(digest + json.dumps(_known_by(message)).encode()).digest()
        yield digest


def _known_by(message: Message) -> list[Any]:
    """What of a message tells it from another one."""
    if message["role"] == "assistant":
        return ["assistant", message["content"].strip(), [call.get("id") for call in message.get("tool_calls") or ()]]
    return [message["role"], message["content"], message.get("tool_call_id")]
