"""Mathematical equality by math-verify. Runs in worker processes only: sympy may take any time, and the worker has a deadline."""

import logging
import re
from collections.abc import Callable

from polyreme.errors import ConfigError
from polyreme_reward.items import Item, RewardError
from polyreme_reward.rules.answers import between, required_label

_COUNTED = re.compile(
    r"\s*-?\$?[0-9][0-9.,]*\s+(?!(?:arc)?(?:sin|cos|tan|sec|csc|cot)|(?:log|exp|sqrt|alpha|beta|gamma|delta|theta|lambda|sigma|omega|phi|psi"
    r"|and|over|plus|minus|times|mod|choose)\b)(?:[A-Za-z]{3,}|[a-z]{1,2}/[hs]\b)[A-Za-z/ .]*"
)
"""A number of something, which as LaTeX would be a product of letters."""


def math(after: str | None = None, before: str | None = None) -> Callable[[Item], float]:
    """1 if the response's answer equals the label as mathematics, by math-verify; else 0. A boxed answer goes first.

    A label that cannot be parsed is an error; a response without an answer that can be parsed scores 0.

    Args:
        after: look only behind the first occurrence of this text in the response; a response without it scores 0.
        before: look only before the first occurrence of this text after that; a response without it scores 0.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError("the package math-verify", "none", "Install it: pip install 'polyreme-reward[math]'.") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns, for every call, that its own timeouts are off
    of_label = [LatexExtractionConfig(), ExprExtractionConfig()]
    of_response = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def expected(label: str) -> list[object]:
        delimited = any(mark in label.replace(r"\$", "") for mark in ("$", r"\boxed", r"\(", r"\["))
        wrapped = f"${label}$"  # to the parser only what stands in dollars is LaTeX
        for text in [label] if delimited else [label, wrapped] if _COUNTED.fullmatch(label) else [wrapped, label]:
            if gold := parse(text, of_label, parsing_timeout=None):
                return list(gold)
        raise RewardError(f"expected a mathematical expression as label; found {label[:200]!r}")

    def score(item: Item) -> float:
        gold = expected(required_label(item))
        answer = between(item.response, after, before)
        if answer is None:
            return 0.0
        return float(verify(gold, parse(answer, of_response, parsing_timeout=None), timeout_seconds=None))

    return score
