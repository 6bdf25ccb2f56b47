"""Failed HTTP requests: their answers, their documentation, their log lines.

Invariant: every refused or failed request is logged once, with a bounded message on one line.
"""

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from polyreme_reward.scorer import BadBatch, RequestRejected

log = logging.getLogger(__name__)

_LOGGED = 1000  # characters of a failure


class Problem(BaseModel):
    detail: str


class PaddleNlpReply(BaseModel):
    """What PaddleNLP's trainers read. `score` is null unless `error_code` is 0."""

    error_code: int = 0
    error_msg: str = "Success"
    score: list[float] | None = None


BUSY: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The body is not UTF-8 text."},
    401: {"model": Problem, "description": "The service has a token, and the request does not carry it."},
    413: {"model": Problem, "description": "The body is too large."},
    429: {"model": Problem, "description": "The queue is full; ask again after `retry-after` seconds."},
    503: {"model": Problem, "description": "The service shuts down; ask another one after `retry-after` seconds."},
}
"""Answers that every scoring route may give."""


def note(path: str, problem: object) -> None:
    """Logs why a request to `path` failed."""
    log.warning("a request to %s failed: %s", path, str(problem)[:_LOGGED].replace("\n", " "))


def unprocessable(path: str, problem: str) -> Response:
    """A 422 in FastAPI's own form, for what its validation does not check; logged."""
    note(path, problem)
    return JSONResponse({"detail": [{"type": "value_error", "loc": ["body"], "msg": problem}]}, 422)


def add_handlers(app: FastAPI) -> None:
    """Gives the application its answers to requests that are refused or do not fit; PaddleNLP's wire, at /, has a form of its own."""

    @app.exception_handler(RequestRejected)
    async def refused(request: Request, error: RequestRejected) -> Response:
        note(request.url.path, error)
        status = 503 if error.draining else 429
        headers = {"retry-after": str(max(1, round(error.retry_after)))}
        if request.url.path == "/":
            return JSONResponse(PaddleNlpReply(error_code=status, error_msg=str(error)).model_dump(), status, headers)
        return JSONResponse({"detail": str(error)}, status, headers)

    @app.exception_handler(BadBatch)
    async def bad_batch(request: Request, error: BadBatch) -> Response:
        if request.url.path != "/":
            return unprocessable(request.url.path, str(error))
        note("/", error)
        return JSONResponse(PaddleNlpReply(error_code=500, error_msg=str(error)).model_dump())

    @app.exception_handler(RequestValidationError)
    async def bad_request(request: Request, error: RequestValidationError) -> Response:
        detail = jsonable_encoder(error.errors(), custom_encoder={bytes: lambda value: value.decode("utf-8", "replace")})
        bare = [{key: value for key, value in entry.items() if key != "input"} for entry in detail]
        note(request.url.path, bare)
        try:
            return JSONResponse({"detail": detail}, 422)
        except ValueError:  # the input has what JSON cannot hold: NaN, lone surrogates
            return JSONResponse({"detail": bare}, 422)
