"""Sessions of a running product: groups of its tasks, their age, their bounds, and what survives each process."""

import asyncio
import json
import runpy
from functools import partial

import numpy as np
import openai
import pytest
import yaml
from anthropic import AsyncAnthropic

from polyreme import API_VERSION
from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.config.load import parse_config
from polyreme.errors import ConfigError
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.record_codec import decode_group
from polyreme.experience.run import RunState
from polyreme.net import rpc
from polyreme_environment.grpc_service import NAME, EnvironmentServicer
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.online.pool import OnlinePool
from polyreme_trainer.orchestrator.environment.online import complete_groups
from polyreme_trainer.orchestrator.environment.online_turns import OnlineTurns
from support import guide
from support.environment_stream import Stream
from support.product import HELLO, KEY, Product, online_world
from support.waiting import until

BASE = {
    "iterations": 2,
    "groups_per_iteration": 4,
    "group_size": 3,
    "model": {"path": "model"},
    "data": {"train": "train.jsonl"},
    "rollout": {"max_new_tokens": 8, "max_model_len": 2048},
    "trainer": {"optimizer": {"lr": 1e-3}},
}


@pytest.fixture
def world(redis, run_id, tmp_path):
    return partial(online_world, redis, run_id, tmp_path)


async def trained(run, iteration):
    """The groups of an iteration's plan."""
    plan = await run.learner.log.plan(iteration, 600.0)
    return None if plan is None else [decode_group(payload) for payload in await run.learner.log.read(plan)]


async def test_sessions_of_one_task_become_a_group(world):
    async with world() as w:
        product = await w.started()
        first = await product.open("sum")
        reply = await product.say(first, HELLO, logprobs=True, extra_body={"return_token_ids": True})
        answer = {"role": "assistant", "content": reply.choices[0].message.content}
        again = await product.say(first, HELLO, answer, {"role": "user", "content": "3+4"}, extra_body={"return_token_ids": True})
        assert await product.reward(first["id"], 1.0) == 200
        await w.orchestrator.collect()
        assert await trained(w.world, 1) is None  # the other session of the group is missing
        await product.played("other", 0.5)
        second = await product.played("sum", 0.25)
        await w.orchestrator.collect()
        (group,) = await trained(w.world, 1)
        assert [sample.score for sample in group.samples] == [1.0, 0.25] and group.label == "sum"
        one = group.samples[0]
        (choice,) = reply.choices
        assert one.token_ids[: one.turns[0].end].tolist() == choice.token_ids
        assert np.allclose(one.logprobs[: one.turns[0].end], [each.logprob for each in choice.logprobs.content])
        whole = [*group.prompt_of(one), *one.token_ids]
        assert whole == [*again.prompt_token_ids, *again.choices[0].token_ids]
        assert one.loss_mask.sum() == one.sampled_tokens < len(one)
        assert [turn.reward for turn in one.turns] == [0.0, 1.0] and one.spans[0][0] == 0
        shown = json.loads(group.episodes[0].messages)
        assert [message["content"] for message in shown if message["role"] == "user"] == ["1+2", "3+4"]
        assert (await product.state(second["id"]))["state"] == "trained"
        assert (await w.world.log.audit()).clean


@pytest.mark.parametrize(
    ("url", "server"), [(None, "http://localhost:PORT"), ("https://a.example/sessions", "https://a.example/sessions")]
)
async def test_a_session_s_address_is_the_product_s(world, url, server):
    """It is the one by which the product has called, or that of the proxy before it."""
    async with world(online={"url": url}) as w:
        product = await w.started()
        port = product.url.removesuffix("/v1").rpartition(":")[2]
        product.url = f"http://localhost:{port}/v1"
        opened = await product.open("sum")
        assert opened["base_url"] == f"{server.replace('PORT', port)}/s/{opened['id']}/v1"


async def test_a_session_outlives_its_server_and_orchestrator(world):
    async with world() as w:
        product = await w.started()
        opened = await product.open("sum")
        ids = {"extra_body": {"return_token_ids": True}}
        reply = await product.say(opened, HELLO, **ids)
        await w.end_orchestrator()
        product = await w.start_server()
        asked = len(w.world.replicas[0].calls)
        assert await product.say(opened, HELLO, **ids) == reply  # a repeated request, whose answer was lost
        assert len(w.world.replicas[0].calls) == asked
        await w.start_orchestrator()
        answer = {"role": "assistant", "content": reply.choices[0].message.content}
        more = await product.say(opened, HELLO, answer, {"role": "user", "content": "2+2"}, **ids)
        assert more.prompt_token_ids[: reply.usage.total_tokens] == [*reply.prompt_token_ids, *reply.choices[0].token_ids]
        assert await product.reward(opened["id"], 1) == 200
        await product.played("sum", 0.0)
        product = await w.started()
        assert [await product.reward(opened["id"], number) for number in (1, 2)] == [200, 409]
        await w.orchestrator.collect()
        await w.start_orchestrator()
        await w.orchestrator.collect()  # nothing is appended twice
        assert [len(group.samples) for group in await trained(w.world, 1)] == [2]
        assert [await product.reward(opened["id"], number) for number in (1, 2)] == [200, 409]
        assert (await w.world.log.audit()).clean and (await w.store.counts())["trained"] == 2


async def test_a_turn_whose_stream_is_lost_waits_for_another(world):
    async with world() as w:
        product = await w.started()
        w.world.replicas[0].engine.step_seconds = 3600.0
        opened = await product.open("sum")
        asking = asyncio.create_task(product.say(opened, HELLO))
        await w.world.replicas[0].asked.wait()
        await w.end_orchestrator()
        assert not asking.done()
        w.world.replicas[0].engine.step_seconds = 0.0
        await w.start_orchestrator()
        assert (await asking).usage.completion_tokens > 0


async def test_turns_are_offered_again_when_a_lease_returns(world):
    """One of two offers ends while its server has no lease."""
    async with world(environment={"episodes": 2}) as w:
        metrics = EnvironmentMetrics()
        pool = OnlinePool(w.config, metrics, w.settings, w.world.run, KEY, grouped=True)
        begun, goes_on, both = asyncio.Event(), asyncio.Event(), asyncio.Barrier(2)
        waits = [goes_on.wait, both.wait, both.wait]

        async def sampled(request, tell):
            begun.set()
            await waits.pop(0)()
            return pb.Answer(text="3")

        async def turn():
            return [said.text async for said in pool.sample(pb.AgentRequest(number=1))]

        registry, turns = Registry(w.world.run), OnlineTurns(w.world.run, w.config, sampled)
        servicer = EnvironmentServicer({"": pool}, metrics, 2)
        async with rpc.serve("127.0.0.1", 0, servicer.add_to, [NAME], 0.0) as server, asyncio.timeout(60):
            lease = Lease("environment", "e", f"127.0.0.1:{server.port}", "", API_VERSION, {"episodes": {"": 2}})
            async with await registry.register(lease):
                await turns.refresh()
                first = asyncio.create_task(turn())
                await begun.wait()
            await turns.refresh()
            goes_on.set()
            assert await first == ["3"]
            await until(lambda: metrics.registry.get_sample_value("polyreme_environment_ended_total", {"how": "done"}) == 1)
            async with await registry.register(lease):
                await turns.refresh()
                assert await asyncio.gather(turn(), turn()) == [["3"], ["3"]], "at the same time"
            await turns.close()


async def test_a_client_that_reads_no_further_keeps_no_place(world):
    """Of an answer that is there: the place is for another turn."""
    async with world(environment={"episodes": 1}) as w:
        pool = OnlinePool(w.config, EnvironmentMetrics(), w.settings, w.world.run, KEY, grouped=True)

        async def played(*answers):
            async def told():
                for each in answers:
                    yield each

            async with pool.episode() as turn:
                return [moved.done async for moved in turn.play({}, told())]

        delta, answer = pb.RunRequest(delta=pb.Delta(text="a")), pb.RunRequest(answer=pb.Answer(text="ab"))
        slow, other = pool.sample(pb.AgentRequest(number=1)), pool.sample(pb.AgentRequest(number=1))
        reading = asyncio.create_task(anext(slow))
        assert await played(delta, answer) == [False, True] and (await reading).text == "a"
        reading = asyncio.create_task(anext(other))
        await played(answer)
        assert (await reading).text == "ab" and (await anext(slow)).text == "ab"
        await asyncio.gather(slow.aclose(), other.aclose())


async def test_what_is_too_old_is_dropped_and_counted(world):
    async with world(online={"max_age": 0.2}) as w:
        product = await w.started()
        silent, alone = await product.open("sum"), await product.played("alone", 1.0)
        await asyncio.sleep(0.25)
        await w.orchestrator.collect()
        states = [await product.state(each["id"]) for each in (silent, alone)]
        assert [(each["state"], each["reason"], each["reward"]) for each in states] == [
            ("dropped", "no_reward", None),
            ("dropped", "no_group", None),
        ]
        assert await product.reward(silent["id"], 1.0) == 410
        found = await w.orchestrator.metrics()
        assert found["online/dropped_no_reward"] == found["online/dropped_no_group"] == 1.0


async def test_a_session_with_tokens_of_an_old_policy_is_dropped(world):
    async with world(group_size=1, algorithm={"preset": "ppo"}, iterations=9) as w:
        product, learner = await w.started(), w.world.learner
        old = await product.open("old")
        await product.say(old, HELLO)
        for version in (1, 2):
            await product.played(None, 1.0)
            await w.orchestrator.collect()
            await learner.train([version], w.world.replicas)
        assert await product.reward(old["id"], 1.0) == 200
        await w.orchestrator.collect()
        assert (await product.state(old["id"]))["reason"] == "stale"
        assert [group.oldest_version for groups in learner.trained.values() for group in groups] == [0, 1]


async def test_groups_beyond_the_room_of_the_log_wait(world):
    async with world(group_size=1, algorithm={"preset": "ppo"}, max_staleness=0, iterations=9) as w:
        product = await w.started()
        for _ in range(3):
            await product.played(None, 1.0)
        await w.orchestrator.collect()
        assert len((await w.world.log.unplanned()).appended) == 1
        assert (await w.store.counts())["complete"] == 2
        assert len(await trained(w.world, 1)) == 1
        await w.orchestrator.collect()  # what the next iteration could not use is too old now
        assert (await w.store.counts())["dropped stale"] == 2


async def test_only_keys_open_sessions(world):
    async with world() as w:
        product = await w.started()
        one, other = await product.open("sum"), await product.open("sum")
        stranger = Product(product.url[7:-3], product.http, "sk-other")
        assert (await stranger.post("/sessions", {})).status_code == 401
        assert await stranger.reward(one["id"], 1.0) == 401
        assert await Product(product.url[7:-3], product.http, other["api_key"]).reward(one["id"], 1.0) == 401
        with pytest.raises(openai.AuthenticationError):
            await product.say({"api_key": one["api_key"][:-1]}, HELLO)
        assert await product.reward(one["id"], 1.0) == 400  # before its first turn
        assert [await product.reward(one["id"], bad) for bad in (None, "1", True, 10**400)] == [400] * 4
        assert await product.reward("0" * 16, 1.0) == 404
        half = await product.http.post(product.url.replace("/v1", "/by-model/v1/reward"), content=rb'{"model": "\ud800"}')
        assert half.status_code == 400
        untold = await product.open()
        await product.say(untold, HELLO)
        assert await product.reward(untold["id"], 1.0) == 400  # rewards are compared within a task
        assert await product.reward(untold["id"], 1.0, task="sum") == 200


@pytest.mark.parametrize("overflow", ["refuse", "serve"])
async def test_beyond_its_bound_nothing_is_kept(world, overflow):
    async with world(online={"max_sessions": 1, "overflow": overflow}) as w:
        product = await w.started()
        await product.open("sum")
        reply = await product.post("/sessions", {"task": "sum"})
        if overflow == "refuse":
            assert reply.status_code == 429 and int(reply.headers["retry-after"]) > 0
            assert (await w.store.counts())["refused"] == 1
            return
        opened = reply.json()
        assert opened["recorded"] is False
        answer = await product.say(opened, HELLO)
        back = {"role": "assistant", "content": answer.choices[0].message.content}
        assert (await product.say(opened, HELLO, back, HELLO)).usage.completion_tokens > 0
        assert await product.reward(opened["id"], 1.0) == 409
        assert (await w.store.counts())["unrecorded"] == 1


async def test_requests_of_one_session_wait_for_each_other(world):
    async with world() as w:
        product = await w.started()
        opened = await product.open("sum")
        asked = [HELLO, HELLO, {"role": "user", "content": "3+4"}]
        same, again, other = await asyncio.gather(*(product.say(opened, message) for message in asked))
        assert same == again and same.id != other.id
        assert len(w.world.replicas[0].calls) == 2
        assert await product.reward(opened["id"], 1.0) == 200


async def test_the_apis_share_a_session(world):
    async with world() as w:
        product = await w.started()
        opened = await product.open("sum")
        async with openai.AsyncOpenAI(base_url=product.url, api_key=opened["api_key"], max_retries=0) as client:
            first = await client.responses.create(model="m", input="1+2")
        product = await w.start_server()
        await w.orchestrator.refresh()
        async with openai.AsyncOpenAI(base_url=product.url, api_key=opened["api_key"], max_retries=0) as client:
            await client.responses.create(model="m", input="3+4", previous_response_id=first.id)
            await client.completions.create(model="m", prompt="5+6=")
        async with AsyncAnthropic(base_url=product.url[:-3], api_key=opened["api_key"], max_retries=0) as client:
            back = {"role": "assistant", "content": first.output_text}
            await client.messages.create(model="m", max_tokens=9, messages=[HELLO, back, {"role": "user", "content": "7"}])
        assert await product.reward(opened["id"], 1.0) == 200
        await product.played("sum", 0.0)
        await w.orchestrator.collect()
        (group,) = await trained(w.world, 1)
        episode = [sample for sample in group.samples if sample.episode == 0]
        assert [len(sample.turns) for sample in episode] == [2, 1, 1]


async def test_a_run_without_experience_says_so(world):
    async with world() as w:
        product = await w.started()
        await product.open("sum")
        waiting = await w.start_orchestrator(told_seconds=0.0)
        for _ in range(3):
            await waiting.collect()
        (notice,) = [record for _, record in await w.world.run.records("0", 0) if record.get("waiting")]
        assert notice["text"].startswith("waiting for experience: 0 of 1 groups for iteration 1; 1 sessions are open, 0 have a")


async def test_a_run_without_experience_stops(world):
    async with world(online={"max_wait": 1e-9}) as w:
        await w.started()
        for _ in range(2):
            await w.orchestrator.collect()
        state, reason = await w.world.run.state()
        assert state is RunState.DRAINING and "0 of 1 groups for iteration 1" in reason


async def test_the_product_of_the_guide(world, tmp_path):
    guide.write_files("online.md", tmp_path)
    settings = parse_config({**BASE, **yaml.safe_load((tmp_path / "run_sections.yaml").read_text())}, "online.md")
    async with world(group_size=settings.group_size, max_staleness=settings.max_staleness) as w:
        product = await w.started()
        use = runpy.run_path(str(tmp_path / "product.py"))["use"]
        calls = [asyncio.to_thread(use, product.url, KEY, "1+2", lambda answer: len(answer)) for _ in range(settings.group_size)]
        answers = await asyncio.gather(*calls)
        await w.orchestrator.collect()
        (group,) = await trained(w.world, 1)
        assert sorted(sample.text for sample in group.samples) == sorted(answers)
        assert [sample.score for sample in group.samples] == [len(sample.text) for sample in group.samples]


@pytest.mark.parametrize(
    ("sections", "found"),
    [
        ({"reward": {"rewards": [{"name": "exact"}]}}, "`reward`"),
        ({"data": {**BASE["data"], "eval": "eval.jsonl"}}, "data.eval"),
        ({"placement": "colocated"}, "colocated"),
        ({"algorithm": {"preset": "dapo"}}, "dynamic sampling"),
        ({"environment": {"online": {}, "options": {"a": 1}}}, "`options`"),
        ({"environment": {"online": {}, "url": "http://a"}}, "one of them"),
    ],
)
def test_what_a_product_cannot_have_is_refused(sections, found):
    with pytest.raises(ConfigError, match=found):
        parse_config({**BASE, "reward": None, "environment": {"online": {}}, **sections}, "the test")


def test_groups_are_complete_in_the_order_of_their_last_rewards():
    rewarded = [("a", "x"), ("b", "y"), ("c", "y"), ("d", "x"), ("e", "x"), ("f", "z")]
    assert complete_groups(rewarded, 2) == [["b", "c"], ["a", "d"]]
    assert complete_groups([("a", ""), ("b", "")], 1) == [["a"], ["b"]]


async def answered(stub, text):
    """Samples one turn by hand."""
    stream = Stream(stub)
    assert (await stream.start()).HasField("agent")
    await stream.answer(text)


async def test_tool_calls_are_kept_with_their_results(world):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    async with world() as w:
        product = await w.start_server()
        (lease,) = await Registry(w.world.run).leases("environment")
        opened = await product.open("sum")
        async with rpc.connect(lease.address, None) as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
            reply, _ = await asyncio.gather(product.say(opened, HELLO, tools=[tool]), answered(stub, call))
            message = reply.choices[0].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
            await asyncio.gather(product.say(opened, HELLO, message, result, tools=[tool]), answered(stub, "3"))
        first, second = (pb.SessionExchange.FromString(turn) for turn in (await w.store.read(opened["id"])).turns)
        assert [(each.name, each.arguments, each.result) for each in second.calls] == [("add", '{"a": 1}', "3")]
        assert not first.calls


async def test_tool_calls_are_in_the_record_of_their_turn(world):
    async with world() as w:
        product = await w.started()
        opened = await product.open("sum")
        reply = await product.say(opened, HELLO)
        await product.say(opened, HELLO, {"role": "assistant", "content": reply.choices[0].message.content}, HELLO)
        first, second = (await w.store.read(opened["id"])).turns
        told = pb.SessionExchange.FromString(second)
        told.calls.add(name="add", arguments="{}", result="3")
        for id in ("a" * 16, "b" * 16):
            assert await w.store.open(id, "other", 99)
            for number, turn in enumerate((first, told.SerializeToString())):
                assert await w.store.add_turn(id, number, turn, 0) == "ok"
            assert await product.reward(id, 1.0) == 200
        await w.orchestrator.collect()
        (group,) = await trained(w.world, 1)
        for sample in group.samples:
            assert [[call.name for call in turn.tool_calls] for turn in sample.turns] == [["add"], []]


async def test_turns_that_cannot_be_read_are_dropped_alone(world):
    async with world() as w:
        product = await w.started()
        bad = "a" * 16
        assert await w.store.open(bad, "sum", 99) and await w.store.add_turn(bad, 0, b"\xff", 0) == "ok"
        assert await product.reward(bad, 1.0) == 200
        good = [await product.played("sum", 1.0) for _ in range(2)]
        for _ in range(2):
            await w.orchestrator.collect()
        assert (await product.state(bad))["reason"] == "invalid"
        assert [(await product.state(each["id"]))["group"] for each in good] == [0, 0]
