"""The answer rules agree with human verdicts."""

import pytest

from polyreme_reward.items import Item, RewardError
from polyreme_reward.rules import make_rule
from support.judged import choice, equations, math, notation, numeric, prose, scripts, signs, tiny, upright

TABLES = {
    "math": math.ROWS + equations.ROWS + tiny.ROWS + signs.ROWS + upright.ROWS + notation.ROWS,
    "numeric": numeric.ROWS + signs.ROWS + prose.NUMERIC,
    "choice": choice.ROWS + scripts.ROWS + prose.CHOICE,
}
CASES = [
    pytest.param(name, *row[:3], id=f"{name}: {row[0]} / {row[1]}: {row[3]}") for name, rows in TABLES.items() for row in rows
]


@pytest.mark.parametrize(("name", "response", "label", "verdict"), CASES)
def test_a_rule_agrees_with_the_verdict(name: str, response: str, label: str, verdict: float | str) -> None:
    rule = make_rule(name, {})
    item = Item("", "p", response, label=label)
    if verdict == "ERROR":
        with pytest.raises(RewardError):
            rule(item)
    else:
        assert rule(item) == verdict


def test_the_tables_are_large_and_have_no_row_twice() -> None:
    pairs = [(name, row[0], row[1]) for name, rows in TABLES.items() for row in rows]
    assert len(pairs) == len(set(pairs)) >= 300
    assert all(row[3] for rows in TABLES.values() for row in rows)


@pytest.mark.parametrize("name", ["math", "numeric"])
def test_a_prompt_may_open_the_thought(name: str) -> None:
    begun = Item("", "p", "so it is 42", label="42", templated_prompt="<user>p<assistant><think>\n")
    rule = make_rule(name, {})
    assert rule(begun) == 0.0
    assert rule(begun._replace(response="so it is 41</think> It is 42")) == 1.0
    assert rule(begun._replace(response="<think>41</think> It is 42")) == 1.0
    assert rule(begun._replace(templated_prompt="<user>p<assistant>")) == 1.0


@pytest.mark.parametrize(("after", "before"), [("</think>", None), ("<answer>", "</answer>"), (None, "</answer>")])
def test_markers_are_looked_for_outside_of_thoughts(after: str | None, before: str | None) -> None:
    response = "<think>perhaps <answer>41</answer></think> <answer>42</answer>"
    for name in ("math", "numeric"):
        rule = make_rule(name, {"after": after, "before": before})
        assert rule(Item("", "p", response, label="42")) == 1.0
        assert rule(Item("", "p", "42", label="42")) == 0.0
