"""The session address as NeMo Gym's agents know it: `/ng-rollout/ID.KEY/v1/responses`, since they present no key."""

import json

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polyreme_environment.agents.reply import error
from polyreme_environment.agents.request import RefusedRequestError, parse, read_object
from polyreme_environment.agents.session import SessionTable
from polyreme_environment.nemo_gym.responses import chat_body, response

PREFIX = "/ng-rollout/"


def rollout_id(base_url: str, api_key: str) -> str:
    """How the package knows a session: a part of a path that begins with a letter or digit."""
    return f"{base_url.split('/')[-2]}.{api_key}"


def gym_routes(sessions: SessionTable) -> list[Route]:
    """The route, which is a session's for who knows its id and key."""

    async def answer(request: Request) -> Response:
        id, _, key = request.path_params["rollout"].partition(".")
        try:
            session = sessions.find(key, id)
            body = read_object(await request.body())
            turn = await session.answer(parse(json.dumps(chat_body(body)).encode()))
        except RefusedRequestError as refused:
            return JSONResponse(error(refused.message, refused.code), refused.status)
        except ClientDisconnect:  # within its body
            return Response(status_code=400)
        return JSONResponse(response(turn, body))

    return [Route(f"{PREFIX}{{rollout}}/v1/responses", answer, methods=["POST"])]
