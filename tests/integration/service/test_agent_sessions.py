"""Agents' sessions of the training service: the real API, environment server and turns, around a simulated engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from anthropic import AsyncAnthropic
from redis.asyncio import Redis
from transformers import AutoTokenizer

from polyreme.config.serve import ServeAgents, ServeConfig, ServeQuota
from polyreme.experience.requests import RequestLog
from polyreme.experience.run import CURRENT
from polyreme.hub.tiny_model import write_tiny_model
from polyreme.net.http_server import serve_http
from polyreme.net.ports import loopback
from polyreme_environment.server import serve
from polyreme_rollout.testing.simulated_engine import Lengths, SimulatedInferenceEngine
from polyreme_trainer.service.accounts import Accounts
from polyreme_trainer.service.agents.run import KEY_ENV, TOKEN_ENV, open_run, session_secrets
from polyreme_trainer.service.agents.sessions import AgentSessions
from polyreme_trainer.service.agents.turns import serve_turns
from polyreme_trainer.service.api import ServiceApi
from polyreme_trainer.service.folders import FACTS, Facts, Folders, remove
from polyreme_trainer.service.http_answers import tenant_with
from polyreme_trainer.service.messages import SavedModel
from support import simulated_service
from support.waiting import until

VOCABULARY, LONGEST = 99, 256
HELLO = {"role": "user", "content": "1+2"}


class Agents:
    """A service with session addresses. Its API and its turns may end and start again, each alone."""

    def __init__(self, redis: Redis, config: ServeConfig, life: AsyncExitStack) -> None:
        assert config.agents is not None
        self._redis, self._config, self._settings, self._life = redis, config, config.agents, life
        self.log = RequestLog(redis, config.name)
        self._turns: asyncio.Task[None] | None = None
        self._serving, self.url = AsyncExitStack(), ""

    async def start(self) -> None:
        """Starts all processes."""
        await self._life.enter_async_context(self.log.following())
        engine = SimulatedInferenceEngine(frozenset({simulated_service.WEIGHT}), LONGEST, VOCABULARY, lengths=Lengths(mean=8))
        sampling = asyncio.create_task(simulated_service.sample(self.log, stop := asyncio.Event(), engine))
        self._life.push_async_callback(_ended, sampling, stop)
        run = await open_run(self._redis, self._config, self._settings)
        made = await run.config()
        assert made.environment is not None
        lease = await self._life.enter_async_context(serve(made.environment, run=run, group_size=made.group_size))
        self._settings = self._settings.model_copy(update={"url": f"http://{lease.http_address}"})
        self._life.push_async_callback(self.end)
        await self.begin()

    async def begin(self) -> None:
        """Starts the API and the turns."""
        run = await open_run(self._redis, self._config, self._settings)
        accounts = Accounts(quota=self._config.quota)
        sessions = await AgentSessions.open(
            self.log, run, self._settings, accounts, session_secrets(self._config)[KEY_ENV], https=False
        )
        await self._serving.enter_async_context(sessions.sweeping())
        about = simulated_service.BASE, "model", "llama", LONGEST, "key"
        app = ServiceApi(self.log, Folders(self._config.run_dir), *about, accounts, agents=sessions).app()
        port = await self._serving.enter_async_context(serve_http(loopback(), 0, app, 1.0))
        self.url = f"http://{loopback()}:{port}/api/v1/agent_sessions"
        self._turns = asyncio.create_task(serve_turns(self.log, run, self._config, self._settings, asyncio.Event()))

    async def end(self) -> None:
        """Ends the API and the turns as a kill does."""
        assert self._turns is not None
        self._turns.cancel()
        await asyncio.gather(self._turns, return_exceptions=True)
        await self._serving.aclose()

    async def call(self, method: str, path: str = "", key: str = "tml-a", **fields: Any) -> httpx.Response:
        """A request of a tenant's program."""
        async with httpx.AsyncClient(trust_env=False, timeout=60.0) as http:
            return await http.request(method, self.url + path, headers={"x-api-key": key}, json=fields or None)

    async def open(self, **fields: Any) -> dict[str, Any]:
        """A new session."""
        reply = await self.call("POST", **{"seed": 3, **fields})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    async def told(self, opened: dict[str, Any]) -> dict[str, Any]:
        reply = await self.call("GET", f"/{opened['agent_session_id']}")
        assert reply.status_code == 200, reply.text
        return dict(reply.json())


async def _ended(task: "asyncio.Task[None]", stop: asyncio.Event) -> None:
    stop.set()
    await task


@asynccontextmanager
async def client(opened: dict[str, Any]) -> AsyncIterator[openai.AsyncOpenAI]:
    """An agent's client, of what it is given alone."""
    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0) as made:
        yield made


async def say(opened: dict[str, Any], *messages: Any, **more: Any) -> Any:
    """The answer to messages."""
    async with client(opened) as agent:
        return await agent.chat.completions.create(model="any", messages=list(messages), **more)


@pytest.fixture
def settings() -> dict[str, Any]:
    """The section `agents`."""
    return {}


@pytest.fixture
async def agents(
    redis: Redis, run_id: str, tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Agents]:
    write_tiny_model(tmp_path / "model")
    sampler = {"engine": "transformers", "max_model_len": LONGEST}
    tree = {"name": run_id, "output_dir": tmp_path, "model": {"path": tmp_path / "model"}, "sampler": sampler}
    config = ServeConfig.model_validate({**tree, "agents": settings, "quota": ServeQuota(sessions=3)})
    for name, secret in session_secrets(config).items():
        monkeypatch.setenv(name, secret)
    async with AsyncExitStack() as life:
        found = Agents(redis, config, life)
        await found.start()
        yield found


async def test_a_client_reads_the_exact_tokens_of_an_agents_turns(agents: Agents, tmp_path: Path) -> None:
    opened = await agents.open()
    first = await say(opened, HELLO, logprobs=True, extra_body={"return_token_ids": True})
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    second = await say(opened, HELLO, answer, {"role": "user", "content": "3+4"}, extra_body={"return_token_ids": True})
    told = await agents.told(opened)
    [trajectory] = told["trajectories"]
    tokens, mask = trajectory["tokens"], trajectory["mask"]
    assert told["turns"] == 2 and [each["role"] for each in told["messages"]] == ["user", "assistant"] * 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer.encode("1+2=", add_special_tokens=False)
    own = [*first.choices[0].token_ids]
    assert tokens[: len(prompt) + len(own)] == prompt + own
    assert tokens == [*second.prompt_token_ids, *second.choices[0].token_ids]
    sampled = [token for token, given in zip(tokens, mask, strict=True) if given]
    assert sampled == [*own, *second.choices[0].token_ids]
    assert len(trajectory["logprobs"]) == len(tokens)
    logprobs = [each.logprob for each in first.choices[0].logprobs.content]
    assert trajectory["logprobs"][len(prompt) : len(prompt) + len(own)] == pytest.approx(logprobs)


async def test_a_rewritten_conversation_has_two_trajectories_and_a_reward(agents: Agents) -> None:
    opened = await agents.open()
    await say(opened, HELLO)
    await say(opened, {"role": "user", "content": "9"})
    async with httpx.AsyncClient(trust_env=False) as http:
        key = {"authorization": f"Bearer {opened['api_key']}"}
        assert (await http.post(f"{opened['base_url']}/reward", headers=key, json={"reward": 0.5})).status_code == 200
    told = await agents.told(opened)
    assert len(told["trajectories"]) == 2 and told["reward"] == 0.5 and told["is_rewarded"]
    with pytest.raises(openai.BadRequestError, match="rewarded"):
        await say(opened, {"role": "user", "content": "another"})


async def test_a_session_belongs_to_its_tenant_and_its_key(agents: Agents) -> None:
    opened, other = await agents.open(), await agents.open()
    path = f"/{opened['agent_session_id']}"
    for method in ("GET", "DELETE"):
        assert (await agents.call(method, path, key="tml-b")).status_code == 404
    with pytest.raises(openai.AuthenticationError):
        await say({**opened, "api_key": other["api_key"]}, HELLO)
    assert (await agents.call("DELETE", path)).status_code == 204
    assert (await agents.call("GET", path)).status_code == 404
    with pytest.raises(openai.AuthenticationError, match="has ended"):
        await say(opened, HELLO)


async def test_an_ended_session_leaves_no_record(agents: Agents, redis: Redis) -> None:
    """Clients open and end them for as long as a service lives."""
    opened = await agents.open()
    await say(opened, HELLO)
    assert (await agents.call("DELETE", f"/{opened['agent_session_id']}")).status_code == 204
    assert [each async for each in redis.scan_iter(f"*session:{opened['agent_session_id']}")] == []


async def test_a_tenant_has_as_many_open_sessions_as_its_quota(agents: Agents) -> None:
    opened = [await agents.open() for _ in range(3)]
    refused = await agents.call("POST", seed=1)
    assert refused.status_code == 400 and "at most 3 agent sessions" in refused.json()["error"]
    assert (await agents.call("POST", key="tml-b", seed=1)).status_code == 200
    assert (await agents.call("DELETE", f"/{opened[0]['agent_session_id']}")).status_code == 204
    await agents.open()


async def test_the_clients_of_other_apis_sample_from_it_too(agents: Agents) -> None:
    opened = await agents.open(max_tokens=2)
    async with AsyncAnthropic(base_url=opened["base_url"].removesuffix("/v1"), api_key=opened["api_key"], max_retries=0) as agent:
        message: Any = {"role": "user", "content": "1+2"}
        said = await agent.messages.create(model="any", max_tokens=100, messages=[message])
    assert said.usage.output_tokens <= 2
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await say(opened, HELLO, temperature=0.5)
    asked: Any = {"model": "any", "messages": [message], "stream": True}
    async with client(opened) as other, await other.chat.completions.create(**asked) as chunks:
        parts = [part async for part in chunks]
    assert parts[-1].choices[0].finish_reason in ("stop", "length")


async def test_servers_without_a_run_id_do_not_serve_it(agents: Agents, redis: Redis, run_id: str) -> None:
    assert await redis.get(CURRENT) != f"{run_id}-agents".encode()


async def test_a_session_goes_on_with_new_processes(agents: Agents) -> None:
    opened = await agents.open()
    first = await say(opened, HELLO)
    await agents.end()
    await agents.begin()
    assert await say(opened, HELLO) == first
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    await say(opened, HELLO, answer, {"role": "user", "content": "3"})
    [trajectory] = (await agents.told(opened))["trajectories"]
    assert sum(trajectory["mask"]) > 0


async def test_what_cannot_be_sampled_from_is_refused(agents: Agents) -> None:
    for fields, status, said in (
        ({"model_path": f"tinker://{'a' * 32}:train:0/sampler_weights/x"}, 400, "expected a saved checkpoint"),
        ({"sampling_session_id": "none"}, 404, "sampling session"),
        ({"base_model": "another"}, 400, "the base model base"),
        ({"temperature": -1}, 400, "temperature"),
        ({"unknown": 1}, 400, "unknown"),
    ):
        refused = await agents.call("POST", **fields)
        assert refused.status_code == status and said in refused.json()["error"], refused.text
    opened = await agents.open()
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        await say(opened, {"role": "user", "content": "1" * 300})


async def test_an_agent_of_weights_that_are_gone_is_told_so(agents: Agents, tmp_path: Path, run_id: str) -> None:
    """At once, and not after `agents.max_seconds`."""
    saved = SavedModel(f"{'a' * 32}:train:0", "sampler_weights", "one")
    folder = Folders(tmp_path / run_id).folder(saved)
    folder.mkdir(parents=True)
    (folder / FACTS).write_text(Facts("base", None, 1, 0, tenant=tenant_with("tml-a")).to_json())
    opened = await agents.open(model_path=str(saved))
    remove(folder)
    async with asyncio.timeout(60):
        with pytest.raises(openai.BadRequestError, match="weights that the sampler can load"):
            await say(opened, HELLO)


@pytest.mark.parametrize("settings", [{"max_age": 0.2}])
async def test_a_session_that_nobody_ends_is_dropped(agents: Agents, redis: Redis) -> None:
    opened = await agents.open()

    async def gone() -> bool:
        return (await agents.call("GET", f"/{opened['agent_session_id']}")).status_code == 404

    await asyncio.sleep(0.3)
    await agents.end()
    await agents.begin()  # looks at once
    await until(gone)
    assert [each async for each in redis.scan_iter(f"*session:{opened['agent_session_id']}")] == []


def test_the_secrets_of_a_service_stay_the_same(tmp_path: Path) -> None:
    tree = {"name": "s", "output_dir": tmp_path, "model": {"path": tmp_path}, "sampler": {"max_model_len": 8}, "agents": {}}
    config = ServeConfig.model_validate(tree)
    assert isinstance(config.agents, ServeAgents)
    first = session_secrets(config)
    assert first == session_secrets(config) and set(first) == {KEY_ENV, TOKEN_ENV}
