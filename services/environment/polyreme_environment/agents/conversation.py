"""Which of an agent's earlier turns a request continues.

Invariant: a request continues the longest turn whose messages it repeats, and only if nothing behind them is an answer. What
clients change in an answer that they send back does not matter: its outer blanks, its thoughts, the blanks in the arguments of
its calls, which are known by their ids. A text continues the longest turn whose text it repeats. Pure.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from polyreme.dataset.chat import Message


@dataclass(frozen=True)
class _Kept:
    """A turn: the one before, the messages behind that, how many first ones are no part of the conversation, and the answer."""

    after: int
    messages: list[Message]
    instructions: int
    answer: Message


class AgentConversation:
    """The turns of a session, by their numbers from 1. They come in any order."""

    def __init__(self) -> None:
        self._turns: dict[bytes, int] = {}  # digest of the messages up to and with the answer -> number of the turn
        self._texts: dict[str, int] = {}  # the same for a text
        self._kept: dict[int, _Kept | None] = {}

    def place(self, messages: Sequence[Message], known_by: Sequence[bytes]) -> tuple[int, list[Message]]:
        """The number of the turn that a request follows, and the messages behind it; (0, all messages) if it follows none.

        Args:
            messages: at least one; the last one is not an answer.
            known_by: their digests.
        """
        for end in range(len(messages) - 1, 0, -1):
            if messages[end]["role"] == "assistant":
                break
            if (turn := self._turns.get(known_by[end - 1])) is not None:
                return turn, list(messages[end:])
        return 0, list(messages)

    def place_text(self, text: str) -> tuple[int, str]:
        """The number of the turn that a text follows, and the text behind it; (0, all of it) if it follows none."""
        begins = max((known for known in self._texts if text.startswith(known)), key=len, default="")
        return self._texts.get(begins, 0), text[len(begins) :]

    def add(
        self, number: int, messages: Sequence[Message], known_by: Sequence[bytes], answer: Message, *, instructions: int = 0
    ) -> None:
        """Adds the answer to a request, as a turn of this number. `instructions`: see `TurnRequest`."""
        after, behind = self.place(messages, known_by)
        self._kept[number] = _Kept(after, behind, instructions, answer)
        digest = _digest(known_by[-1], answer)
        self._turns[digest] = max(number, self._turns.get(digest, 0))

    def add_text(self, number: int, text: str | None) -> None:
        """Adds the answer to a prompt: the text of both, or None where the prompt was tokens."""
        self._kept[number] = None
        if text is not None:
            self._texts[text] = max(number, self._texts.get(text, 0))

    def history(self, number: int, *, instructions: bool = False) -> list[Message] | None:
        """The conversation up to a turn, with or without its instructions; None: there is none of messages."""
        found: list[Message] = []
        while (turn := self._kept.get(number)) is not None:
            found = [*turn.messages[0 if turn.after or instructions else turn.instructions :], turn.answer, *found]
            number = turn.after
        return found or None


def digests(messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[bytes]:
    """By which a conversation is known up to each of its messages. Other tools make another conversation, since the template
    shows them at its beginning."""
    return list(accumulate(messages, _digest, initial=json.dumps(tools, sort_keys=True).encode()))[1:]


def _digest(before: bytes, message: Message) -> bytes:
    return hashlib.sha256(before + json.dumps(_known_by(message)).encode()).digest()


def _known_by(message: Message) -> list[object]:
    """What of a message tells it from another one."""
    if message["role"] == "assistant":
        return ["assistant", message["content"].strip(), [call.get("id") for call in message.get("tool_calls") or ()]]
    return [message["role"], message["content"], message.get("tool_call_id")]
