"""Knights and Knaves.

Invariant: a stated role counts only for names in the label.
"""

import re
from collections.abc import Callable
from typing import Literal

from polyreme_reward.items import Item, RewardError
from polyreme_reward.rules.response import required_label
from polyreme_reward.rules.shape import tagged
from polyreme_reward.rules.spelling import unified

_STATED = re.compile(r"([^\W\d_][\w'-]{0,60})[*_]{0,3} is an? [*_]{0,3}(knight|knave)\b")
_WINDOW = 20_000


def knights_and_knaves(scores: Literal["binary", "paddlenlp"] = "binary") -> Callable[[Item], float]:
    """1 if the answer assigns the label's role to everyone, else 0.

    Label and answer state roles in the form "Zoey is a knave". The answer is the text in <answer>...</answer>, or the whole
    response without these tags. The last statement about a name counts.

    Args:
        scores: "paddlenlp" selects the scores of PaddleNLP's example server: +1 or -1 for the format (think and answer tags, once
            each, in order), plus +2 for correct roles, -1.5 for wrong roles, or -2 when the format is wrong or a role is missing.
            As in that server, a missing <think> is added, since the prompt may contain it.
    """

    def score(item: Item) -> float:
        label = required_label(item)
        expected = _roles(label)
        if not expected:
            raise RewardError(f"expected roles in the label, such as 'Zoey is a knave'; found {label[:200]!r}")
        text = item.response
        _, opened, inside = text.rpartition("<answer>")
        found = _roles(inside.partition("</answer>")[0] if opened else text)
        right = {name: role for name, role in found.items() if name in expected} == expected
        if scores == "binary":
            return 1.0 if right else 0.0
        if "<think>" not in text:
            text = "<think>" + text
        formatted = tagged(text, "think", "answer")
        if not formatted:
            return -1.0 - 2.0
        return 1.0 + (2.0 if right else -1.5 if expected.keys() <= found.keys() else -2.0)

    return score


def _roles(text: str) -> dict[str, str]:
    """Roles by name, from the end of the text."""
    return {name: role for name, role in _STATED.findall(unified(text[-_WINDOW:])) if name[0].isupper()}
