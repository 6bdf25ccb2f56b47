"""A running product: it opens sessions at a run's address, talks in them with the public client, and ends them with rewards."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from redis.asyncio import Redis

from polyreme.experience.ledger import Writer
from polyreme.experience.online import OnlineSessions
from polyreme_environment.server import serve
from polyreme_rollout.testing.simulated_engine import Lengths
from polyreme_trainer.data.tail import Tail
from polyreme_trainer.orchestrator.environment.online import OnlineExperience
from polyreme_trainer.orchestrator.environment.session import Bounds
from support.episode_world import EpisodeWorld, episode_world

KEY = "the key of the product"
HELLO = {"role": "user", "content": "1+2"}


class Product:
    """A product that uses the session address at `http://ADDRESS`."""

    def __init__(self, address: str, http: httpx.AsyncClient, key: str = KEY) -> None:
        self.url, self.http, self._headers = f"http://{address}/v1", http, {"Authorization": f"Bearer {key}"}

    async def open(self, task: str | None = None) -> dict[str, Any]:
        """Opens a session."""
        reply = await self.post("/sessions", {} if task is None else {"task": task})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    async def post(self, path: str, body: Any) -> httpx.Response:
        return await self.http.post(f"{self.url}{path}", json=body, headers=self._headers)

    async def reward(self, id: str, reward: Any, **more: Any) -> int:
        """Gives a reward. Returns the status."""
        return (await self.post(f"/sessions/{id}/reward", {"reward": reward, **more})).status_code

    async def state(self, id: str) -> dict[str, Any]:
        return dict((await self.http.get(f"{self.url}/sessions/{id}", headers=self._headers)).json())

    async def say(self, opened: dict[str, Any], *messages: Any, **more: Any) -> Any:
        """A turn of a session."""
        async with openai.AsyncOpenAI(base_url=f"{self.url}", api_key=opened["api_key"], max_retries=0) as client:
            return await client.chat.completions.create(model="policy", messages=list(messages), **more)

    @asynccontextmanager
    async def streamed(self, opened: dict[str, Any], *messages: Any) -> AsyncIterator[Any]:
        """The texts of a turn of a session, as they come."""
        client = openai.AsyncOpenAI(base_url=f"{self.url}", api_key=opened["api_key"], max_retries=0)
        async with client, await client.chat.completions.create(model="policy", messages=list(messages), stream=True) as chunks:
            yield (text async for chunk in chunks if (text := chunk.choices[0].delta.content))

    async def played(self, task: str | None, reward: float, *messages: Any) -> dict[str, Any]:
        """A session of one turn, with its reward."""
        opened = await self.open(task)
        await self.say(opened, *(messages or (HELLO,)))
        assert await self.reward(opened["id"], reward) == 200
        return opened


class OnlineWorld:
    """A run whose experience comes from a product. Its server and its orchestrator's part may end and start again."""

    def __init__(self, world: EpisodeWorld, http: httpx.AsyncClient, life: AsyncExitStack) -> None:
        self.world, self.http, self._life = world, http, life
        assert world.config.environment is not None and world.config.environment.online is not None
        self.config, self.settings = world.config.environment, world.config.environment.online
        self.store = OnlineSessions(world.run, self.settings.max_age)
        self.orchestrator: OnlineExperience | None = None
        self._server: AsyncExitStack | None = None

    async def start_server(self) -> Product:
        """Starts the environment server, in place of the one before."""
        await self.end_server()
        self._server = await self._life.enter_async_context(AsyncExitStack())
        served = serve(self.config, run=self.world.run, grace=0.0, group_size=self.world.config.group_size)
        lease = await self._server.enter_async_context(served)
        return Product(lease.http_address, self.http)

    async def end_server(self) -> None:
        if self._server is not None:
            await self._server.aclose()
            self._server = None

    async def start_orchestrator(self, **options: Any) -> OnlineExperience:
        """Takes over as the orchestrator, in place of the one before."""
        await self.end_orchestrator()
        world, config = self.world, self.world.config
        await world.log.take(Writer.ORCHESTRATOR)
        bounds = Bounds(self.config.max_turns, config.rollout.max_model_len, self.config.max_seconds)
        tail = Tail(world.template)
        self.orchestrator = OnlineExperience(world.run, world.sampler, tail, bounds, self.settings, world.log, **options)
        await self.orchestrator.refresh()
        return self.orchestrator

    async def end_orchestrator(self) -> None:
        if self.orchestrator is not None:
            await self.orchestrator.close()
            self.orchestrator = None

    async def started(self) -> Product:
        """Starts both."""
        product = await self.start_server()
        await self.start_orchestrator()
        return product


@asynccontextmanager
async def online_world(
    redis: Redis, run_id: str, folder: Path, *, online: dict[str, Any] | None = None, mean_tokens: float = 8.0, **sections: Any
) -> AsyncIterator[OnlineWorld]:
    """A run with a simulated replica.

    Args:
        online: the section environment.online.
        mean_tokens: of a turn.
        sections: see `config_tree`.
    """
    environment = {"online": online or {}, "episodes": 8, **sections.pop("environment", {})}
    settings = {"group_size": 2, "groups_per_iteration": 1, "max_staleness": 1, "reward": None, **sections}
    os.environ["POLYREME_ONLINE_KEY"] = KEY
    try:
        async with AsyncExitStack() as life:
            engine = {"lengths": Lengths(mean_tokens)}
            world = await life.enter_async_context(
                episode_world(redis, run_id, folder, engine, environment=environment, **settings)
            )
            http = await life.enter_async_context(httpx.AsyncClient(timeout=30.0))
            online_run = OnlineWorld(world, http, life)
            life.push_async_callback(online_run.end_orchestrator)
            life.push_async_callback(online_run.end_server)
            yield online_run
    finally:
        del os.environ["POLYREME_ONLINE_KEY"]
