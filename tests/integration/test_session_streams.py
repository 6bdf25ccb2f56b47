"""Streams of a session address, as the public clients of OpenAI and Anthropic read them while the test tells the turn."""

import asyncio
import json
from contextlib import aclosing

import anthropic
import httpx
import pytest

from support.agent_address import BLOCK, FLAT, HELLO, TOOL, address, code_of

PIECES = [
    "<thi",
    "nk>\nuse",
    " it\n</th",
    "ink>\n\nLet me",
    " see.\n<tool",
    '_call>\n{"name": "double", ',
    '"arguments": {"a":  4}}\n</tool_call>',
]
TOLD = ["use", " it", "Let me", " see."]


async def chat(episode, **body):
    same = {"model": "m", "messages": [HELLO], "tools": [TOOL]}
    if not body:
        message = (await episode.client.chat.completions.create(**same)).choices[0]
        yield (
            message.message.reasoning_content,
            message.message.content,
            message.message.tool_calls[0].to_dict(),
            message.finish_reason,
        )
        return
    thought, text = "", ""
    async with await episode.client.chat.completions.create(**same, **body) as chunks:
        async for chunk in chunks:
            choice = chunk.choices[0]
            new = getattr(choice.delta, "reasoning_content", None), choice.delta.content
            thought, text = thought + (new[0] or ""), text + (new[1] or "")
            if any(new):
                yield new[0] or new[1]
    (call,) = choice.delta.tool_calls
    yield thought, text, {key: value for key, value in call.to_dict().items() if key != "index"}, choice.finish_reason


async def responses(episode, **body):
    same = {"model": "m", "input": "hello", "tools": [FLAT]}
    if not body:
        yield (await episode.client.responses.create(**same)).to_dict()
        return
    items = {}
    async with await episode.client.responses.create(**same, **body) as events:
        async for event in events:
            if event.type in ("response.reasoning_text.delta", "response.output_text.delta"):
                yield event.delta
            if event.type == "response.output_item.added":
                assert event.output_index == len(items)
            if event.type == "response.output_item.done":
                items[event.output_index] = event.item
    assert list(items.values()) == event.response.output
    yield event.response.to_dict()


async def messages(episode, **body):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    same = {"model": "m", "max_tokens": 99, "messages": [HELLO], "tools": [BLOCK], "thinking": thinking}
    url = episode.url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=episode.key, max_retries=0) as client:
        if not body:
            yield (await client.messages.create(**same)).to_dict()
            return
        async with client.messages.stream(**same) as events:
            async for event in events:
                if event.type == "content_block_delta" and event.delta.type in ("thinking_delta", "text_delta"):
                    yield getattr(event.delta, event.delta.type.removesuffix("_delta"))
            yield {key: value for key, value in (await events.get_final_message()).to_dict().items() if key != "stop_details"}


@pytest.mark.parametrize("api", [chat, responses, messages])
async def test_what_is_certain_comes_at_once_and_the_rest_is_the_same(api):
    async with address() as opened:
        episode = await opened()
        async with aclosing(api(episode, stream=True)) as stream:
            told = asyncio.ensure_future(anext(stream))
            assert (await episode.read()).agent.streams
            found = []
            for piece in PIECES:
                await episode.tell(piece)
                if piece in (PIECES[1], PIECES[2], PIECES[3], PIECES[4]):
                    found.append(await told)
                    told = asyncio.ensure_future(anext(stream))
            assert found == TOLD and not told.done()
            await episode.answer("".join(PIECES))
            whole = await told
        assert [whole] == [each async for each in api(episode)], "a repeated request, not streamed, gets the same answer"


async def test_completions_stream_texts_before_their_stop():
    async with address() as opened:
        episode = await opened()
        create = episode.client.completions.create
        asking = asyncio.ensure_future(create(model="m", prompt="1+1=", stop=["END"], stream=True))
        await episode.read()
        await episode.tell("<think>2")
        async with await asking as chunks:
            assert (await anext(chunks)).choices[0].text == "<think>2"
            for piece, text in ((" E", " "), ("N", None), ("x", "ENx"), ("END more", None)):
                await episode.tell(piece)
                assert text is None or (await anext(chunks)).choices[0].text == text
            await episode.answer("<think>2 ENxEND")
            choices = [chunk.choices[0] async for chunk in chunks]
        assert "".join(choice.text for choice in choices) == ""
        assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", "END")


async def test_a_thought_that_the_context_has_begun():
    async with address() as opened:
        episode = await opened()
        asking = episode.ask(HELLO, stream=True)
        await episode.read()
        await episode.tell("use it", in_thought=True)
        async with await asking as chunks:
            assert not (await anext(chunks)).choices[0].delta.content
            assert (await anext(chunks)).choices[0].delta.reasoning_content == "use it"
            await episode.answer("use it</think>4", in_thought=True)
            assert [chunk.choices[0].delta.content async for chunk in chunks] == ["4", None]


async def test_a_client_that_closes_its_stream_withdraws_its_request():
    async with address() as opened:
        episode = await opened()
        first, second = episode.ask(HELLO, stream=True), episode.ask(HELLO, stream=True)
        await episode.read()
        await episode.tell("hi")
        streams = [await first, await second]
        await asyncio.gather(*(anext(each) for each in streams))
        await streams[0].close()
        await episode.tell(" there")
        assert [(await anext(streams[1])).choices[0].delta.content for _ in range(2)] == ["hi", " there"], "one still follows it"
        await streams[1].close()
        assert (await episode.read()).number == 1
        await episode.answer("hi there, late", number=1)
        _, ask = await episode.turn("ho", HELLO)
        assert ask.agent.number == 2, "the request is asked for again"
        asking = episode.ask(HELLO, {"role": "assistant", "content": "ho"}, HELLO)
        await episode.read()
        await episode.answer("on")
        await asking
        assert (await episode.end(1.0)).reward == 1.0


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_a_bound_in_mid_stream_is_an_event(path):
    body = {"model": "m", "max_tokens": 9, "messages": [HELLO]} if path != "responses" else {"model": "m", "input": "hello"}
    async with address() as opened, httpx.AsyncClient(timeout=30) as http:
        episode = await opened()
        refused = asyncio.ensure_future(
            http.post(f"{episode.url}/{path}", headers={"x-api-key": episode.key}, json={**body, "stream": True})
        )
        await episode.read()
        await episode.tell("hi")
        await episode.answer(refused="too long", over=True)
        reply = await refused
        events = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: {")]
        assert (
            reply.status_code == 200
            and events[-1]["error"]["code"] == "episode_over"
            and events[-1]["error"]["message"] == "too long"
        )
        assert await code_of(episode.ask(HELLO, stream=True)) == (400, "episode_over"), "before a stream it is a status"
