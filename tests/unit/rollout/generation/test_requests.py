"""Invalid requests are refused with what was expected and what was found."""

from typing import Any

import pytest

from polyreme_rollout.generation.requests import InvalidRequestError, RequestLimits, parse_sequences
from support.replicas import request

LIMITS = RequestLimits(max_model_len=20, vocab_size=10, max_sequences=100)


def plan(prompt: list[int], slots: list[tuple[int, list[int], int, int]], run_id: str = "r", **sampling: Any) -> Any:
    return parse_sequences(request(run_id, prompt, slots, **sampling), "r", LIMITS)


def test_a_plan_continues_the_prefix() -> None:
    first, second = plan([1, 2], [(4, [], 18, 2**64 - 1), (0, [3], 17, 5)], temperature=1.0, stop_token_ids=[9])
    assert (first.index, first.prompt_ids, first.max_new) == (4, [1, 2], 18)
    assert 0 <= first.seed < 2**63
    assert (second.index, second.prompt_ids, second.max_new, second.seed) == (0, [1, 2, 3], 17, 5)


@pytest.mark.parametrize(
    ("prompt", "slots", "changes", "message"),
    [
        ([1], [(0, [], 1, 0)], {"run_id": "other"}, "run other"),
        ([], [(0, [], 1, 0)], {}, "prompt"),
        ([1], [], {}, "at least one sequence"),
        ([1], [(0, [], 1, 0), (0, [], 1, 0)], {}, "distinct"),
        ([1], [(0, [], 0, 0)], {}, "sequence 0: .* max_new"),
        ([1, 2], [(0, [3], 18, 0)], {}, r"20 tokens .* prompt 2 \+ prefix 1 \+ max_new 18 = 21"),
        ([1, 10], [(0, [], 1, 0)], {}, "prompt: .* 10; found ids from 1 to 10"),
        ([1], [(7, [-1], 1, 0)], {}, "prefix of sequence 7: .* from -1"),
        ([1], [(0, [], 1, 0)], {"stop_token_ids": [3, 10]}, r"stop token ids .* \[10\]"),
        ([1], [(0, [], 1, 0)], {"temperature": -1.0}, "temperature >= 0"),
        ([1], [(0, [], 1, 0)], {"top_p": 0.0}, "top_p"),
        ([1], [(0, [], 1, 0)], {"top_k": 0}, "top_k"),
    ],
)
def test_refusals_say_why(prompt: list[int], slots: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        plan(prompt, slots, **changes)


def test_a_partial_number_is_not_a_prompt() -> None:
    broken = request("r", [1], [(0, [], 1, 0)])
    broken.prompt_ids += b"\0"
    with pytest.raises(InvalidRequestError, match=r"prompt: .*int32.* 5 bytes"):
        parse_sequences(broken, "r", LIMITS)
