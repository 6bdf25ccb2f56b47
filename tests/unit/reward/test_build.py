"""The rewards whose values are declared to be 1 for right and 0 for wrong answers."""

from typing import Any

import pytest

from polyreme.config.reward import RewardConfig
from polyreme_reward.build import correctness


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ({"name": "exact"}, True),
        ({"name": "exact", "options": {"after": "#"}}, True),
        ({"name": "length"}, False),
        ({"name": "code"}, True),
        ({"name": "code", "options": {"partial": False}}, True),
        ({"name": "code", "options": {"partial": True}}, False),
        ({"name": "exact", "file": "rewards.py"}, False),
        ({"name": "of_an_entry_point"}, False),
    ],
)
def test_a_rule_with_two_values_declares_correctness(reward: dict[str, Any], expected: bool) -> None:
    (spec,) = RewardConfig.model_validate({"rewards": [reward]}).rewards
    assert correctness(spec) is expected
