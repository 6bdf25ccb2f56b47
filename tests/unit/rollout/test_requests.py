"""Requests that can never be served are refused with what was expected and what came."""

from typing import Any

import pytest

from polyreme_rollout.requests import InvalidRequestError, Limits, plan_slots
from support.replicas import request

LIMITS = Limits(max_model_len=20, vocab_size=10, max_slots=100)


def plan(prompt: list[int], slots: list[tuple[int, list[int], int, int]], run_id: str = "r", **sampling: Any) -> Any:
    return plan_slots(request(run_id, prompt, slots, **sampling), "r", LIMITS)


def test_a_plan_continues_the_prefix() -> None:
    first, second = plan([1, 2], [(4, [], 18, 2**64 - 1), (0, [3], 17, 5)], temperature=1.0, stop_token_ids=[9])
    assert (first.index, first.prompt_ids, first.max_new) == (4, [1, 2], 18)
    assert 0 <= first.seed < 2**63
    assert (second.index, second.prompt_ids, second.max_new, second.seed) == (0, [1, 2, 3], 17, 5)


@pytest.mark.parametrize(
    ("prompt", "slots", "changes", "message"),
    [
        ([1], [(0, [], 1, 0)], {"run_id": "other"}, "serves run r, not other"),
        ([], [(0, [], 1, 0)], {}, "prompt is empty"),
        ([1], [], {}, "no slots"),
        ([1], [(0, [], 1, 0), (0, [], 1, 0)], {}, "occurs twice"),
        ([1], [(0, [], 0, 0)], {}, "slot 0 asks for no new token"),
        ([1, 2], [(0, [3], 18, 0)], {}, r"prompt 2 \+ prefix 1 \+ max_new 18 = 21 tokens; .* holds 20"),
        ([1, 10], [(0, [], 1, 0)], {}, "prompt: ids from 1 to 10; the vocabulary has 10"),
        ([1], [(7, [-1], 1, 0)], {}, "prefix of slot 7: ids from -1"),
        ([1], [(0, [], 1, 0)], {"stop_token_ids": [3, 10]}, r"stop token ids \[10\]"),
        ([1], [(0, [], 1, 0)], {"temperature": -1.0}, "temperature >= 0"),
        ([1], [(0, [], 1, 0)], {"top_p": 0.0}, "top_p"),
        ([1], [(0, [], 1, 0)], {"top_k": 0}, "top_k"),
    ],
)
def test_refusals_say_why(prompt: list[int], slots: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        plan(prompt, slots, **changes)


def test_half_a_number_is_no_prompt() -> None:
    broken = request("r", [1], [(0, [], 1, 0)])
    broken.prompt_ids += b"\0"
    with pytest.raises(InvalidRequestError, match="prompt: 5 bytes are not int32"):
        plan_slots(broken, "r", LIMITS)
