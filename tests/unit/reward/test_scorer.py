"""Composition, keys, the bound and draining, with rewards made for the test."""

import asyncio
from collections.abc import Sequence

import pytest

from polyreme_reward.items import Item, Outcome, Status, failed, ok
from polyreme_reward.metrics import RewardMetrics
from polyreme_reward.scorer import BadBatch, RequestRejected, Scorer
from support.rewards import item
from support.waiting import until


class Scripted:
    """Returns the response's entry in `outcomes` when `gate` is open. Counts the requested items."""

    version = "v1"
    description = ""
    correctness = False
    reads_tokens = False

    def __init__(self, name: str = "r", weight: float = 1.0, **outcomes: Outcome) -> None:
        self.name, self.weight, self.outcomes = name, weight, outcomes
        self.asked = 0
        self.available = True
        self.gate = asyncio.Event()
        self.gate.set()

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        self.asked += len(items)
        await self.gate.wait()
        return [self.outcomes.get(i.response, ok(1.0)) for i in items]


def scorer(*rewards: Scripted, limit: int = 100) -> Scorer:
    return Scorer(rewards, limit, RewardMetrics())


async def test_a_score_is_the_sum_of_weighted_parts() -> None:
    rewards = Scripted("a", 2.0, x=ok(3.0)), Scripted("b", -0.5, x=Outcome(Status.OK, 4.0, "", {"why": 7.0}))
    (answer,) = await scorer(*rewards).score([item("x")])
    assert answer.score == 4.0
    assert [(p.name, p.raw, p.weighted) for p in answer.parts] == [("a", 3.0, 6.0), ("b", 4.0, -2.0), ("b/why", 7.0, -3.5)]


async def test_rewards_per_token_are_weighted_and_summed_over_the_rewards_that_have_some() -> None:
    per_token = Scripted("a", 2.0, x=Outcome(Status.OK, 1.5, token_rewards=(1.0, 0.5)))
    more = Scripted("b", -1.0, x=Outcome(Status.OK, 5.0, token_rewards=(2.0, 0.0)))
    (answer,) = await scorer(per_token, Scripted("c", 3.0, x=ok(1.0)), more).score([item("x")])
    assert (answer.score, answer.token_rewards) == (2 * 1.5 + 3 - 5, (0.0, 1.0))
    assert [(p.name, p.raw) for p in answer.parts] == [("a", 1.5), ("c", 1.0), ("b", 5.0)]
    (plain,) = await scorer(Scripted("c")).score([item("x")])
    assert plain.token_rewards == ()


async def test_weighted_rewards_per_token_beyond_floats_are_invalid() -> None:
    big = Scripted("a", 1e300, x=Outcome(Status.OK, 0.0, token_rewards=(1e30, -1e30)))
    (answer,) = await scorer(big).score([item("x")])
    assert (answer.status, answer.token_rewards) == (Status.INVALID, ())


async def test_one_failed_part_fails_the_item_alone() -> None:
    rewards = Scripted("a"), Scripted("b", bad=failed(Status.TIMEOUT, "slow"))
    good, bad = await scorer(*rewards).score([item("x"), item("bad")])
    assert (good.status, good.score) == (Status.OK, 2.0)
    assert (bad.status, bad.message, [p.name for p in bad.parts]) == (Status.TIMEOUT, "b: slow", ["a"])


async def test_a_part_beyond_floats_is_invalid_and_not_shown() -> None:
    """JSON has no infinite number."""
    parts = Scripted("a", 1e300, x=Outcome(Status.OK, 1.0, "", {"why": 1e300}))
    (answer,) = await scorer(parts).score([item("x")])
    assert (answer.status, [(p.name, p.weighted) for p in answer.parts]) == (Status.INVALID, [("a", 1e300)])


async def test_a_sum_beyond_floats_is_invalid() -> None:
    (answer,) = await scorer(Scripted("a", 1e200, x=ok(1e200))).score([item("x")])
    assert answer.status is Status.INVALID


@pytest.mark.parametrize("column", [None, "task"])
async def test_a_reward_that_breaks_its_contract_is_an_error_of_its_items(
    column: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Scripted):
        async def score(self, items: Sequence[Item]) -> list[Outcome]:
            raise KeyError("a defect")

    class Short(Scripted):
        async def score(self, items: Sequence[Item]) -> list[Outcome]:
            return []

    service = Scorer([Scripted("fine"), Broken("broken"), Short("short")], 100, RewardMetrics(), column)
    row = '{"task": ["fine", "broken", "short"]}'
    (answer,) = await service.score([item("x", metadata_json=row)])
    assert (answer.status, [part.name for part in answer.parts]) == (Status.ERROR, ["fine"])
    assert "broken: the reward itself failed: KeyError" in answer.message
    assert service.inside == 0 and "violated its contract" in caplog.text


async def test_a_key_is_scored_once() -> None:
    reward = Scripted()
    service = scorer(reward)
    first = await service.score([item("x", key="k1"), item("y", key="k1"), item("z")])
    again = await service.score([item("z"), item("x", key="k1")])
    assert first[0] == first[1] == again[1]
    assert reward.asked == 3, "k1 once, the item without a key twice"


@pytest.mark.parametrize("bound", [{"remembered": 2}, {"remembered_tokens": 4}])
async def test_the_remembered_answers_are_bounded_by_their_number_and_by_their_token_rewards(bound: dict[str, int]) -> None:
    reward = Scripted(x=Outcome(Status.OK, 1.5, token_rewards=(1.0, 0.5)))
    service = Scorer([reward], 100, RewardMetrics(), None, None, **bound)
    for key in "abc" * 2:  # the oldest is forgotten when the third one arrives
        await service.score([item("x", key=key)])
    assert reward.asked == 6
    await service.score([item("x", key="b"), item("x", key="c")])
    assert reward.asked == 6


async def test_a_key_under_way_is_waited_for() -> None:
    reward = Scripted()
    reward.gate.clear()
    service = scorer(reward)
    first = asyncio.create_task(service.score([item("x", key="k")]))
    second = asyncio.create_task(service.score([item("x", key="k")]))
    await until(lambda: reward.asked == 1)
    for _ in range(5):
        await asyncio.sleep(0)  # the second call finds the first one's key
    reward.gate.set()
    assert await first == await second
    assert reward.asked == 1


async def test_a_cancelled_call_leaves_its_answer_for_the_retry() -> None:
    reward = Scripted()
    reward.gate.clear()
    service = scorer(reward)
    call = asyncio.create_task(service.score([item("x", key="k")]))
    await until(lambda: reward.asked == 1)
    call.cancel()
    reward.gate.set()
    (answer,) = await service.score([item("x", key="k")])
    assert (answer.status, reward.asked, service.inside) == (Status.OK, 1, 0)


async def test_failures_are_not_remembered() -> None:
    reward = Scripted(x=failed(Status.ERROR, "down"))
    service = scorer(reward)
    await service.score([item("x", key="k")])
    reward.outcomes = {}
    (answer,) = await service.score([item("x", key="k")])
    assert (answer.status, reward.asked) == (Status.OK, 2)


@pytest.mark.parametrize("count", [0, 101])
async def test_a_batch_that_can_never_fit_is_refused_for_good(count: int) -> None:
    with pytest.raises(BadBatch):
        await scorer(Scripted()).score([item("x")] * count)


async def test_beyond_the_limit_items_are_refused_and_accepted_ones_continue() -> None:
    reward = Scripted()
    reward.gate.clear()
    service = scorer(reward, limit=10)
    inside = [asyncio.create_task(service.score([item("x")] * 5)) for _ in range(2)]
    await until(lambda: service.inside == 10)
    with pytest.raises(RequestRejected) as caught:
        await service.score([item("x")])
    assert caught.value.retry_after >= 0.1
    assert not caught.value.draining
    reward.gate.set()
    assert [len(answers) for answers in await asyncio.gather(*inside)] == [5, 5]
    assert len(await service.score([item("x")] * 10)) == 10


async def test_draining_refuses_the_new_and_waits_for_the_old() -> None:
    reward = Scripted()
    reward.gate.clear()
    service = scorer(reward)
    call = asyncio.create_task(service.score([item("x")]))
    await until(lambda: reward.asked == 1)
    drain = asyncio.create_task(service.drain(10.0))
    await until(lambda: service._draining)
    with pytest.raises(RequestRejected) as caught:
        await service.score([item("x")])
    assert caught.value.draining
    reward.gate.set()
    assert await drain == 0
    assert len(await call) == 1


async def test_draining_gives_up_after_its_grace() -> None:
    reward = Scripted()
    reward.gate.clear()
    service = scorer(reward)
    call = asyncio.create_task(service.score([item("x")]))
    await until(lambda: reward.asked == 1)
    assert await service.drain(0.05) == 1
    reward.gate.set()
    await call
