"""The conversation of an episode, for display.

Invariant: it has the order of the turns' numbers, whichever turn ends first.
"""

from collections.abc import Mapping, Sequence

from polyreme.dataset.chat import Message


class Transcript:
    """What each turn adds. `prompt`: the text that stands for the row's own prompt."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._turns: dict[int, list[Message]] = {}

    def add(self, number: int, messages: Sequence[Message], text: str, trajectory: int, turn: int) -> None:
        """Adds a turn: what was asked (none: the row's prompt), the answer, and its place, which is the turn there."""
        self._turns[number] = [
            *self._asked(messages),
            {"role": "assistant", "content": text, "trajectory": trajectory, "turn": turn},
        ]

    def added(self, number: int) -> list[Message]:
        """What a turn has added."""
        return self._turns[number]

    def restore(self, number: int, messages: list[Message]) -> None:
        """Adds a turn as `added` told it."""
        self._turns[number] = messages

    def add_withdrawn(self, number: int, messages: Sequence[Message], text: str) -> None:
        """Adds a turn that was withdrawn, with what had been sampled of it."""
        self._turns[number] = [*self._asked(messages), {"role": "assistant", "content": text}]
        self.withdraw(number)

    def withdraw(self, number: int) -> None:
        """Shows a turn as withdrawn, without a place."""
        bare = [{key: each[key] for key in each if key not in ("trajectory", "turn")} for each in self._turns[number]]
        self._turns[number] = [{**message, "withdrawn": True} for message in bare]

    def messages(self, places: Mapping[int, int]) -> list[Message]:
        """All messages. `places`: those of the trajectories in the record, by their numbers."""
        shown = [message for number in sorted(self._turns) for message in self._turns[number]]
        return [{**each, "trajectory": places[each["trajectory"]]} if "turn" in each else each for each in shown]

    def _asked(self, messages: Sequence[Message]) -> list[Message]:
        """The messages behind the last answer among them: those before it have been shown, or are in the trajectory's prompt."""
        if not messages:
            return [{"role": "user", "content": self._prompt}]
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        return list(messages[answers[-1] + 1 :] if answers else messages)
