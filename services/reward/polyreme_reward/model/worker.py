"""The main loop of a model's process: loads the model, then scores batches.

Invariant: every received text is answered once, unless the process ends; then it has reported which texts it was scoring.

Receives lists of [number, item]. Sends {"begin": numbers that are being scored, "done": [[number, status, value, message], ...]},
and {"broken": reason} before it ends because of an error.
"""

import select
import socket
from collections.abc import Sequence
from typing import Protocol

from polyreme.errors import ConfigError
from polyreme.experience.loading import Loaded
from polyreme.isolation.wire import Setup, encode, receive
from polyreme_reward.items import Item, Outcome, RewardError, Status, failed


class LoadedClassifier(Protocol):
    """A loaded classifier, as `Classifier`."""

    def encode(self, item: Item) -> list[int]: ...

    def score(self, sequences: Sequence[list[int]], /) -> list[Outcome]: ...


def load(setup: Setup, report: Loaded) -> LoadedClassifier:
    """Loads the Classifier of a setup message, and reports the fraction of its weights. Raises ConfigError."""
    try:
        from polyreme_reward.model.classifier import Classifier
    except ImportError as error:
        raise ConfigError(
            "the packages torch and transformers for a reward model",
            str(error),
            "Install them: pip install 'polyreme-reward[model]'.",
        ) from None
    return Classifier(setup["model"], setup["options"], report)


def run(channel: socket.socket, classifier: LoadedClassifier, setup: Setup) -> int:
    """Scores until the socket closes. Returns the exit status of the process."""
    waiting: list[tuple[int, list[int]]] = []  # number and token ids, oldest first
    while True:
        while not waiting or select.select([channel], [], [], 0)[0]:
            jobs = receive(channel)
            if jobs is None:
                return 0
            _say(channel, begin=[number for number, _ in jobs])
            refused = []
            for number, fields in jobs:
                try:
                    waiting.append((number, classifier.encode(Item(*fields))))
                except RewardError as error:
                    refused.append((number, failed(Status.ERROR, str(error))))
            _say(channel, done=refused)
        chosen = next_batch([len(ids) for _, ids in waiting], setup["options"]["batch_tokens"])
        numbers = [waiting[position][0] for position in chosen]
        _say(channel, begin=numbers)
        try:
            outcomes = classifier.score([waiting[position][1] for position in chosen])
        except Exception as error:  # noqa: BLE001 an accelerator may be unusable after an error
            channel.sendall(encode({"broken": failed(Status.ERROR, f"{type(error).__name__}: {error}").message}))
            return 1
        _say(channel, done=list(zip(numbers, outcomes, strict=True)))
        taken = set(chosen)
        waiting = [entry for position, entry in enumerate(waiting) if position not in taken]


def _say(channel: socket.socket, begin: list[int] | None = None, done: list[tuple[int, Outcome]] | None = None) -> None:
    answers = [[number, outcome.status, outcome.value, outcome.message] for number, outcome in done or ()]
    channel.sendall(encode({"begin": begin or [], "done": answers}))


def next_batch(lengths: Sequence[int], budget: int) -> list[int]:
    """Chooses the oldest text and the texts of most similar length that fit: their padded size is within the budget, unless it is
    the oldest alone. Pure.

    Args:
        lengths: number of tokens of each waiting text, oldest first. Not empty.
        budget: maximum of the longest length times the number of texts. A longer text is a batch of its own.

    Returns:
        Positions in `lengths`, shortest text first.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    low = high = order.index(0)
    while True:
        fits = budget // max(lengths[order[high]], 1) > high - low + 1
        shorter = low > 0 and fits
        longer = high + 1 < len(order) and budget // max(lengths[order[high + 1]], 1) > high - low + 1
        if shorter and longer:  # choose the nearer one
            longer = lengths[order[high + 1]] - lengths[0] < lengths[0] - lengths[order[low - 1]]
        if longer:
            high += 1
        elif shorter:
            low -= 1
        else:
            return order[low : high + 1]
