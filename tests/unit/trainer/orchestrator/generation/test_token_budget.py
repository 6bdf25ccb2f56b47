"""Token budgets: no version samples more than the budget, and the learner's next plan never waits for a paused group in vain."""

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.experience.ledger import Unplanned
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollout, PartialRollouts
from polyreme_trainer.orchestrator.generation.token_budget import TokenBudget, needed, next_part

Spans = list[tuple[int, int, int]]


def samples(*spans: Spans) -> list[PartialRollout]:
    return [PartialRollout(index, bytearray(4 * each[-1][2] if each else 0), spans=each) for index, each in enumerate(spans)]


@pytest.mark.parametrize(
    ("spans", "version", "tokens", "min_version"),
    [
        ([[], []], 3, {0: 32, 1: 32}, 0),  # any version may start a sample
        ([[(3, 0, 32)], [(3, 0, 40)]], 3, {}, 0),  # both wait
        ([[(3, 0, 32)], [(3, 0, 10)]], 3, {1: 22}, 3),  # one waits
        ([[(3, 0, 32)], [(3, 0, 10)]], 4, {0: 32, 1: 32}, 4),  # a newer version has a new budget for all
        ([[(2, 0, 32), (3, 32, 40)]], 3, {0: 24}, 3),
        ([[(4, 0, 32)]], 3, {}, 0),  # a resumed learner trains up to version 4 again
        ([[(4, 0, 6), (3, 6, 9)]], 5, {0: 26}, 4),  # a slower replica continued it
    ],
)
def test_what_the_next_call_may_add(spans: list[Spans], version: int, tokens: dict[int, int], min_version: int) -> None:
    part = next_part(samples(*spans), 32, version)
    assert (part.tokens, part.min_version if tokens else 0) == (tokens, min_version)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), max_size=6), st.integers(0, 3), st.integers(1, 24))
def test_no_version_exceeds_the_budget(pieces: list[tuple[int, int]], version: int, budget: int) -> None:
    spans: Spans = []
    for each, length in pieces:
        start = spans[-1][2] if spans else 0
        spans.append((each, start, start + length))
    part = next_part(samples(spans), budget, version)
    for serving in range(part.min_version, 4):
        already = sum(end - start for each, start, end in spans if each == serving)
        for tokens in part.tokens.values():
            assert tokens > 0 and already + tokens <= budget


def state(in_flight: dict[int, int], appended: tuple[int, ...] = (), version: int = 3, planned: int = 3) -> Unplanned:
    order = sorted((admitted, index) for index, admitted in in_flight.items())
    return Unplanned(version, planned, tuple(order), appended)


@pytest.mark.parametrize(
    ("unplanned", "paused", "found"),
    [
        (state({0: 3, 1: 3, 2: 3, 3: 3}), {0, 1, 2, 3}, {0, 1}),  # nothing else can fill the plan, so the oldest continue
        (state({0: 3, 1: 3, 2: 3, 3: 3}), {0, 2}, set()),  # two others run
        (state({0: 3, 1: 3, 2: 3, 3: 3}), {0, 1, 2}, {0}),
        (state({2: 3, 3: 3}, (3, 3)), {2, 3}, set()),  # the plan is ready
        (state({0: 2, 1: 2, 2: 3}, (3, 3)), {0, 1, 2}, {0, 1}),  # due now
        (state({0: 2, 1: 2, 2: 3}, (3, 3), planned=4), {0, 1, 2}, set()),  # the learner trains: the next version will come
        (state({0: 3}), {0}, {0}),
    ],
)
def test_what_must_continue_with_two_groups_and_staleness_one(unplanned: Unplanned, paused: set[int], found: set[int]) -> None:
    assert needed(unplanned, paused, groups=2, staleness=1) == found


@given(st.data())
def test_what_continues_lets_the_plan_come(data: st.DataObject) -> None:
    """Whatever is paused: when all other groups end, the plan of the log's own rule is complete, and no group continues that it could spare."""
    groups, staleness, version = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3)), 5
    ages = st.integers(max(0, version - staleness), version)
    admitted = sorted(data.draw(st.lists(ages, max_size=groups * (staleness + 1))))
    for later in range(staleness):  # the bound of admission: what is due by an iteration fits the iterations up to it
        admitted = admitted[: groups * (later + 1)] + [
            age for age in admitted[groups * (later + 1) :] if age > version + later - staleness
        ]
    is_appended = [data.draw(st.booleans()) for _ in admitted]
    flying = {index: age for index, age in enumerate(admitted) if not is_appended[index]}
    ready = tuple(age for index, age in enumerate(admitted) if is_appended[index])
    paused = {index for index in flying if data.draw(st.booleans())}
    found = needed(state(flying, ready, version, version), paused, groups, staleness)
    assert found <= paused
    assert can_plan(flying, ready, paused - found, groups, staleness, version) or len(admitted) < groups
    if found:
        spared = max(found, key=lambda index: (admitted[index], index))
        assert not can_plan(flying, ready, paused - found | {spared}, groups, staleness, version)


def can_plan(flying: dict[int, int], ready: tuple[int, ...], paused: set[int], groups: int, staleness: int, version: int) -> bool:
    """Whether a plan comes once all groups but the paused ones have ended: the rule of plan.lua, for iteration version + 1."""
    done = [*ready, *(age for index, age in flying.items() if index not in paused)]
    if len(done) < groups:
        return False
    for newest in range(version - staleness, version + 1):
        left = sum(flying[index] <= newest for index in paused) + max(0, sum(age <= newest for age in done) - groups)
        if left > max(0, newest + staleness - version) * groups:
            return False
    return True


async def test_what_has_spent_the_budget_of_a_held_version_stays_paused_until_the_hold_ends() -> None:
    """During an evaluation no replica may serve the learner's newer version."""
    held: list[int | None] = [3]
    recorded: list[set[int]] = []

    class Log:
        async def set_paused(self, indices: set[int]) -> None:
            recorded.append(indices)

        async def unplanned(self) -> Unplanned:
            return state({0: 3, 1: 3}, version=4, planned=5)  # the learner trains

    class Parts:
        async def save(self, indices: Iterable[int]) -> None: ...

    budget = TokenBudget(32, 2, 1, Log(), Parts(), lambda: held[0])  # type: ignore[arg-type]
    rollouts = PartialRollouts(1, 64, (), 0)
    rollouts.samples = samples([(3, 0, 32)])
    await budget.update()
    waiting = asyncio.ensure_future(budget.next_part(0, rollouts))
    await asyncio.sleep(0)
    await budget.update()
    await asyncio.sleep(0)
    await budget.update()
    assert not waiting.done() and recorded == [{0}]
    held[0] = None
    await budget.update()
    assert recorded == [{0}, set()]
    part = await asyncio.wait_for(waiting, 60)
    assert (part.tokens, part.min_version) == ({0: 32}, 4)
