"""Knights and Knaves. Invariant: a role counts only when it is stated for a name in the label."""

import re
from collections.abc import Callable
from typing import Literal

from polyreme_reward.items import Item, RewardError
from polyreme_reward.rules.response import required_label
from polyreme_reward.rules.shape import tagged

_STATED = re.compile(r"([A-Z][\w'-]{0,60}) is an? (knight|knave)\b")
_WINDOW = 20_000


def knights_and_knaves(scores: Literal["binary", "paddlenlp"] = "binary") -> Callable[[Item], float]:
    """1 if the answer gives everybody the role that the label gives; else 0.

    Label and answer state roles as "Zoey is a knave"; the answer is what stands in <answer>...</answer>, and without these tags
    the whole response. Of two statements about one name the later one counts.

    Args:
        scores: "paddlenlp" gives the scores of PaddleNLP's example server instead: +1 or -1 for the format (think and answer
            tags, once each, in order), plus +2 for the right roles, -1.5 for wrong ones, -2 when the format is wrong or a role
            is missing. There, as in its server, an opening <think> that the prompt holds is supplied.
    """

    def score(item: Item) -> float:
        expected = _roles(required_label(item))
        if not expected:
            raise RewardError(f"expected roles in the label, such as 'Zoey is a knave'; found {item.label[:200]!r}")
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
    """Name -> role, of the end of a long text."""
    return dict(_STATED.findall(text[-_WINDOW:]))
