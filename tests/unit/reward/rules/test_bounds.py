"""Explosive formulas are bounded before they are computed."""

import gc
import time

import pytest

from polyreme_reward.items import Item, RewardError
from polyreme_reward.rules import make_rule
from polyreme_reward.rules.budget import OverBudget, limited

BOMBS = [
    "9^{99^9}",
    "9^{9^{9^{9}}}",
    "10^{10^{10}}",
    "(10^9)!",
    "((9!)!)!",
    r"\binom{10^9}{10^8}",
    r"\binom{1000000000}{500000000}",
    r"\Gamma(1000000000)",
    r"\gcd(2^{9^9},6)",
    "(x+1)^{10^9}",
    "(x+y+z)^{1000}",
    r"\sum_{k=1}^{10^{12}} \frac1k",
    r"\sum_{k=1}^{999} k^{99999}",
    r"\prod_{k=1}^{10^9} k",
    r"\sum_{i=1}^{999}\sum_{j=1}^{999} ij",
    "(" * 300 + "x" + ")" * 300,
    "{" * 300 + "x" + "}" * 300,
    "|" * 300,
    "+".join(["x^2"] * 400),
    "x^" * 500 + "2",
    "1x" * 5000,
    r"e^{e^{e^{e^{e^9}}}}",
    r"\sin(10^{10^5})",
    r"\log(\log(9^{99^9}))",
    r"\{9^{99^9},1\}",
    r"(0,9^{99^9})",
    r"[0,9^{99^9}]",
    "x=9^{99^9}",
    "x>9^{99^9}",
    "x^{9999}-x<9^{99^9}",
    r"\begin{pmatrix}9^{99^9}\\1\end{pmatrix}",
    r"\int_0^{\infty} e^{-x^2}\sin(x^{99}) dx",
    r"\lim_{x\to\infty} x^{x^x}",
    "1e999999999",
    r"1.5\times10^{999999999}",
    "0.1^{99999999}",
    "(-1)^{9^{99}}",
    r"\lfloor 9^{99^9} \rfloor",
    r"\pm" * 200 + "1",
]


@pytest.mark.parametrize("label", ["3", "x^2+1", "x=1, y=2", r"\{1,2\}", "x>3", r"\sqrt{2}"])
def test_explosive_answers_are_wrong(label: str) -> None:
    rule = make_rule("math", {})
    begin = time.process_time()
    for bomb in BOMBS:
        assert rule(Item("", "p", rf"\boxed{{{bomb}}}", label=label)) == 0.0
    assert time.process_time() - begin < 2.0 * len(BOMBS)  # processor time: without bounds one of them takes hours


@pytest.mark.parametrize("label", BOMBS)
def test_explosive_labels_are_judged_or_refused(label: str) -> None:
    rule = make_rule("math", {})
    try:
        assert rule(Item("", "p", r"\boxed{7}", label=label)) == 0.0
    except RewardError as error:
        assert "label" in str(error)


@pytest.mark.parametrize("name", ["numeric", "choice", "exact"])
def test_other_rules_are_bounded(name: str) -> None:
    rule = make_rule(name, {})
    for bomb in [*BOMBS, "1,234" * 50_000, "=" * 100_000, "x=" * 50_000 + "3y", "\u7b54\u6848" * 50_000, "B. " * 50_000]:
        assert rule(Item("", "p", bomb, label="A" if name == "choice" else "77")) == 0.0


def test_a_budget_ends_a_computation_and_no_later_one() -> None:
    with pytest.raises(OverBudget), limited(0.05):
        while True:
            pass
    with limited(0.05), limited(10.0):  # inner limits do not extend outer ones
        pass
    begin = time.process_time()
    while time.process_time() - begin < 0.1:
        pass


def test_a_budget_that_ends_beside_a_collection_is_not_lost_in_it() -> None:
    def slow(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)
        begin = time.process_time()
        while len(collections) < 5 and time.process_time() - begin < 0.2:
            pass

    collections: list[str] = []
    gc.callbacks.append(slow)
    try:
        with pytest.raises(OverBudget), limited(0.05):  # an exception inside of `slow` would be ignored, with a warning
            for _ in range(10_000_000):
                cycle: list[object] = []
                cycle.append(cycle)
    finally:
        gc.callbacks.remove(slow)
    assert gc.isenabled()
