"""A program that agents run in, as the bench's own process serves it."""

import asyncio
from contextlib import AsyncExitStack

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polyreme.net.http_server import serve_http

TURNS, TOKENS, REQUESTS = 4, 32, 24
"""Of a conversation; of an answer; of one agent that asks for first answers."""


def agent_client() -> httpx.AsyncClient:
    """An agent's own client: one for all agents would look at all their connections for each request."""
    return httpx.AsyncClient(timeout=600.0, verify=False, trust_env=False)


class Agents:
    """A program that agents run in: each asks for chat completions, one after the other."""

    def __init__(self) -> None:
        self.requests, self.hold, self.plays, self.model = 0, asyncio.Event(), True, "policy"
        self.held = 0

    async def serve(self, exits: AsyncExitStack) -> str:
        """Serves it until `exits` close. Returns its URL."""
        routes = Starlette(routes=[Route("/run", self.run, methods=["POST"])])
        return f"http://127.0.0.1:{await exits.enter_async_context(serve_http('127.0.0.1', 0, routes))}/run"

    async def run(self, request: Request) -> Response:
        body = await request.json()
        if self.hold.is_set():
            where = body["base_url"], body["api_key"]
            try:
                return JSONResponse(await (self.play(*where, float(body["task"]["answer"])) if self.plays else self.talk(*where)))
            except httpx.HTTPStatusError as error:
                if error.response.status_code != 401 and "has ended" not in error.response.text:
                    raise
                return Response(status_code=410)  # the bench has given up this episode
        self.held += 1
        await self.hold.wait()
        return JSONResponse(0.0)

    async def talk(self, url: str, key: str) -> float:
        """Asks many times for a first answer."""
        async with agent_client() as client:
            for number in range(REQUESTS):
                await self._ask(client, url, key, [{"role": "user", "content": f"say something {number}"}], 8)
        return 0.0

    async def play(self, url: str, key: str, seconds: float) -> float:
        """One conversation of several turns, with a tool that takes so long between two of them."""
        messages = [{"role": "user", "content": "say something"}]
        async with agent_client() as client:
            for turn in range(TURNS):
                await asyncio.sleep(seconds if turn else 0.0)
                answer = await self._ask(client, url, key, messages, TOKENS)
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on, say more"}]
        return 0.0

    async def _ask(self, client: httpx.AsyncClient, url: str, key: str, messages: list[dict[str, str]], tokens: int) -> str:
        body = {"model": self.model, "messages": messages, "max_tokens": tokens, "temperature": 1.0}
        reply = await client.post(f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        reply.raise_for_status()
        self.requests += 1
        return str(reply.json()["choices"][0]["message"]["content"])
