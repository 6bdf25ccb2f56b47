"""Requests of agents: what is refused, which turn a request continues, and what an agent may return."""

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.config.environment import EnvironmentConfig
from polyreme.dataset.chat import Message
from polyreme_environment.agents.agent_episode import AgentEpisode
from polyreme_environment.agents.apis import APIS, chat
from polyreme_environment.agents.conversation import AgentConversation, digests
from polyreme_environment.agents.message import Spoken, before_stop, spoken, spoken_so_far
from polyreme_environment.agents.request import RefusedRequestError, TurnRequest
from polyreme_environment.agents.result import Result, read_result
from polyreme_environment.agents.session import AgentSession, Asked, SessionLimits, Withdrawn
from polyreme_environment.contract import ContractError
from polyreme_environment.tool_calls import ParsedCall

HELLO = {"role": "user", "content": "hello"}


def request(**body: Any) -> TurnRequest:
    return chat.read(json.loads(json.dumps({"model": "m", "messages": [HELLO], **body})), lambda turn: [])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n", 2),
        ("n", True),
        ("top_p", 0.9),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 100}),
        ("stop", [""]),
        ("stop", "\ud800"),
        ("stop", {"x": 1}),
        ("logprobs", 1),
        ("top_logprobs", 3),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tools", [{"function": {}}]),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {}),
        ("structured_outputs", {"choice": ["a"]}),
        ("min_tokens", 5),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("temperature", "hot"),
        pytest.param("temperature", 10**400, id="temperature-no-float"),
        ("messages", []),
        ("messages", "hello"),
        ("messages", [HELLO, {"role": "assistant", "content": "hi"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": "\ud800"}]),
        ("messages", [{"content": "hello"}]),
    ],
)
def test_what_changes_the_distribution_or_cannot_be_read_is_refused(key: str, value: Any) -> None:
    with pytest.raises(RefusedRequestError) as refused:
        request(**{key: value})
    assert refused.value.status == 400 and key in refused.value.message


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [HELLO]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [HELLO], "max_tokens": 9},
    "/inference/v1/generate": {"token_ids": [5, 6]},
}
FORCED: list[tuple[str, Any]] = [
    ("top_p", 0.9),
    ("top_k", 5),
    ("n", 2),
    ("min_p", 0.1),
    ("presence_penalty", 0.1),
    ("frequency_penalty", 0.1),
    ("repetition_penalty", 1.1),
    ("logit_bias", {"5": 100}),
    ("bad_words", ["a"]),
    ("allowed_token_ids", [5]),
    ("guided_regex", "a"),
    ("guided_json", {}),
    ("structured_outputs", {"choice": ["a"]}),
    ("response_format", {"type": "json_object"}),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "tool", "name": "f"}),
    ("tool_choice", {"type": "function", "name": "f"}),
    ("text", {"format": {"type": "json_schema", "name": "a", "schema": {}}}),
    ("output_format", {"type": "json_schema", "schema": {}}),
    ("chat_template", "{{ messages }}"),
    ("use_beam_search", True),
    ("truncate_prompt_tokens", 5),
    ("ignore_eos", True),
    ("min_tokens", 5),
]


@pytest.mark.parametrize(("key", "value"), FORCED)
@pytest.mark.parametrize("path", sorted(APIS))
def test_every_api_refuses_what_changes_the_distribution(path: str, key: str, value: Any) -> None:
    api, body = APIS[path], BODIES[path]
    assert api.read(body, lambda turn: []).digest != b""
    bodies = [{**body, key: value}]
    bodies += [{**body, "sampling_params": {key: value}}] if path == "/inference/v1/generate" else []
    for each in bodies:
        with pytest.raises(RefusedRequestError) as refused:
            api.read(each, lambda turn: [])
        assert refused.value.status == 400 and key in refused.value.message
        error = api.error(400, refused.value.message, refused.value.code)
        assert error["error"]["type"] == "invalid_request_error" and error["error"]["message"] == refused.value.message
        assert (error.get("type") == "error") == (path == "/v1/messages")


def test_what_changes_nothing_is_accepted() -> None:
    plain = request()
    neutral = {"n": 1, "top_p": 1.0, "stop": None, "tool_choice": "auto", "response_format": {"type": "text"}, "logit_bias": {}}
    found = request(**neutral, seed=3, user="u", stream=True, stream_options={"include_usage": True})
    assert (found.messages, found.max_tokens, found.temperature) == (plain.messages, None, None)
    assert [request(stop=stop).stop for stop in (None, "x", ["x", "y"])] == [(), ("x",), ("x", "y")]
    assert (request(logprobs=True).wants_tokens, plain.wants_tokens) == (True, False)
    assert request(max_tokens=9, max_completion_tokens=7).max_tokens == 7
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    assert request(messages=parts).messages == [HELLO]


def test_equal_requests_have_equal_digests_however_they_are_sent() -> None:
    assert request().digest == request(stream=True, n=None).digest
    others = [request(max_tokens=3), request(messages=[{"role": "user", "content": "hallo"}]), request(temperature=1)]
    assert len({each.digest for each in (request(), *others)}) == 4


ROLES = st.sampled_from(["user", "system", "tool"])
MESSAGES = st.lists(st.builds(lambda role, content: {"role": role, "content": content}, ROLES, st.sampled_from("ab")), min_size=1)
BLANKS = st.sampled_from(["", " ", "\n", "  \n"])


@given(st.lists(st.tuples(MESSAGES, st.text("xy ", max_size=2), BLANKS), min_size=1, max_size=5), st.data())
def test_a_request_continues_the_longest_turn_that_it_repeats(turns: list[Any], data: st.DataObject) -> None:
    """Against a plain model: a dict from the messages, with stripped answers, to the number of the turn."""
    known: dict[Any, int] = {}
    conversation = AgentConversation()
    history: list[dict[str, str]] = []
    for place, (new, answer, blanks) in enumerate(turns, 1):
        begins = data.draw(st.booleans())
        messages = new if begins else [*history, *new]
        plain = [(m["role"], m["content"].strip() if m["role"] == "assistant" else m["content"]) for m in messages]
        found = [end for end in range(1, len(messages)) if tuple(plain[:end]) in known]
        behind = max((end for end in range(len(messages)) if messages[end]["role"] == "assistant"), default=-1)
        expected = max((end for end in found if end > behind), default=0)
        number, rest = conversation.place(messages, digests(messages))
        assert number == (known[tuple(plain[:expected])] if expected else 0) and rest == messages[expected:]
        conversation.add(place, messages, digests(messages), {"role": "assistant", "content": answer})
        known[(*plain, ("assistant", answer.strip()))] = place
        history = [*messages, {"role": "assistant", "content": blanks + answer.strip() + blanks}]


TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 12,  "b":34}}\n</tool_call>'
MULTIPLY = ParsedCall("multiply", {"a": 12, "b": 34}, '{"a": 12, "b": 34}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("408", Spoken("408")),
        ("", Spoken("")),
        (f"Let me see.  \n{CALL}", Spoken("Let me see.", "", (MULTIPLY,))),
        (CALL + CALL, Spoken("", "", (MULTIPLY, MULTIPLY))),
        (f"<think>\nuse it\n</think>\n\n{CALL}", Spoken("", "use it", (MULTIPLY,))),
        ("no thought </think> 42", Spoken("no thought </think> 42")),
        ("<think>\n\n</think>\n\n42 </think>", Spoken("42 </think>")),
        ("<think>\nnever closed", Spoken("", "never closed")),
        ("<tool_call>\nno json\n</tool_call>", Spoken("<tool_call>\nno json\n</tool_call>")),
        (CALL + "<tool_call>no", Spoken(CALL + "<tool_call>no")),
    ],
)
def test_an_answer_as_a_message(text: str, expected: Spoken) -> None:
    assert spoken(text, text, "hermes") == expected
    without = spoken(text, text, None)
    assert not without.calls and without.thought == expected.thought


def test_an_answer_may_begin_within_a_thought() -> None:
    assert spoken("use it\n</think>\n\n42", "", "hermes", True) == Spoken("42", "use it")
    assert spoken(f"use {CALL}", f"use {CALL}", "hermes", True) == Spoken("", f"use {CALL}"), "and end there"


def test_a_call_with_special_tokens_leaves_no_text_out() -> None:
    raw = f"Let me see. {CALL}"
    text = raw.replace("<tool_call>", "").replace("</tool_call>", "").rstrip()
    assert spoken(text, raw, "hermes") == Spoken(text, "", (MULTIPLY,))
    assert spoken_so_far(text, (), "hermes") == Spoken(text), "which a stream has told"


PIECES = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            CALL,
            "<tool_call>",
            "no",
            "\n",
            " ",
            "a",
            "<",
            "</th",
            "STOP",
            "ST",
            "{}",
            '{"name": "f", "parameters": {}}',
        ]
    )
)


@given(PIECES, st.sampled_from([None, "hermes", "llama3_json"]), st.booleans(), st.sampled_from([[], ["STOP"], ["STO", "\n "]]))
def test_what_is_certain_of_an_answer_begins_it(pieces: list[str], parser: str | None, in_thought: bool, stop: list[str]) -> None:
    whole = "".join(pieces)
    text, _ = before_stop(whole, stop)
    said = spoken(text, text, parser, in_thought)
    told = Spoken("")
    for end in range(len(whole) + 1):
        certain = spoken_so_far(whole[:end], stop, parser, in_thought)
        assert certain.thought.startswith(told.thought) and certain.content.startswith(told.content)
        assert not certain.content or certain.thought == said.thought, "the thought comes first"
        told = certain
    assert said.thought.startswith(told.thought) and said.content.startswith(told.content)


async def test_a_session_keeps_no_request_that_it_has_answered() -> None:
    session, asked = AgentSession(SessionLimits(1000, 1, "hermes")), request()
    answering, kept = asyncio.ensure_future(session.answer(asked)), weakref.ref(asked)
    await asyncio.sleep(0)
    session.take()
    session.sampled(pb.Answer(number=1, text="hello"))
    turn = await answering
    del asked, answering
    gc.collect()
    assert kept() is None
    assert await session.answer(request()) is turn and session.take() is None


async def test_the_id_of_a_result_may_be_any_json() -> None:
    session, tool = AgentSession(SessionLimits(1000, 1, "hermes")), {"type": "function", "function": {"name": "f"}}
    asking = asyncio.ensure_future(session.answer(request(tools=[tool])))
    await asyncio.sleep(0)
    session.take()
    session.sampled(pb.Answer(number=1, text='<tool_call>{"name": "f", "arguments": {}}</tool_call>'))
    answer = (await asking).message
    ids: list[Any] = [["a"], {}, 1, answer["tool_calls"][0]["id"]]
    for id in ids:
        result = {"role": "tool", "tool_call_id": id, "content": "1"}
        asking = asyncio.ensure_future(session.answer(request(tools=[tool], messages=[HELLO, answer, result])))
        await asyncio.sleep(0)
        asked = session.take()
        assert isinstance(asked, Asked) and asked.after == 1 and len(asked.calls) == isinstance(id, str)
        session.refused(asked.number, "enough")
        with pytest.raises(RefusedRequestError):
            await asking


async def test_a_stream_that_is_closed_leaves_no_task() -> None:
    session, before = AgentSession(SessionLimits(1000, 1, "hermes")), asyncio.all_tasks()
    parts = session.streamed(lambda history: request())
    first = asyncio.ensure_future(anext(parts))
    await asyncio.sleep(0)
    session.take()
    session.told(pb.Delta(number=1, text="hel"))
    assert (await first).said == Spoken("hel")
    await parts.aclose()
    assert asyncio.all_tasks() == before and isinstance(session.take(), Withdrawn)


def test_calls_are_known_by_their_ids_and_tools_by_what_they_are() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "multiply", "arguments": {"a": 12}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "408"}
    conversation = AgentConversation()
    conversation.add(1, [HELLO], digests([HELLO], [TOOL]), answer)
    again = {**answer, "content": "\n", "tool_calls": [{**call, "function": {"name": "multiply", "arguments": {"a": 12.0}}}]}
    messages: list[Message] = [HELLO, again, result]
    assert conversation.place(messages, digests(messages, [TOOL])) == (1, [result])
    assert conversation.place(messages, digests(messages))[0] == 0, "without tools the prompt is another one"
    other = {**answer, "tool_calls": [{**call, "id": "call_2"}]}
    messages = [HELLO, other, result]
    assert conversation.place(messages, digests(messages, [TOOL]))[0] == 0


def test_a_text_continues_the_longest_turn_that_it_repeats() -> None:
    conversation = AgentConversation()
    assert conversation.place_text("1+1=") == (0, "1+1=")
    for number, text in ((3, "1+1=2\n2+2=4"), (2, None), (1, "1+1=2")):
        conversation.add_text(number, text)
    assert conversation.place_text("1+1=2\n2+2=4") == (3, "")
    assert conversation.place_text("1+1=2\n2+2=5") == (1, "\n2+2=5")
    assert conversation.history(3) is None, "there are no messages"


@pytest.mark.parametrize(
    ("stop", "expected"), [((), ("a b c", None)), (("x",), ("a b c", None)), (("c", " b"), ("a", " b")), (("a",), ("", "a"))]
)
def test_a_text_ends_before_the_first_stop(stop: tuple[str, ...], expected: tuple[str, str | None]) -> None:
    assert before_stop("a b c", stop) == expected


class Silent:
    """Runs an agent that asks once and never ends, and can give no reward after a bound."""

    about, available, ends_at_bounds = ("", ""), True, True

    def __init__(self, session: AgentSession) -> None:
        self._session = session

    async def start(self, server: str) -> None: ...

    async def close(self) -> None: ...

    async def run(self, task: dict[str, object], base_url: str, api_key: str) -> Result:
        with pytest.raises(RefusedRequestError):
            await self._session.answer(request())
        await asyncio.Event().wait()
        raise AssertionError


async def test_an_agent_without_rewards_after_bounds_may_hang_at_one() -> None:
    config = EnvironmentConfig.model_validate({"url": "http://a/run", "step_timeout": 0.01})
    session = AgentSession(SessionLimits(1000, 1, "hermes"))
    asked = asyncio.Event()

    async def answers() -> AsyncIterator[pb.RunRequest]:
        await asked.wait()
        yield pb.RunRequest(answer=pb.Answer(number=1, refused="too late", over=True))
        await asyncio.Event().wait()

    moves = AgentEpisode(config, Silent(session), session, "").play({}, answers())
    assert (await anext(moves)).agent.number == 1
    asked.set()
    ending = await anext(moves)
    assert ending.done and not ending.reward


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Result()),
        (1, Result(1.0)),
        (True, Result(1.0)),
        ({"reward": 0.5, "metrics": {"steps": 3}}, Result(0.5, {"steps": 3.0})),
        ({"metrics": None}, Result()),
    ],
)
def test_results_of_an_agent(value: Any, expected: Result) -> None:
    assert read_result(value) == expected


@pytest.mark.parametrize(
    "value", ["high", "42", {"reward": "1"}, float("nan"), [1.0], {"score": 1.0}, {"metrics": [1]}, {"metrics": {"a": "b"}}]
)
def test_what_is_no_result_is_refused(value: Any) -> None:
    with pytest.raises(ContractError):
        read_result(value)


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"file": "agent.py", "url": "http://a/run"},
        {"file": "agent.py", "name": "Guess", "function": "run"},
        {"url": "http://a/run", "function": "run"},
        {"url": "http://a/run", "options": {"a": 1}},
        {"url": "ftp://a/run"},
    ],
)
def test_a_section_is_a_class_a_function_or_a_url(section: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        EnvironmentConfig.model_validate(section)
