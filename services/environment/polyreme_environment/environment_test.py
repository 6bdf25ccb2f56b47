"""`polyreme environment test FILE` plays one episode and prints it turn by turn.

Invariant: the environment is served and asked as in a run, in a worker process with its limits; only the policy is another one.
Everything is printed completely on any terminal width.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.config.environment import EnvironmentConfig
from polyreme.dataset.chat import Message
from polyreme.errors import ConfigError, DataError, UnavailableError
from polyreme.net import rpc
from polyreme_environment.server import serve
from polyreme_environment.tool_calls import write_call

Policy = Callable[[Sequence[Message], Sequence[Message]], Awaitable[str | None]]
"""The next answer to a conversation with tools; None: there is none, and the episode ends."""
_ANSWER_SECONDS = 300.0
_KEY = "OPENAI_API_KEY"


@dataclass
class TriedEpisode:
    """How an episode went: its reward, why it ended, and whether the environment failed."""

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    ended: str = ""
    failed: bool = False


async def play(
    config: EnvironmentConfig, row: Mapping[str, object], prompt: Sequence[Message], policy: Policy, show: Callable[[str], None]
) -> TriedEpisode:
    """Plays an episode of a row. `prompt`: its messages where `reset` returns none.

    Raises:
        ConfigError, UnavailableError: the environment cannot be loaded, or the policy cannot be asked.
    """
    async with serve(config, grace=0.0) as lease, rpc.connect(lease.address, config.security) as channel:
        call = environment_pb2_grpc.EnvironmentServiceStub(channel).Run()
        try:
            return await _play(call, config, row, prompt, policy, show)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError("an episode", f"{error.code().name}: {error.details()}", "See the message.") from error
        finally:
            call.cancel()


async def _play(
    call: grpc.aio.StreamStreamCall,
    config: EnvironmentConfig,
    row: Mapping[str, object],
    prompt: Sequence[Message],
    policy: Policy,
    show: Callable[[str], None],
) -> TriedEpisode:
    episode, turns, tools = TriedEpisode(), 0, dict[str, Message]()
    said: dict[int, list[Message]] = {0: []}  # the conversation up to each turn, by its number
    await call.write(pb.RunRequest(start=pb.Start(row_json=json.dumps(dict(row)))))
    while True:
        response = await call.read()
        if response.HasField("withdrawal"):
            continue  # it has its answer already
        body = getattr(response, response.WhichOneof("body"))
        reward = body.reward + sum(body.rewards.values())
        episode.reward += reward
        for made in body.calls:
            show(f"call     {made.name or 'malformed'} {made.arguments}  {made.seconds:.3f} s")
        if turns:
            show(f"reward   {reward:g}")
        if response.HasField("ending"):
            episode.failed, episode.ended = bool(body.error), body.error or "the environment ended it"
            for name, value in sorted(body.parts.items()):
                show(f"{name:<8} {value:g}")
            return episode
        number, after, new, declared, refusal = _asked(body, turns, prompt)
        for tool in declared:
            function = tool["function"]
            if function["name"] not in tools:
                names = ", ".join((function.get("parameters") or {}).get("properties", ()))
                show(f"tool     {function['name']}({names}): {function.get('description', '')}")
            tools[function["name"]] = tool
        for message in new:
            show(f"{message['role']:<8} {message['content']}")
        if turns == config.max_turns:
            refusal = f"environment.max_turns = {turns}"
        if refusal and not number:
            episode.ended = refusal
            return episode
        if refusal:
            show(f"refused  {refusal}")
            over = turns == config.max_turns
            await call.write(pb.RunRequest(answer=pb.Answer(refused=refusal, over=over, number=number, seconds_left=1.0)))
            continue
        messages = [*said.get(after, ()), *new]
        text = await policy(messages, declared if number else [*tools.values()])
        if text is None:
            episode.messages, episode.ended = messages, "there is no further answer"
            return episode
        turns += 1
        show(f"turn {turns:<3} {text}")
        episode.messages = said[number or turns] = [*messages, {"role": "assistant", "content": text}]
        answer = pb.Answer(text=text, number=number, seconds_left=config.max_seconds if number else 0.0)
        await call.write(pb.RunRequest(answer=answer))


def _asked(ask: pb.Ask, turns: int, prompt: Sequence[Message]) -> tuple[int, int, list[Message], list[Message], str]:
    """What an Ask asks for, after so many turns: the number of an agent's request (0: there is no agent), the turn that it
    follows, the new messages, the tools that are declared, and why it is refused.
    """
    if not ask.HasField("agent"):
        new: list[Message] = [{"role": message.role, "content": message.content} for message in ask.messages]
        return 0, turns, new or ([] if turns else list(prompt)), json.loads(ask.tools_json or "[]"), ""
    agent = ask.agent
    refusal = "expected messages or a text; found tokens, which only a run's tokenizer reads" if agent.context_ids else ""
    text: list[Message] = [{"role": "user", "content": agent.prompt}] if agent.HasField("prompt") else []
    new = text or json.loads(agent.messages_json or "[]") or ([] if agent.after else list(prompt))
    return agent.number, agent.after, new, json.loads(agent.tools_json or "[]"), refusal


async def typed(messages: Sequence[Message], tools: Sequence[Message]) -> str | None:
    """An answer from standard input: one line, without its end. None at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    line = await asyncio.to_thread(sys.stdin.readline)
    return line.rstrip("\n") if line else None


@asynccontextmanager
async def asked(url: str, model: str | None, parser: str, max_tokens: int) -> AsyncIterator[Policy]:
    """A policy behind an OpenAI-compatible address, such as http://127.0.0.1:8000/v1. Its key is in OPENAI_API_KEY, if needed.

    Args:
        model: its name there; None: the first one that is served.
        parser: how tool calls that the server has parsed are written again for the environment.
    """
    headers = {"authorization": f"Bearer {os.environ[_KEY]}"} if os.environ.get(_KEY) else {}
    base = url.rstrip("/") + "/"
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=_ANSWER_SECONDS, trust_env=False) as http:
        name = model or (await _json(http, "GET", "models"))["data"][0]["id"]

        async def answer(messages: Sequence[Message], tools: Sequence[Message]) -> str:
            body = {
                "model": name,
                "messages": list(messages),
                "max_tokens": max_tokens,
                **({"tools": list(tools)} if tools else {}),
            }
            message = (await _json(http, "POST", "chat/completions", body))["choices"][0]["message"]
            functions = [call["function"] for call in message.get("tool_calls") or []]
            calls = [write_call(function["name"], function["arguments"], parser) for function in functions]
            return "\n".join(filter(None, [message.get("content"), *calls]))

        yield answer


async def _json(http: httpx.AsyncClient, method: str, path: str, body: Any = None) -> Any:
    try:
        response = await http.request(method, path, json=body)
        response.raise_for_status()
        return response.json()
    except (httpx.HTTPError, ValueError) as error:
        detail = error.response.text[:300] if isinstance(error, httpx.HTTPStatusError) else str(error)
        raise UnavailableError(
            f"an OpenAI-compatible server at {http.base_url}", detail or type(error).__name__, "Start it, or fix --url."
        ) from error


def chosen_row(rows: Sequence[Mapping[str, object]], number: int) -> Mapping[str, object]:
    """Row `number`, from 1. Raises DataError."""
    if not 1 <= number <= len(rows):
        raise DataError(
            "--row as the number of a row, from 1", f"{number}; the first {len(rows)} rows were read", "Choose another."
        )
    return rows[number - 1]


def check_test(words: Sequence[str]) -> None:
    """Raises ConfigError unless the words are `test FILE`."""
    if len(words) != 2 or words[0] != "test":
        raise ConfigError("polyreme environment test run.yaml", f"polyreme environment {' '.join(words)}", "Use this form.")
