"""Turns of one episode that are sampled at the same time, over simulated replicas: what they are does not depend on which one ends first."""

import asyncio
import json
from dataclasses import dataclass, field, fields, replace
from itertools import permutations

import pytest

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.api.v1.environment_pb2 import AgentRequest, Ask, RunResponse, Withdrawal
from polyreme.api.v1.environment_pb2 import Ending as Ended
from polyreme_rollout.testing.simulated_engine import Lengths
from polyreme_trainer.orchestrator.environment.agent_play import AgentPlay
from polyreme_trainer.orchestrator.environment.episode_clock import EpisodeClock
from polyreme_trainer.orchestrator.environment.episodes import Ending
from polyreme_trainer.orchestrator.environment.session import EpisodeOverError
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.sampler import ReplicaSampler
from polyreme_trainer.orchestrator.generation.token_budget import TokenBudget
from support.episode_world import WIDE, episode_world

SHORT = {"lengths": Lengths(8)}
MORE, WHY, OTHER = ([{"role": "user", "content": text}] for text in ("more", "why", "something else"))
AT_ONCE = {2: (MORE, 1), 3: (MORE, 1), 4: (WHY, 1), 5: (OTHER, 0)}


@dataclass(frozen=True)
class Held(ReplicaSampler):
    """Ends the turns of an episode that have these numbers in this order."""

    order: tuple[int, ...] = ()
    ended: dict[str, list[int]] = field(default_factory=dict)
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def sample(self, wanted, *arguments, **keywords):
        found = await super().sample(wanted, *arguments, **keywords)
        episode, _, number = wanted.name.rpartition("-")
        ended, number = self.ended.setdefault(episode, []), int(number)
        if number in self.order:
            before = list(self.order[: self.order.index(number)])
            async with asyncio.timeout(30), self.moved:
                await self.moved.wait_for(lambda: ended == before)
                ended.append(number)
                self.moved.notify_all()
        return found


class Fan:
    """One turn, then several at once, then one behind the third of them."""

    async def play(self, task, session):
        await session.answer([], number=1)
        session.reward(0.5)
        turns = [session.answer(new, number=number, after=after) for number, (new, after) in AT_ONCE.items()]
        await asyncio.gather(*turns)
        for number in AT_ONCE:
            session.reward(number, turn=number)
        await session.answer(MORE, number=6, after=4)
        return Ending(session.outcome, reward=0.25)


def untimed(group):
    samples = [replace(each, turns=tuple(turn._replace(seconds=0.0) for turn in each.turns)) for each in group.samples]
    return [repr([getattr(each, f.name) for f in fields(each)]) for each in samples], [each.messages for each in group.episodes]


async def test_the_record_does_not_depend_on_the_order_of_the_ends(redis, run_id, tmp_path):
    async with episode_world(redis, run_id, tmp_path, SHORT, SHORT) as w:
        task, plain, found = await w.admit(), w.sampler, []
        for order in list(permutations(AT_ONCE))[::5]:
            w.sampler = Held(plain.run_id, plain.config, plain.template, plain.pool, order)
            group = await w.play(Fan(), task)
            samples, texts = untimed(group)
            found.append(([sample.replace(str(s.replicas), "") for sample, s in zip(samples, group.samples, strict=True)], texts))
            assert list(w.sampler.ended.values()) == [list(order)] * 3
        assert all(each == found[0] for each in found)
        assert [len(sample.turns) for sample in group.samples[:4]] == [2, 1, 2, 1], "the first one continues, the others branch"
        rewards = [[turn.reward for turn in sample.turns] for sample in group.samples[:4]]
        assert rewards == [[0.5, 2.0], [3.0], [4.0, 0.25], [5.0]]
        ids = [sample.token_ids.tolist() for sample in group.samples]
        assert len({tuple(each) for each in ids}) == len(ids), "equal contexts have seeds of their own"
        shown = json.loads(group.episodes[0].messages)
        assert [(each["trajectory"], each["turn"]) for each in shown if "turn" in each] == [
            (0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (2, 1),
        ]  # fmt: skip
        for sample in group.samples:
            assert sample.loss_mask.sum() == sum(turn.end - turn.start for turn in sample.turns)


class Crossing:
    """A call whose agent withdraws its second and its fourth request, when their answers are on their way."""

    def __init__(self):
        self.responses = asyncio.Queue()
        self.ask(1)

    def ask(self, number):
        messages = json.dumps([{"role": "user", "content": f"q{number}"}])
        after = {2: 1, 3: 1}.get(number, 0)
        agent = AgentRequest(number=number, after=after, messages_json=messages)
        self.responses.put_nowait(RunResponse(ask=Ask(agent=agent)))

    def write(self, request):
        number = request.answer.number
        if number in (2, 4):
            self.responses.put_nowait(RunResponse(withdrawal=Withdrawal(number=number)))
        if number < 4:
            self.ask(number + 1)
        else:
            self.responses.put_nowait(RunResponse(ending=Ended(reward=1.0)))

    async def read(self):
        return await self.responses.get()


class Agents:
    async def play(self, task, session):
        return await AgentPlay(Crossing(), session, 4, 60.0).run()


async def test_a_withdrawal_that_crosses_the_answer_counts(redis, run_id, tmp_path):
    async with episode_world(redis, run_id, tmp_path, SHORT) as w:
        group = await w.play(Agents())
        assert [len(sample.turns) for sample in group.samples] == [2] * 3, "the third continues the first"
        for sample, episode in zip(group.samples, group.episodes, strict=True):
            assert sample.loss_mask.sum() == sample.sampled_tokens
            assert [turn.reward for turn in sample.turns] == [0.0, 1.0]
            (text,) = w.template.decode([sample.token_ids.tolist()], special=True)
            assert "<user>q3<assistant>" in text and "q2" not in text
            shown = json.loads(episode.messages)
            assert [message.get("withdrawn", False) for message in shown] == [False, False, True, True] * 2
            assert [message.get("turn") for message in shown] == [None, 0, None, None, None, 1, None, None]


async def test_turns_at_once_are_bounded_in_number(redis, run_id, tmp_path):
    class Many:
        async def play(self, task, session):
            turns = await asyncio.gather(*(session.answer([]) for _ in range(5)), return_exceptions=True)
            assert [isinstance(turn, EpisodeOverError) for turn in turns] == [False] * 3 + [True] * 2
            return Ending(session.outcome)

    async with episode_world(redis, run_id, tmp_path, SHORT) as w:
        group = await w.play(Many(), bounds=replace(WIDE, turns=3))
        assert {episode.outcome for episode in group.episodes} == {pb.OUTCOME_TURNS}
        assert [len(sample.turns) for sample in group.samples] == [1] * 9


@dataclass
class Two:
    """Two turns of at most so many tokens."""

    most: int

    async def play(self, task, session):
        await asyncio.gather(session.answer([], max_tokens=self.most), session.answer([], max_tokens=self.most))
        return Ending(session.outcome)


@pytest.mark.parametrize(("mean", "most", "length", "beyond"), [(1e9, 8, 8, 3), (1.0, 12, 1, 0)])
async def test_turns_at_once_share_the_token_budget(redis, run_id, tmp_path, mean, most, length, beyond):
    """With a budget of 12, one of them waits: until the other one leaves enough, or the learner cannot do without it."""
    rollout = {"max_new_tokens": 16, "tokens_per_iteration": 12}
    async with episode_world(redis, run_id, tmp_path, {"lengths": Lengths(mean)}, rollout=rollout, max_staleness=1) as w:
        task, saving = await w.admit(), PartialRolloutLog(w.log)
        budget = TokenBudget(12, 1, 1, w.log, saving)
        await budget.update()
        granting = asyncio.create_task(budget.follow_pauses()) if beyond else None
        group = await asyncio.wait_for(w.play(Two(most), task, partial_log=saving, budget=budget), 60)
        if granting is not None:
            granting.cancel()
    assert [len(sample) for sample in group.samples] == [length] * 6
    told = budget.take()
    assert told["rollout/parts_beyond_budget"] == (beyond, 0) and told["rollout/paused_samples"][0] >= 3


async def test_the_clock_stands_while_any_turn_waits():
    clock = EpisodeClock(0.2)
    with clock.standing():
        with clock.standing():
            await asyncio.sleep(0.25)
        assert clock.seconds_left == float("inf")
        async with clock.limited() as limit:
            assert limit.when() is None
    assert 0 < clock.seconds_left <= 0.2
    with pytest.raises(TimeoutError):
        async with clock.limited() as limit:
            with clock.standing():
                await asyncio.sleep(0.25)
            assert not limit.expired()
            await asyncio.sleep(30)
    assert limit.expired() and clock.seconds_left <= 0
