"""The session address over HTTP, as the public client of OpenAI and hostile ones use it. The test is the agent, and answers the episode's stream."""

import asyncio
import gzip
import json

import grpc
import httpx
import pytest
from starlette.responses import JSONResponse, Response

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.config.environment import EnvironmentConfig
from polyreme.net import rpc
from polyreme_environment.server import serve
from support.agent_address import HELLO, address, asked, code_of
from support.waiting import until


async def test_turns_of_the_public_client():
    async with address() as opened:
        episode = await opened()
        reply, ask = await episode.turn("hi ", HELLO)
        assert asked(ask) == (0, [("user", "hello")])
        (choice,) = reply.choices
        assert (choice.message.content, choice.finish_reason, reply.model) == ("hi ", "stop", "m")
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (5, 2, 7)
        back = {"role": "assistant", "content": "\nhi"}
        asking = episode.ask(
            HELLO, back, {"role": "user", "content": "more"}, max_tokens=9, stream=True, stream_options={"include_usage": True}
        )
        ask = await episode.read()
        assert (asked(ask), ask.agent.max_tokens) == ((1, [("user", "more")]), 9)
        await episode.answer("yes", is_cut=True)
        chunks = [chunk async for chunk in await asking]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "yes"
        assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].usage.total_tokens == 7
        assert [model.id for model in (await episode.client.models.list()).data] == ["policy"]
        ending = await episode.end({"reward": 0.5, "metrics": {"steps": 2}})
        assert (ending.reward, dict(ending.parts), ending.error) == (0.5, {"steps": 2.0}, "")


TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 12}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_are_called_and_answered(stream):
    async with address() as opened:
        episode = await opened()
        asking = episode.ask(HELLO, tools=[TOOL], stream=stream)
        ask = await episode.read()
        assert json.loads(ask.agent.tools_json) == [TOOL]
        await episode.answer(f"Let me see.\n{CALL}")
        reply = await asking
        if stream:
            choices = [chunk.choices[0] async for chunk in reply]
            message, finish = choices[-1].delta, choices[-1].finish_reason
            message.content = "".join(choice.delta.content or "" for choice in choices)
        else:
            message, finish = reply.choices[0].message, reply.choices[0].finish_reason
        (call,) = message.tool_calls
        assert (message.content, finish, call.function.name, call.function.arguments) == (
            "Let me see.",
            "tool_calls",
            "multiply",
            '{"a": 12}',
        )
        function = {"name": "multiply", "arguments": '{"a":12}'}
        back = {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        }
        result = {"role": "tool", "tool_call_id": call.id, "content": "408"}
        _, ask = await episode.turn("408", HELLO, back, result, tools=[TOOL])
        assert asked(ask) == (1, [("tool", "408")])
        assert [(made.name, made.arguments, made.result) for made in ask.calls] == [("multiply", '{"a": 12}', "408")]
        reply, ask = await episode.turn(CALL, HELLO, tools=[TOOL], tool_choice="none")
        assert reply.choices[0].message.content == CALL and asked(ask) == (0, [("user", "hello")])


async def test_a_repeated_request_gets_the_same_answer():
    async with address() as opened:
        episode = await opened()
        first, again = episode.ask(HELLO), episode.ask(HELLO)
        await episode.read()
        await episode.answer("hi")
        assert (await first) == (await again) == (await episode.ask(HELLO))
        _, ask = await episode.turn("ho", HELLO, max_tokens=3)
        assert asked(ask) == (0, [("user", "hello")]), "another request"


async def test_a_client_that_leaves_may_ask_again():
    async with address() as opened:
        episode = await opened()
        leaving = episode.ask(HELLO, stream=True)
        await episode.read()
        leaving.cancel()
        again = episode.ask(HELLO, stream=True)
        await asyncio.sleep(0)
        await episode.answer("hi")
        async with await again as stream:
            assert (await anext(aiter(stream))).id.endswith("-1")
        _, ask = await episode.turn("ho", HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "on"})
        assert ask.agent.after == 1


async def test_a_key_opens_only_its_own_session():
    async with address() as opened:
        one, other = await opened(), await opened()
        stranger = one.client.with_options(api_key=other.key)
        assert await code_of(stranger.chat.completions.create(model="m", messages=[HELLO])) == (401, "invalid_api_key")
        async with httpx.AsyncClient() as http:
            for headers in ({}, {"authorization": "Bearer x"}, {"authorization": f"Basic {one.key}"}, {"x-api-key": b"\xff"}):
                assert (await http.post(f"{one.url}/chat/completions", headers=headers, json={})).status_code == 401
            assert (await http.post(f"{one.url}/reward", headers={"x-api-key": other.key}, json={"reward": 9})).status_code == 401
            plain = one.url.partition("/s/")[0] + "/v1/models"
            assert (await http.get(plain, headers={"x-api-key": one.key})).status_code == 200
            named = one.url.partition("/s/")[0] + "/by-model/v1/reward"
            statuses = [
                (await http.post(named, json={"model": key, "reward": 9})).status_code for key in ("policy", None, one.key)
            ]
            assert statuses == [401, 401, 400], "no turn has this reward"
        reply, _ = await one.turn("hi", HELLO)
        assert reply.choices[0].message.content == "hi"
        assert (await one.end(1.0)).reward == 1.0
        async with httpx.AsyncClient(headers={"x-api-key": one.key}) as http:

            async def is_closed() -> bool:
                return (await http.get(f"{one.url}/models")).status_code == 401

            await until(is_closed)  # soon after the end is told
        assert await code_of(one.ask(HELLO)) == (401, "invalid_api_key")


async def test_the_runs_token_and_the_keys_of_sessions_are_apart(monkeypatch):
    monkeypatch.setenv("EPISODES", "secret")
    async with address({"token_env": "EPISODES"}) as opened, httpx.AsyncClient() as http:
        episode = await opened()
        reply, _ = await episode.turn("hi", HELLO)
        assert reply.choices[0].message.content == "hi"
        server = episode.url.partition("/s/")[0]
        for key in (episode.key, "secret"):
            expected = 200 if key == "secret" else 401
            assert (await http.get(f"{server}/metrics", headers={"authorization": f"Bearer {key}"})).status_code == expected
        assert (await http.get(f"{episode.url}/models", headers={"authorization": "Bearer secret"})).status_code == 401


async def test_what_a_session_refuses_costs_no_turn():
    async with address(max_message_chars=10) as opened:
        episode = await opened()
        assert await code_of(episode.ask(HELLO, n=2)) == (400, "invalid_request")
        assert await code_of(episode.ask({"role": "user", "content": "a" * 11})) == (400, "invalid_request")
        tool = {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {"a" * (1 << 20): {}}}},
        }
        assert await code_of(episode.ask(HELLO, tools=[tool])) == (400, "invalid_request")
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "a" * 11})}}
        past = {"role": "assistant", "content": "", "tool_calls": [call]}
        assert await code_of(episode.ask(past, HELLO)) == (400, "invalid_request")
        refused = episode.ask(HELLO, temperature=0.5)
        assert (await episode.read()).agent.temperature == 0.5
        await episode.answer(refused="another temperature")
        assert await code_of(refused) == (400, "invalid_request")
        async with httpx.AsyncClient(headers={"x-api-key": episode.key}) as http:
            for body in ({"reward": "1"}, {"reward": True}, {}, {"reward": 1}):
                assert (await http.post(f"{episode.url}/reward", json=body)).status_code == 400, "there is no turn yet"
            for content in (b"[]", b"{", b"\xff"):
                assert (await http.post(f"{episode.url}/chat/completions", content=content)).status_code == 400
        _, ask = await episode.turn("hi", HELLO)
        assert asked(ask) == (0, [("user", "hello")]) and not ask.agent.HasField("temperature")


@pytest.mark.parametrize("value", ["NaN", "1e999", "[" * 480 + "]" * 480], ids=["nan", "infinite", "deep"])
async def test_a_value_that_is_no_json_is_refused(value):
    """Before a turn is sampled: its reply could not tell the value."""
    tools = '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}]'
    async with address() as opened:
        episode = await opened()
        async with httpx.AsyncClient(headers={"x-api-key": episode.key}) as http:
            for path, body in (
                ("responses", '{"input": "a", "metadata": {"a": %s}}'),
                ("chat/completions", '{"messages": [{"role": "user", "content": "a"}], ' + tools + "}"),
            ):
                reply = await http.post(f"{episode.url}/{path}", content=body % value)
                assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_request"


async def test_after_a_bound_a_session_replays_and_refuses():
    async with address() as opened:
        episode = await opened()
        first, _ = await episode.turn("hi", HELLO)
        async with httpx.AsyncClient(headers={"x-api-key": episode.key}) as http:
            assert (await http.post(f"{episode.url}/reward", json={"reward": 0.25})).status_code == 200
        more = {"role": "user", "content": "more"}
        refused = episode.ask(more)
        await episode.read()
        await episode.answer(refused="too many turns", over=True)
        assert await code_of(refused) == (400, "episode_over")
        assert await code_of(episode.ask(more)) == (400, "episode_over")
        assert await episode.ask(HELLO) == first
        ending = await episode.end(Response("broken", 500))
        assert (ending.reward, ending.error) == (0.0, ""), "the posted reward came with the last ask"


async def test_an_agent_may_give_its_reward_after_the_last_second():
    async with address(step_timeout=60.0) as opened:
        episode = await opened()
        refused = episode.ask(HELLO)
        await episode.read()
        await episode.answer(refused="too late", over=True, seconds_left=0)
        assert await code_of(refused) == (400, "episode_over")
        ending = await episode.end(0.25)
        assert (ending.reward, ending.error) == (0.25, "")


def said(*texts):
    """A conversation: messages of the user and answers in turn."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


async def test_requests_at_once_are_asked_and_answered_in_any_order():
    async with address(parallel_turns=3) as opened:
        episode = await opened()
        await episode.turn("hi", HELLO)
        asking = [episode.ask(*said("hello", "hi", text)) for text in ("a", "b")]
        asking.append(episode.ask(*said("c")))
        asks = [asked(await episode.read()) for _ in range(3)]
        assert sorted(asks) == [(0, [("user", "c")]), (1, [("user", "a")]), (1, [("user", "b")])]
        late = episode.ask(*said("d"))
        again = episode.ask(*said("c"))
        texts = {text: f"to {text}" for text in "abc"}
        numbers = {ask[1][0][1]: number for ask, number in zip(asks, episode.asked[1:], strict=True)}
        for text in ("c", "b"):
            await episode.answer(texts[text], numbers[text])
        assert [(await reply).choices[0].message.content for reply in asking[1:]] == ["to b", "to c"]
        assert (await again) == (await asking[2]), "it joined the one that was sampled"
        assert asked(await episode.read()) == (0, [("user", "d")]), "there was no room before"
        assert not asking[0].done()
        await episode.answer("to d")
        await episode.answer("to a", numbers["a"])
        assert (await late).choices[0].message.content == "to d"
        assert (await asking[0]).choices[0].message.content == "to a"
        for text in ("a", "b"):
            _, ask = await episode.turn("on", *said("hello", "hi", text, f"to {text}", "and"))
            assert asked(ask) == (numbers[text], [("user", "and")])


async def test_a_reward_belongs_to_the_turn_before_it_and_calls_to_theirs():
    async with address() as opened:
        episode = await opened()
        replies = [(await episode.turn(CALL, *said(text), tools=[TOOL]))[0] for text in ("a", "b")]
        async with httpx.AsyncClient(headers={"x-api-key": episode.key}) as http:
            assert (await http.post(f"{episode.url}/reward", json={"reward": 0.5})).status_code == 200
        asking = episode.ask(*said("c"))
        assert dict((await episode.read()).rewards) == {2: 0.5}
        messages = [reply.choices[0].message for reply in replies]
        results = [{"role": "tool", "tool_call_id": each.tool_calls[0].id, "content": "4"} for each in messages]
        back = [[*said(text), m.to_dict(), result] for text, m, result in zip("ab", messages, results, strict=True)]
        _, ask = await episode.turn("4", *back[0], tools=[TOOL])
        assert (ask.agent.after, [call.name for call in ask.calls], dict(ask.rewards)) == (1, ["multiply"], {})
        await episode.answer("to c", 3)
        await asking
        async with httpx.AsyncClient(headers={"x-api-key": episode.key}) as http:
            assert (await http.post(f"{episode.url}/reward", json={"reward": 0.25})).status_code == 200
        ending = await episode.end(1.0)
        assert (ending.reward, dict(ending.rewards)) == (1.0, {3: 0.25}), "the turn that was answered last"


async def test_a_bound_ends_no_turn_that_is_sampled():
    async with address(parallel_turns=2) as opened:
        episode = await opened()
        asking = [episode.ask(*said(text)) for text in "abc"]
        asks = [asked(await episode.read())[1][0][1] for _ in range(2)]
        await episode.answer(refused="too many turns", over=True, number=episode.asked[1])
        done = {text: asking["abc".index(text)] for text in "abc"}
        waits = next(text for text in "abc" if text not in asks)
        assert await code_of(done[asks[1]]) == await code_of(done[waits]) == (400, "episode_over")
        await episode.answer("hi", episode.asked[0])
        assert (await done[asks[0]]).choices[0].message.content == "hi"
        assert await code_of(episode.ask(HELLO)) == (400, "episode_over")


async def test_requests_that_wait_are_bounded():
    async with address(parallel_turns=2) as opened:
        episode = await opened()
        waiting = [episode.ask({"role": "user", "content": f"{number}"}) for number in range(70)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert await code_of(done.pop()) == (429, "too_many")
        episode.call.cancel()
        codes = {await code_of(request) for request in waiting}
        assert codes == {(429, "too_many"), (400, "episode_over")}


async def test_abandoned_sessions_leave_nothing_behind():
    async with address(episodes=4) as opened:
        keys = set()
        for _ in range(12):
            four = [await opened() for _ in range(4)]
            keys |= {episode.key for episode in four}
            asking = [episode.ask(HELLO) for episode in four]
            for episode in four:
                episode.call.cancel()
            for request in asking:
                assert await code_of(request) in ((400, "episode_over"), (401, "invalid_api_key"))
        assert len(keys) == 48


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Response("broken", 500), "the agent answered 500: broken"),
        (Response("{"), "the agent's answer: "),
        (JSONResponse({"score": 1}), "found ['score']"),
        (JSONResponse({"reward": "high"}), "expected a number as the reward"),
        (JSONResponse(None), "expected a reward, which the agent returns"),
        (Response(b"1" * (2 << 20)), "expected a body of at most 1048576 bytes"),
        (Response(gzip.compress(b"1.0"), headers={"content-encoding": "gzip"}), "expected no Content-Encoding"),
    ],
)
async def test_a_broken_reply_of_an_agent_is_a_failure(reply, error):
    async with address() as opened:
        episode = await opened()
        await episode.turn("hi", HELLO)
        assert error in (await episode.end(reply)).error


async def test_an_agent_that_cannot_be_reached_costs_a_try():
    config = EnvironmentConfig(url="http://127.0.0.1:9/run")
    async with serve(config, grace=0.0) as lease, rpc.connect(lease.address) as channel:
        call = environment_pb2_grpc.EnvironmentServiceStub(channel).Run()
        await call.write(pb.RunRequest(start=pb.Start(row_json="{}")))
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be reached"):
            await call.read()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
