"""Failed HTTP requests: responses, their documentation, and log messages.

Invariant: every refused or failed request is logged exactly once, with a bounded message on one line.
"""

import logging

from fastapi import FastAPI, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from polyreme_reward.scorer import BadBatch, RequestRejected

logger = logging.getLogger(__name__)

_LOGGED = 1000  # maximum characters of a logged failure


class Problem(BaseModel):
    detail: str


class PaddleNlpReply(BaseModel):
    """The reply to PaddleNLP's trainers. `score` is null unless `error_code` is 0."""

    error_code: int = 0
    error_msg: str = "Success"
    score: list[float] | None = None


BUSY: dict[int | str, dict[str, object]] = {
    400: {"model": Problem, "description": "The body is not UTF-8 text."},
    401: {"model": Problem, "description": "The service requires a token that the request does not carry."},
    413: {"model": Problem, "description": "The body is too large."},
    429: {"model": Problem, "description": "The queue is full. Retry after `retry-after` seconds."},
    503: {"model": Problem, "description": "The service is shutting down. Retry with another one after `retry-after` seconds."},
}
"""Error responses of every scoring route."""


def note(path: str, problem: object) -> None:
    """Logs the reason of a failed request to `path`."""
    logger.warning("a request to %s failed: %s", path, str(problem)[:_LOGGED].replace("\n", " "))


def unprocessable(path: str, problem: str) -> Response:
    """Logs a problem that FastAPI's validation does not check, and returns a 422 in FastAPI's format."""
    note(path, problem)
    return JSONResponse({"detail": [{"type": "value_error", "loc": ["body"], "msg": problem}]}, 422)


def add_handlers(app: FastAPI) -> None:
    """Adds handlers for refused and invalid requests. The PaddleNLP protocol at / has its own format of errors."""

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
        except ValueError:  # the input contains NaN or lone surrogates, which JSON cannot hold
            return JSONResponse({"detail": bare}, 422)
