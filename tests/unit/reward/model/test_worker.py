"""Batches of texts for a reward model: the plan, and the process that follows it."""

import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polyreme.isolation.wire import encode, receive
from polyreme_reward.items import Item, Outcome, RewardError, Status, failed, ok
from polyreme_reward.model.worker import next_batch, run

SETUP = {"options": {"batch_tokens": 100}}


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 2000))
def test_a_batch_has_the_oldest_and_keeps_to_the_budget(lengths: list[int], budget: int) -> None:
    batch = next_batch(lengths, budget)
    chosen = [lengths[position] for position in batch]
    assert 0 in batch and len(set(batch)) == len(batch)
    assert chosen == sorted(chosen)
    assert len(batch) == 1 or max(chosen) * len(batch) <= budget
    left_out = [length for position, length in enumerate(lengths) if position not in batch]
    assert not [length for length in left_out if min(chosen) < length < max(chosen)], "texts of neighbouring lengths are together"
    assert not [n for n in left_out if max(n, *chosen) * (len(batch) + 1) <= budget], "every text that fits is in the batch"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_every_text_is_batched(lengths: list[int], budget: int) -> None:
    waiting = list(enumerate(lengths))
    while waiting:
        batch = next_batch([length for _, length in waiting], budget)
        waiting = [entry for position, entry in enumerate(waiting) if position not in set(batch)]


class Recorder:
    """Replaces a classifier: the score of a text is its length, and `batches` has the lengths of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.called, self.may_go = threading.Event(), threading.Event()

    def encode(self, item: Item) -> list[int]:
        if not item.response:
            raise RewardError("nothing to score")
        return [1] * len(item.response)

    def score(self, batch: Sequence[list[int]]) -> list[Outcome]:
        self.called.set()
        self.may_go.wait(60)
        self.batches.append([len(ids) for ids in batch])
        return [ok(float(len(ids))) if len(ids) != 13 else failed(Status.INVALID, "unlucky") for ids in batch]


def test_the_process_batches_what_arrived_meanwhile() -> None:
    ours, theirs = socket.socketpair()
    recorder = Recorder()
    status: list[int] = []
    thread = threading.Thread(target=lambda: status.append(run(theirs, recorder, SETUP)))
    thread.start()
    lengths = [7, 50, 8, 13, 49, 9, 0, 200]
    for number, length in enumerate(lengths):  # each in a separate frame, like those of several calls
        ours.sendall(encode([[number, tuple(Item("", "p", "x" * length))]]))
        assert recorder.called.wait(60), "the first item is scored before the others arrive"
    recorder.may_go.set()
    answers: dict[int, list[Any]] = {}
    begun: list[int] = []
    while len(answers) < len(lengths):
        said = receive(ours)
        assert {number for number, *_ in said["done"]} <= set(begun), "no answer but for what was said to be under way"
        begun = said["begin"] or begun
        answers |= {answer[0]: answer[1:] for answer in said["done"]}
    ours.close()
    thread.join(60)
    assert status == [0]
    assert [answers[n][:2] for n in (0, 1, 7)] == [[1, 7.0], [1, 50.0], [1, 200.0]]
    assert (answers[3], answers[6]) == ([4, 0.0, "unlucky"], [2, 0.0, "nothing to score"])
    assert recorder.batches[0] == [7] and recorder.batches[-1] == [200] and [49, 50] in recorder.batches
    assert max(map(len, recorder.batches)) >= 3, recorder.batches
    theirs.close()


def test_a_failing_classifier_reports_the_reason_and_ends() -> None:
    class Broken(Recorder):
        def score(self, batch: Sequence[list[int]]) -> list[Outcome]:
            raise RuntimeError("device-side assert")

    ours, theirs = socket.socketpair()
    ours.sendall(encode([[5, tuple(Item("", "p", "r"))]]))
    assert run(theirs, Broken(), SETUP) == 1
    said = [receive(ours) for _ in range(4)]
    assert [list(frame) for frame in said] == [["begin", "done"], ["begin", "done"], ["begin", "done"], ["broken"]]
    assert (said[2]["begin"], "device-side assert" in json.dumps(said[3])) == ([5], True)
    ours.close()
    theirs.close()
