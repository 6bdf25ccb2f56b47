"""The APIs of a session address, as the public clients of OpenAI and Anthropic use them, whole and streamed."""

import asyncio
import json

import anthropic
import httpx
import openai
import pytest

from polyreme.api.v1 import environment_pb2 as pb
from support.agent_address import BLOCK, FLAT, HELLO, TOOL, address, code_of

SAID = '<think>\nuse it\n</think>\n\nLet me see.\n<tool_call>\n{"name": "double", "arguments": {"a":  4}}\n</tool_call>'
TOKENS = pb.TurnTokens(context_ids=[3, 4], ids=[5, 6], logprobs=[-0.5, -1.5], texts=["h", "i"])
LOGPROBS = [("h", -0.5), ("i", -1.5)]


async def answered(episode, request, text, **answer):
    """The reply to a request, and what the stream asked for."""
    asking = asyncio.ensure_future(request)
    ask = await episode.read()
    await episode.answer(text, **answer)
    return await asking, ask.agent


@pytest.mark.parametrize("streamed", [False, True])
async def test_completions_continue_a_text(streamed):
    async def text(stream):
        chunks = [chunk async for chunk in stream]
        return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason

    async with address() as opened:
        episode = await opened()
        create = episode.client.completions.create
        reply, agent = await answered(episode, create(model="m", prompt="1+1=", stop=["\n"], logprobs=0), "2\n", sampled=TOKENS)
        assert (agent.prompt, agent.after, agent.stop, agent.wants_tokens) == ("1+1=", 0, ["\n"], True)
        (choice,) = reply.choices
        assert (choice.text, choice.finish_reason, reply.usage.total_tokens) == ("2", "stop", 7)
        assert list(zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)) == LOGPROBS
        request = create(model="m", prompt="1+1=2\n2+2=", max_tokens=3, stream=streamed)
        reply, agent = await answered(episode, request, "4", is_cut=True)
        assert (agent.prompt, agent.after, agent.max_tokens, agent.wants_tokens) == ("2+2=", 1, 3, False)
        assert (await text(reply) if streamed else (reply.choices[0].text, reply.choices[0].finish_reason)) == ("4", "length")
        request = create(model="m", prompt="1+1=2\n3+", stream=streamed)
        assert (await answered(episode, request, "3"))[1].after == 1, "the longest turn that it repeats"
        _, agent = await answered(episode, create(model="m", prompt="1+1=3"), "3")
        assert (agent.prompt, agent.after) == ("1+1=3", 0)


async def test_completions_take_and_give_tokens():
    async with address() as opened:
        episode = await opened()
        request = episode.client.completions.create(model="m", prompt=[3, 4], extra_body={"return_token_ids": True})
        reply, agent = await answered(episode, request, "hi", sampled=TOKENS)
        assert (agent.context_ids, agent.HasField("prompt"), agent.messages_json) == ([3, 4], False, "")
        assert (reply.choices[0].token_ids, reply.choices[0].prompt_token_ids) == ([5, 6], [3, 4])
        for prompt in ([], "", ["a", "b"], [[1], [2]], [-1], [1.5], [True]):
            assert await code_of(episode.client.completions.create(model="m", prompt=prompt)) == (400, "invalid_request")


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions_have_log_probabilities_and_stop(stream):
    async with address() as opened:
        episode = await opened()
        asking = episode.ask(
            HELLO, logprobs=True, top_logprobs=0, stop="\n", stream=stream, extra_body={"return_token_ids": True}
        )
        assert (await episode.read()).agent.stop == ["\n"]
        await episode.answer("hi\nho", sampled=TOKENS)
        reply = await asking
        if stream:
            chunks = [chunk async for chunk in reply]
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            choice, finish, prompt = chunks[-1].choices[0], chunks[-1].choices[0], chunks[-1]
        else:
            choice, content, finish, prompt = reply.choices[0], reply.choices[0].message.content, reply.choices[0], reply
        assert [(each.token, each.logprob) for each in choice.logprobs.content] == LOGPROBS
        assert (content, finish.finish_reason, finish.stop_reason) == ("hi", "stop", "\n")
        assert (choice.token_ids, prompt.prompt_token_ids) == ([5, 6], [3, 4])
        _, ask = await episode.turn("on", HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and"})
        assert ask.agent.after == 1


async def responses(episode, text=SAID, stream=False, **body):
    """A response to the public client, whole or from its events, and what the episode's stream asked for."""
    create = episode.client.responses.create
    reply, agent = await answered(episode, create(model="m", stream=stream, **body), text)
    if not stream:
        return reply, agent
    events = [event async for event in reply]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = {event.output_index: event.item for event in events if event.type == "response.output_item.done"}
    assert [done[place] for place in sorted(done)] == events[-1].response.output
    deltas = [event.delta for event in events if event.type.endswith(".delta")]
    assert deltas == ["use it", "Let me see.", '{"a": 4}'] if text is SAID else [text]
    return events[-1].response, agent


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_of_items_and_calls(stream):
    async with address() as opened:
        episode = await opened()
        same = {"instructions": "Be brief.", "tools": [{**FLAT, "strict": True}], "stream": stream}
        reply, agent = await responses(episode, input="4?", **same)
        assert json.loads(agent.messages_json) == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "4?"}]
        (declared,) = json.loads(agent.tools_json)
        assert declared == {"type": "function", "function": {**TOOL["function"], "strict": True}}
        thought, message, call = reply.output
        assert (thought.content[0].text, reply.output_text, call.name, call.arguments) == (
            "use it",
            "Let me see.",
            "double",
            '{"a": 4}',
        )
        assert (reply.status, reply.usage.input_tokens, reply.usage.output_tokens) == ("completed", 5, 2)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "8"}
        back = [message.to_dict(), {**call.to_dict(), "arguments": '{"a":4}', "id": "other"}, result]
        _, agent = await responses(episode, "8", input=[{"role": "user", "content": "4?"}, *back], **same)
        assert (agent.after, [each["content"] for each in json.loads(agent.messages_json)]) == (1, ["8"])


async def test_responses_name_an_earlier_answer():
    async with address() as opened:
        episode = await opened()
        told = {"instructions": "Be brief."}
        first, _ = await responses(episode, input="4?", tools=[FLAT], **told)
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "8"}
        more = {"tools": [FLAT], "previous_response_id": first.id}
        second, agent = await responses(episode, "eight", input=[result], **more, **told)
        assert agent.after == 1 and second.previous_response_id == first.id
        third, agent = await responses(episode, "8", input="as a digit", tools=[FLAT], previous_response_id=second.id, **told)
        assert agent.after == 2
        _, agent = await responses(episode, "ok", input="and?", tools=[FLAT], previous_response_id=third.id)
        roles = [each["role"] for each in json.loads(agent.messages_json)]
        assert (agent.after, roles) == (0, ["user", "assistant", "tool", "assistant", "user", "assistant", "user"])
        for unknown in ("resp_x-1", third.id.replace("-3", "-9"), third.id.replace("-3", "-0")):
            request = episode.client.responses.create(model="m", input="a", previous_response_id=unknown)
            assert await code_of(request) == (400, "not_found")


async def test_responses_are_cut_and_have_log_probabilities():
    async with address() as opened:
        episode = await opened()
        request = episode.client.responses.create(
            model="m", input="a", max_output_tokens=2, include=["message.output_text.logprobs"]
        )
        reply, agent = await answered(episode, request, "hi", is_cut=True, sampled=TOKENS)
        assert (agent.max_tokens, reply.status, reply.incomplete_details.reason) == (2, "incomplete", "max_output_tokens")
        assert [(each.token, each.logprob) for each in reply.output[0].content[0].logprobs] == LOGPROBS


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_of_blocks_and_tools(stream):
    async with address() as opened:
        episode = await opened()
        async with anthropic.AsyncAnthropic(
            base_url=episode.url.removesuffix("/v1"), api_key=episode.key, max_retries=0
        ) as client:

            async def message(text, messages, **body):
                same = {"model": "m", "max_tokens": 9, "system": "Be brief.", "tools": [BLOCK], "messages": messages, **body}
                if not stream:
                    return await answered(episode, client.messages.create(**same), text)

                async def final():
                    async with client.messages.stream(**same) as events:
                        return await events.get_final_message()

                return await answered(episode, final(), text)

            cached = [{"type": "text", "text": "4?", "cache_control": {"type": "ephemeral"}}]
            history = [{"role": "user", "content": cached}]
            reply, agent = await message(SAID, history, tool_choice={"type": "auto"})
            assert json.loads(agent.messages_json) == [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "4?"},
            ]
            assert (json.loads(agent.tools_json), agent.max_tokens) == ([TOOL], 9)
            text, call = reply.content
            assert (text.text, call.name, call.input, reply.stop_reason) == ("Let me see.", "double", {"a": 4}, "tool_use")
            assert (reply.usage.input_tokens, reply.usage.output_tokens) == (5, 2)
            history += [{"role": "assistant", "content": [block.to_dict() for block in reply.content]}]
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "8"}]}
            history += [{"role": "user", "content": [result, {"type": "text", "text": "go on"}]}]
            reply, agent = await message("8\nand", history, stop_sequences=["\n"], thinking={"type": "enabled"})
            assert agent.after == 1 and [(each["role"], each["content"]) for each in json.loads(agent.messages_json)] == [
                ("tool", "8"),
                ("user", "go on"),
            ]
            assert (reply.content[0].text, reply.stop_reason, reply.stop_sequence) == ("8", "stop_sequence", "\n")
            reply, _ = await message("<think>\nhm\n</think>\n\nhi", [HELLO], thinking={"type": "enabled", "budget_tokens": 1024})
            assert [block.type for block in reply.content] == ["thinking", "text"]
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.create(
                    model="m", max_tokens=9, messages=[HELLO], tools=[BLOCK], tool_choice={"type": "any"}
                )
            assert refused.value.body["error"]["type"] == "invalid_request_error" and "tool_choice" in str(refused.value)
            assert [each.id for each in (await client.models.list()).data] == ["policy"]
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.with_options(api_key="other").messages.create(model="m", max_tokens=9, messages=[HELLO])
            assert refused.value.body["error"]["type"] == "authentication_error"


REFUSED = {
    "chat/completions": ({"messages": [HELLO]}, ["n", "top_p", "tool_choice", "response_format", "guided_json"]),
    "completions": ({"prompt": "a"}, ["n", "best_of", "top_p", "echo", "suffix", "logprobs", "guided_json"]),
    "responses": ({"input": "a"}, ["top_p", "tool_choice", "text", "conversation", "prompt", "background", "tools"]),
    "messages": ({"messages": [HELLO]}, ["top_p", "top_k", "tool_choice", "output_config", "tools"]),
}
VALUES = {
    "n": 2,
    "best_of": 2,
    "top_p": 0.5,
    "top_k": 5,
    "logprobs": 3,
    "suffix": "b",
    "text": {"format": {"type": "json_schema"}},
    "tools": [{"type": "web_search"}],
}


@pytest.mark.parametrize("path", REFUSED)
async def test_an_api_refuses_by_name_and_ignores_the_harmless(path):
    body, keys = REFUSED[path]
    async with address() as opened:
        episode = await opened()
        async with httpx.AsyncClient(base_url=f"{episode.url}/", headers={"x-api-key": episode.key}, timeout=60) as http:
            for key in keys:
                reply = await http.post(path, json={**body, key: VALUES.get(key, "required")})
                assert reply.status_code == 400 and key in reply.json()["error"]["message"], reply.text
            plain = {**body, "model": "m", "metadata": {"user_id": "u"}, "top_p": 1.0, "temperature": None}
            reply, _ = await answered(episode, http.post(path, json=plain), "hi")
            assert reply.status_code == 200
            assert (await http.post(path, json={**plain, "stream": False})).json() == reply.json(), "a repeated request"


async def test_the_address_has_the_prefix_of_nemo_gym():
    async with address() as opened:
        episode = await opened()
        server = episode.url.partition("/s/")[0]
        for prefix in ("", "/training-token-capture"):
            async with openai.AsyncOpenAI(
                base_url=f"{server}/ng-rollout/{episode.key}{prefix}/v1", api_key="none", max_retries=0
            ) as gym:
                reply, _ = await answered(episode, gym.responses.create(model="m", input=f"a{prefix}"), "hi")
                assert reply.output_text == "hi"
                stranger = gym.with_options(base_url=f"{server}/ng-rollout/{episode.url.split('/')[-2]}/v1")
                assert await code_of(stranger.responses.create(model="m", input="a")) == (401, "invalid_api_key")
