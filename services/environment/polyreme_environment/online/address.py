"""The routes by which a running product opens sessions and ends them. What it does in a session is in `agents.address`.

    POST /v1/sessions              {"task": "..."}: opens a session
    GET  /v1/sessions/ID           its state
    POST /v1/sessions/ID/reward    {"reward": 1.0}: ends it

Invariant: without the run's key, or that of the session, a request learns nothing but that.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polyreme.experience.online import session_url
from polyreme_environment.agents.address import guarded, key_of, read_reward, read_task
from polyreme_environment.agents.request import RefusedRequestError, read_object
from polyreme_environment.online.pool import OnlinePool


def online_routes(pool: OnlinePool) -> list[Route]:
    """The routes."""

    async def opened(request: Request) -> Response:
        pool.check_key(key_of(request))
        body = await request.body()
        task = read_task(read_object(body)) if body else ""
        id, key, kept = await pool.open(task)
        server = pool.url or str(request.base_url).removesuffix("/")  # as the product has reached it, through a proxy or not
        return JSONResponse({"id": id, "base_url": session_url(server, id), "api_key": key, "task": task, "recorded": kept})

    async def rewarded(request: Request) -> Response:
        id = request.path_params["id"]
        pool.check_key(key_of(request), id)
        await pool.reward(id, *read_reward(await request.body()))
        return JSONResponse({"status": "ok"})

    async def told(request: Request) -> Response:
        pool.check_key(key_of(request))
        found = await pool.store.read(request.path_params["id"])
        if found.state == "unknown":
            raise RefusedRequestError(404, "expected the id of a session; found none, or it ended long ago", "not_found")
        state = {"id": found.id, "state": found.state, "task": found.task, "turns": len(found.turns)}
        return JSONResponse({**state, "reward": found.reward, "reason": found.reason, "group": found.group})

    return [
        Route("/v1/sessions", guarded(opened), methods=["POST"]),
        Route("/v1/sessions/{id}", guarded(told), methods=["GET"]),
        Route("/v1/sessions/{id}/reward", guarded(rewarded), methods=["POST"]),
    ]
