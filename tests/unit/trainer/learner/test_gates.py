"""Gates pass results that agree, fail others, and align tokens with their predictions."""

import numpy as np
import pytest

from polyreme.errors import GateError
from polyreme_trainer.learner import gates
from polyreme_trainer.learner.gates import IGNORE, Answer, Gate


def test_a_value_beyond_its_limit_or_not_a_number_stops_the_run() -> None:
    Gate("x", 0.5, 1.0, "Do this.").check()
    for value in (1.5, float("nan"), float("inf")):
        with pytest.raises(GateError) as caught:
            Gate("x", value, 1.0, "Do this.").check()
        assert (caught.value.expected, caught.value.do) == ("x of at most 1", "Do this.")


def test_stack_puts_each_response_token_over_its_prediction() -> None:
    first = Answer(np.array([5, 6, 7]), np.array([8, 9]), np.zeros(2, dtype=np.float32))
    second = Answer(np.array([3]), np.array([4]), np.zeros(1, dtype=np.float32))
    ids, targets = gates.stack([first, second])
    assert ids.tolist() == [[5, 6, 7, 8], [3, 0, 0, 0]]
    assert targets.tolist() == [[IGNORE, IGNORE, 8, 9], [4, IGNORE, IGNORE, IGNORE]]


def test_answers_survive_the_way_to_other_ranks() -> None:
    greedy = [Answer(np.array([5, 6]), np.array([7]), np.array([-0.5], dtype=np.float32))]
    sampled = [Answer(np.array([1]), np.array([2, 3]), np.array([-1.0, -2.0], dtype=np.float32)), *greedy]
    decoded = gates.decode_answers(gates.encode_answers(greedy, sampled))
    for found, expected in zip(decoded, (greedy, sampled), strict=True):
        assert [(a.prompt.tolist(), a.response.tolist(), a.logprobs.tolist()) for a in found] == [
            (a.prompt.tolist(), a.response.tolist(), a.logprobs.tolist()) for a in expected
        ]
