"""Streams of a running product's sessions: a turn is told as it is sampled, and kept when it is whole."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import openai
import pytest

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.experience.leases import Registry
from polyreme.experience.record_codec import decode_group
from polyreme.net import rpc
from support.environment_stream import Stream
from support.product import HELLO, online_world

LONG = {"mean_tokens": 1e9, "rollout": {"max_new_tokens": 40}}


@pytest.fixture
def world(redis, run_id, tmp_path):
    return partial(online_world, redis, run_id, tmp_path)


@asynccontextmanager
async def by_hand(world):
    """A product, and what begins streams that the test answers, in place of an orchestrator."""
    async with world() as w:
        product = await w.start_server()
        (lease,) = await Registry(w.world.run).leases("environment")
        async with rpc.connect(lease.address, None) as channel:
            yield product, partial(Stream, environment_pb2_grpc.EnvironmentServiceStub(channel))


async def begun(begin, text):
    """A stream that was asked for a turn, and has told how it begins."""
    stream = begin()
    assert (await stream.start()).agent.streams
    await stream.write(delta=pb.Delta(number=1, text=text))
    return stream


async def turns(product, opened):
    return (await product.state(opened["id"]))["turns"]


async def test_a_turn_is_told_as_it_is_sampled_and_kept_before_its_end(world):
    async with by_hand(world) as (product, begin):
        opened, sampling = await product.open("sum"), asyncio.create_task(begun(begin, "hel"))
        async with product.streamed(opened, HELLO) as texts:
            stream = await sampling
            assert await anext(texts) == "hel"
            await stream.write(delta=pb.Delta(number=1, text="lo"))
            assert await anext(texts) == "lo" and await turns(product, opened) == 0
            assert isinstance(await stream.answer("hello!"), pb.Ending)
            assert [text async for text in texts] == ["!"] and await turns(product, opened) == 1
        reply = await product.say(opened, HELLO)
        assert reply.choices[0].message.content == "hello!", "a repeated request gets the same answer"
        async with product.streamed(opened, HELLO) as texts:
            assert [text async for text in texts] == ["hello!"]
        assert await product.reward(opened["id"], 1.0) == 200


async def test_a_stream_that_is_closed_leaves_no_turn(world):
    async with by_hand(world) as (product, begin):
        opened, sampling = await product.open("sum"), asyncio.create_task(begun(begin, "hel"))
        async with product.streamed(opened, HELLO) as texts:
            stream = await sampling
            assert await anext(texts) == "hel"
        assert isinstance(await stream.read(), pb.Withdrawal)
        assert await turns(product, opened) == 0
        again = begin()
        asking = asyncio.create_task(again.start())
        reply = asyncio.create_task(product.say(opened, HELLO))
        assert not (await asking).agent.streams
        await again.answer("other")
        assert (await reply).choices[0].message.content == "other" and await turns(product, opened) == 1


async def test_a_stream_whose_policy_is_lost_says_so(world):
    async with by_hand(world) as (product, begin):
        opened, sampling = await product.open("sum"), asyncio.create_task(begun(begin, "hel"))
        async with product.streamed(opened, HELLO) as texts:
            stream = await sampling
            assert await anext(texts) == "hel"
            stream.call.cancel()
            with pytest.raises(openai.APIError) as lost:
                await anext(texts)
        assert lost.value.code == "lost" and await turns(product, opened) == 0
        sampling = asyncio.create_task(begun(begin, "he"))
        async with product.streamed(opened, HELLO) as texts:
            await (await sampling).answer("hey")
            assert "".join([text async for text in texts]) == "hey"


async def test_what_was_streamed_is_what_is_trained_on(world):
    async with world(group_size=1, algorithm={"preset": "ppo"}, **LONG) as w:
        w.world.replicas[0].engine.step_seconds = 0.01
        product = await w.started()
        opened, found = await product.open(), []
        for messages in ([HELLO], [HELLO, None, HELLO]):
            said = [each or {"role": "assistant", "content": "".join(found)} for each in messages]
            async with product.streamed(opened, *said) as texts:
                found = [text async for text in texts]
            assert len(found) > 1, "it comes in parts"
        assert await product.reward(opened["id"], 1.0) == 200
        await w.orchestrator.collect()
        plan = await w.world.learner.log.plan(1, 600.0)
        (group,) = [decode_group(payload) for payload in await w.world.learner.log.read(plan)]
        (sample,) = group.samples
        assert len(sample.turns) == 2 and sample.text.endswith("".join(found))


async def test_a_closed_stream_frees_its_place(world):
    """There is one place for a turn, at the server and at the replica."""
    async with world(environment={"episodes": 1}, **LONG) as w:
        engine = w.world.replicas[0].engine
        engine.step_seconds = 0.05
        product = await w.started()
        opened = await product.open("sum")
        async with product.streamed(opened, HELLO) as texts:
            await anext(texts)
            engine.step_seconds = 3600.0
        engine.step_seconds = 0.0
        assert (await product.say(opened, HELLO)).usage.completion_tokens > 0
        assert await turns(product, opened) == 1
