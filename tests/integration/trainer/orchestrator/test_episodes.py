"""Episodes of several turns over simulated replicas: exact tokens, bounds, lost replicas and hosts, and what survives the orchestrator."""

import asyncio
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.experience.records import ToolCall
from polyreme_rollout.engine.protocol import Sampling
from polyreme_rollout.testing.simulated_engine import Failures, Lengths
from polyreme_rollout.testing.simulated_engine import sample as sampled
from polyreme_trainer.data.template import Template
from polyreme_trainer.observe.metrics import episodes as episode_metrics
from polyreme_trainer.orchestrator.environment.episodes import Ending, HostLostError
from polyreme_trainer.orchestrator.environment.finished import FinishedEpisodes
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError
from polyreme_trainer.orchestrator.environment.session import EpisodeOverError
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.rollout_parts import PartialRolloutError
from polyreme_trainer.orchestrator.prompts.prompt_order import sequence_seed
from support.episode_world import WIDE, episode_world
from support.simulated import VOCAB
from support.tiny_tokenizer import CHAT_TEMPLATE, model_files
from support.waiting import until

SHORT = {"lengths": Lengths(8)}
FULL = Sampling(1.0, 1.0, -1, (1,))


class Script:
    """A host that sends these messages after the answers, and gives a reward of 0.5 for each turn."""

    def __init__(self, *messages, first=(), before=None):
        self.messages, self.first, self.before, self.answers = messages, first, before, []

    async def play(self, task, session):
        try:
            for place, text in enumerate(("", *self.messages)):
                if self.before:
                    await self.before(session, place)
                new = [{"role": "user", "content": text}] if place else list(self.first)
                self.answers.append((session.number, place, await session.answer(new)))
                session.reward(0.5)
        except EpisodeOverError as over:
            return Ending(over.outcome)
        return Ending(session.outcome, reward=1.0, parts={"length": 3.0}, seconds=0.25)


@pytest.fixture
def world(redis, run_id, tmp_path):
    return partial(episode_world, redis, run_id, tmp_path)


def turns_of(sample):
    return [sample.token_ids[turn.start : turn.end].tolist() for turn in sample.turns]


async def test_each_turn_continues_the_exact_tokens(world):
    async with world(SHORT) as w:
        group = await w.play(Script("more", "again"))
        assert [len(sample.turns) for sample in group.samples] == [3, 3, 3]
        template, policy = w.template, w.replicas[0].engine.policy
        for number, sample in enumerate(group.samples):
            context = group.prompt_ids.tolist()
            for text, turn in zip(("more", "again", None), sample.turns, strict=True):
                assert context == [*group.prompt_ids.tolist(), *sample.token_ids[: turn.start].tolist()]
                seed = sequence_seed(0, group.index, 1, number, turn.start)
                ids, logprobs = sampled(policy, context, seed, FULL, min(96, 128 - len(context)), VOCAB, Lengths(8))
                assert sample.token_ids[turn.start : turn.end].tolist() == ids
                np.testing.assert_array_equal(sample.logprobs[turn.start : turn.end], np.array(logprobs, np.float32))
                if text is not None:
                    end = [] if ids[-1] == 1 else [1]
                    context += [*ids, *end, *template.encode([f"<user>{text}<assistant>"])[0].tolist()]
            sampled_tokens = np.zeros(len(sample), np.uint8)
            for turn in sample.turns:
                sampled_tokens[turn.start : turn.end] = 1
            assert sample.loss_mask.tolist() == sampled_tokens.tolist()
            assert [turn.reward for turn in sample.turns] == [0.5, 0.5, 1.5] and sample.score == 2.5
            assert [part[:3] for part in sample.parts] == [("environment", 2.5, 2.5), ("environment/length", 3.0, 3.0)]
            episode = group.episodes[number]
            assert episode.outcome in (pb.OUTCOME_STOP, pb.OUTCOME_LENGTH) and episode.seconds == 0.25
            shown = json.loads(episode.messages)
            assert [message["role"] for message in shown] == ["user", "assistant"] * 3
            assert [message["content"] for message in shown[::2]] == [w.prompts[0].plain, "more", "again"]


class Branching(Script):
    """A host whose second and third turn both follow the first, and whose fourth begins anew."""

    async def play(self, task, session):
        told = [{"role": "user", "content": "more"}]
        history = [*told, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why"}]
        for new, after in (([], 0), (told, 1), (told, 1), (history, 0)):
            await session.answer(new, after=after)
            session.reward(0.5)
        return Ending(session.outcome)


async def test_a_rewritten_context_begins_a_trajectory(world):
    async with world(SHORT) as w:
        task = await w.admit()
        group = await w.play(Branching(), task)
        assert group.episode_of == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        template, policy = w.template, w.replicas[0].engine.policy
        for number in range(3):
            first, second, third = group.samples[3 * number : 3 * number + 3]
            assert [len(sample.turns) for sample in (first, second, third)] == [2, 1, 1]
            shared = [*group.prompt_ids.tolist(), *first.token_ids[: first.turns[1].start].tolist()]
            assert group.prompt_of(second).tolist() == shared, "the tokens of the first turn, which are trained once"
            (text,) = template.decode([group.prompt_of(third).tolist()], special=True)
            assert text.startswith("<user>more<assistant>yes") and text.endswith("<user>why<assistant>")
            for place, sample in enumerate((first, second, third)):
                context, seed = group.prompt_of(sample).tolist(), sequence_seed(0, group.index, 1, number, place << 32)
                ids, _ = sampled(policy, context, seed, FULL, min(96, 128 - len(context)), VOCAB, Lengths(8))
                assert sample.token_ids[: sample.turns[0].end].tolist() == ids
            assert [sample.score for sample in (first, second, third)] == [2.0] * 3
            shown = json.loads(group.episodes[number].messages)
            assert [m["content"] for m in shown if m["role"] == "user"] == [w.prompts[0].plain, "more", "more", "why"]
        assert episode_metrics([group])["episode/branches"] == 2.0
        finished = FinishedEpisodes(task, 3)
        for number in (0, 2):
            finished.add(number, (group.samples[3 * number : 3 * number + 3], group.episodes[number]))
        again = FinishedEpisodes(task, 3)
        again.restore([finished.part_since(None)])
        assert again.missing() == [1] and [len(each) for each, _ in again.ordered()] == [3, 3]


async def test_an_environment_may_begin_the_conversation(world):
    async with world(SHORT) as w:
        first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        group = await w.play(Script("more", first=first))
        for sample in group.samples:
            assert w.template.decode([sample.prompt_ids.tolist()], special=True) == ["<system>be brief<user>hello<assistant>"]
        assert json.loads(group.episodes[0].messages)[:2] == first


async def test_tools_are_declared_and_their_calls_recorded(world):
    calls = [ToolCall("add", '{"a": 1}', "2", 0.5), ToolCall("", "{", "error: no", 0.25, "no")]

    class Calling(Script):
        async def play(self, task, session):
            session.tools = [{"type": "function", "function": {"name": "add"}}]
            await session.answer([{"role": "user", "content": "hello"}])
            session.reward(0.5, calls)
            await session.answer([{"role": "tool", "name": "add", "content": "2"}, {"role": "tool", "content": "error: no"}])
            return Ending(session.outcome, calls=calls[:1])

    async with world(SHORT) as w:
        w.template = Template(model_files("{{ tools[0].function.name if tools }}" + CHAT_TEMPLATE), w.config.data)
        group = await w.play(Calling())
        for sample in group.samples:
            prompt, between = sample.prompt_ids, sample.token_ids[sample.turns[0].end : sample.turns[1].start]
            assert "add" in w.template.decode([prompt.tolist()], special=True)[0]
            assert w.template.decode([between.tolist()], special=True)[0].endswith(
                "tool<unk>2<unk>tool<unk>error<unk> no<assistant>"
            )
            assert [list(turn.tool_calls) for turn in sample.turns] == [calls, calls[:1]]
        found = episode_metrics([group])
        assert (found["episode/tool_calls"], found["episode/tool_errors"], found["episode/tool_seconds"]) == (3.0, 1.0, 1.25)


async def test_turns_and_tokens_are_bounded(world):
    async with world(SHORT) as w:
        task = await w.admit()
        group = await w.play(Script(*["more"] * 9), task, replace(WIDE, turns=2))
        assert [len(sample.turns) for sample in group.samples] == [2, 2, 2]
        assert {episode.outcome for episode in group.episodes} == {pb.OUTCOME_TURNS}
        assert all(sample.score == 1.0 for sample in group.samples), "what the environment has given remains"
        tokens = len(task.prompt.ids) + 40
        group = await w.play(Script(*["more"] * 9), task, replace(WIDE, turns=99, tokens=tokens))
        assert {episode.outcome for episode in group.episodes} == {pb.OUTCOME_TOKENS}
        assert all(len(sample) <= 40 for sample in group.samples)
        with pytest.raises(EpisodeError, match="leave no room"):
            await w.play(Script(first=[{"role": "user", "content": "a" * 200}]), task)


async def test_seconds_are_bounded_and_complete_turns_remain(world):
    async def slow_down(session, place):
        if place == 2:
            await all_there.wait()
            w.replicas[0].engine.step_seconds = 3600.0
            session.clock.deadline = asyncio.get_running_loop().time() + 0.2

    async with world(SHORT) as w:
        all_there = asyncio.Barrier(3)
        group = await asyncio.wait_for(w.play(Script("more", "again", before=slow_down)), 30)
        assert {episode.outcome for episode in group.episodes} == {pb.OUTCOME_TIME}
        assert [len(sample.turns) for sample in group.samples] == [2, 2, 2]


async def test_an_episode_goes_on_when_its_replica_dies(world):
    async with world({**SHORT, "failures": Failures(die_after=20)}, SHORT) as w:
        group = await w.play(Script(*["more"] * 3))
        assert w.replicas[0].engine.dead and w.replicas[1].calls
        assert [len(sample.turns) for sample in group.samples] == [4, 4, 4]
        assert any(len(sample.replicas) > 1 for sample in group.samples)


async def test_turns_go_to_the_replica_that_has_the_prefix(world):
    async with world(SHORT, SHORT) as w:
        group = await w.play(Script(*["more"] * 3))
        assert [len(sample.replicas) for sample in group.samples] == [1, 1, 1]
        assert {sample.replicas for sample in group.samples} == {("r0",), ("r1",)}


async def test_an_episode_goes_on_over_a_swap(world):
    async def swap(session, place):
        if place == 1 and session.number == 0:
            await w.learner.write(1)
            await w.learner.push(w.replicas[0])
            swapped.set()
        await (swapped.wait() if place else asyncio.sleep(0))

    async with world(SHORT) as w:
        swapped = asyncio.Event()
        group = await w.play(Script("more", before=swap))
        for sample in group.samples:
            assert [version for version, _, _ in sample.spans] == [0, 1] and sample.oldest_version == 0


async def test_a_lost_host_costs_a_try_and_the_tokens_are_the_same(world):
    async def lose(session, place):
        if place == 1 and session.number == 1 and session.number not in lost:
            lost.add(session.number)
            raise HostLostError("the server is gone")

    async with world(SHORT) as w:
        lost, task = set(), await w.admit()
        group = await w.play(Script("more", before=lose), task)
        expected = await w.play(Script("more"), task)
        assert lost == {1} and list(map(turns_of, group.samples)) == list(map(turns_of, expected.samples))

        async def lose_always(session, place):
            raise HostLostError("the server is gone")

        with pytest.raises(HostLostError):
            await w.play(Script("more", before=lose_always), task)


@pytest.mark.parametrize(("first", "last"), [(0.0, float("nan")), (0.0, 1e39), (0.0, -2e308), (1e308, 1e308), (3e38, 3e38)])
async def test_rewards_must_be_finite_for_the_learner(world, first, last):
    class Broken(Script):
        async def play(self, task, session):
            ending = await super().play(task, session)
            session.reward(first, turn=1)
            return replace(ending, reward=last)

    async with world(SHORT) as w:
        with pytest.raises(EpisodeError, match="finite rewards"):
            await w.play(Broken("more"))


async def test_the_greedy_baseline_is_an_episode_that_is_not_trained_on(world):
    async with world(SHORT, algorithm={"preset": "remax"}) as w:
        group = await w.play(Script("more"))
        assert [bool(sample.loss_mask.any()) for sample in group.samples] == [True, True, True, False]
        assert len(group.episodes) == 4 and group.sampled == group.samples[:3]


async def test_finished_episodes_survive_the_orchestrator(world):
    """Episode 1 hangs. A successor plays it alone; the others are those that were finished."""

    async def hang(session, place):
        if place == 1 and session.number == 1:
            waiting.set()
            await asyncio.Event().wait()

    async with world(SHORT) as w:
        waiting, task = asyncio.Event(), await w.admit()
        saving = PartialRolloutLog(w.log, interval=0.0)
        dying = asyncio.create_task(w.play(stuck := Script("more", before=hang), task, partial_log=saving))
        await waiting.wait()
        await until(lambda: {number for number, place, _ in stuck.answers if place == 1} == {0, 2})
        await until(lambda: len(saving._tracked[task.admission.index].work.missing()) == 1)
        await saving.save()
        dying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dying
        successor = PartialRolloutLog(w.log)
        await successor.load([task.admission])
        group = await w.play(again := Script("more"), task, partial_log=successor)
        assert {number for number, _, _ in again.answers} == {1}
        expected = await w.play(Script("more"), task)
        assert list(map(turns_of, group.samples)) == list(map(turns_of, expected.samples))
        assert [sample.episode for sample in group.samples] == [0, 1, 2]


async def test_finished_episodes_of_another_task_or_an_older_policy_are_played_again(world):
    async with world(SHORT) as w:
        task = await w.admit()
        group = await w.play(Script("more"), task)
        finished = FinishedEpisodes(task, 3)
        for number in (0, 2):
            finished.add(number, ([group.samples[number]], group.episodes[number]))
        part = finished.part_since(None)
        newer = FinishedEpisodes(replace(task, admission=replace(task.admission, version=1)), 3)
        newer.restore([part])
        assert newer.missing() == [0, 1, 2]
        again = FinishedEpisodes(task, 3)
        again.restore([part])
        assert again.missing() == [1] and [[sample.episode for sample in each] for each, _ in again.ordered()] == [[0], [1]]
        for other, damaged in (
            (FinishedEpisodes(replace(task, prompt=w.prompts[1]), 3), part),
            (FinishedEpisodes(task, 2), part),
            (FinishedEpisodes(task, 3), part[:-9]),
            (FinishedEpisodes(task, 3), b""),
        ):
            with pytest.raises(PartialRolloutError):
                other.restore([part, damaged])
            assert other.missing() == list(range(other._count))
