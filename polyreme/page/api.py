"""The page's HTTP interface, below /ui.

Invariant: /ui and its static files contain no data of a run and are served without the token. Everything below /ui/api requires
it if the service has one (see `net.http_server`). Every response is read from the runs' directories in the page's own threads.
Only tags and notes are written, for local pages (see `notes`).
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from polyreme.errors import PolyremeError, UnavailableError
from polyreme.page import PATH, answers
from polyreme.page.assets import asset_route, index_page
from polyreme.page.notes import is_local, write_notes
from polyreme.page.runs import Runs
from polyreme.page.server_status import ServerStatus
from polyreme.page.threads import TooBusyError
from polyreme.rundir.reader import RunReader, SampleQuery

_LARGEST_PAGE = 500
_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
    " frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_NUMBERS: Mapping[str, Callable[[str], float]] = {
    "first": int, "last": int, "prompt": int, "tokens_min": int, "tokens_max": int, "score_min": float, "score_max": float,
}  # fmt: skip


def application(runs: Runs, live: ServerStatus | None = None) -> Starlette:
    """The application of the page of `runs`. `live`: status of their servers, if Redis is available."""

    def get(path: str, answer: Callable[[Request], object]) -> Route:
        async def endpoint(request: Request) -> Response:
            return await answered(answer, request)

        return Route(f"{PATH}/api/{path}", endpoint)

    async def answered(answer: Callable[..., object], *values: object) -> Response:
        def rendered() -> str:
            return answers.to_json(answer(*values))

        try:
            found = await runs.threads.run(rendered)
        except (ValueError, OverflowError, RecursionError) as error:  # such as a number beyond 64 bits, or deeply nested JSON
            return JSONResponse({"detail": str(error)}, 400, _HEADERS)
        except UnavailableError as error:
            return JSONResponse({"detail": str(error)}, 503, {**_HEADERS, "retry-after": "10"})
        except TooBusyError:
            return JSONResponse({"detail": "too many requests are waiting; try again"}, 503, {**_HEADERS, "retry-after": "2"})
        if found == "null":
            return JSONResponse({"detail": "not found"}, 404, _HEADERS)
        return Response(found, media_type="application/json", headers=_HEADERS)

    async def curves(request: Request) -> Response:
        return await answered(_curves, runs, await request.body())

    def of_run(answer: Callable[..., object]) -> Callable[[Request], object]:
        def found(request: Request) -> object:
            reader = runs.reader(request.path_params["run"])
            return None if reader is None else answer(reader, request)

        return found

    def final_values(request: Request) -> object:
        writable = is_local(request)
        found = {}
        for name, reader in runs.readers.items():
            with suppress(PolyremeError, OSError):  # the list of runs has the reason
                found[name] = {**answers.final_values(reader), "writable": writable}
        return found

    async def annotate(request: Request) -> Response:
        if not is_local(request) or request.headers.get("content-type") != "application/json":
            return JSONResponse(
                {"detail": "tags and notes are changed only by a page on the server's own machine"}, 403, _HEADERS
            )
        reader = runs.reader(request.path_params["run"])
        return await answered(lambda body: None if reader is None else write_notes(reader.run_dir, body), await request.body())

    async def live_servers(request: Request) -> Response:
        reader = runs.reader(request.path_params["run"])
        found = await live.of(reader) if live is not None and reader is not None else []
        return JSONResponse(found, headers=_HEADERS)

    async def page(_: Request) -> Response:
        return Response(index_page(), media_type="text/html", headers=_HEADERS)

    async def to_page(_: Request) -> Response:
        return RedirectResponse(f"{PATH}/")

    routes = [
        get("runs", lambda _: [answers.overview(name, each, name in runs.indexed) for name, each in runs.readers.items()]),
        get("finals", final_values),
        Route(f"{PATH}/api/runs/{{run}}/notes", annotate, methods=["POST"]),
        Route(f"{PATH}/api/curves", curves, methods=["POST"]),
        get("runs/{run}/samples", of_run(_samples)),
        get("runs/{run}/samples/{sample}", of_run(lambda reader, request: answers.life(reader, request.path_params["sample"]))),
        get("runs/{run}/timeline", of_run(_timeline)),
        get("runs/{run}", of_run(lambda reader, _: answers.details(reader))),
        Route(f"{PATH}/api/runs/{{run}}/servers", live_servers),
        asset_route(_HEADERS),
        Route(f"{PATH}/", page),
        Route(PATH, to_page),
        Route("/", to_page),
    ]
    return Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=2048, compresslevel=3)])


def is_open(path: str) -> bool:
    """Whether a path is served without the token: only the page itself, which contains no data of a run."""
    return path in ("/", PATH) or (path.startswith(f"{PATH}/") and not path.startswith(f"{PATH}/api/"))


def _curves(runs: Runs, body: bytes) -> object:
    """The response to a body {run: {metric: last step that the client has}}. Raises ValueError for any other body."""
    try:
        wanted = {name: {str(key): int(after) for key, after in metrics.items()} for name, metrics in json.loads(body).items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"expected run -> metric -> step; found {error}") from None
    readers = runs.readers
    return {name: answers.curves(readers[name], metrics) for name, metrics in wanted.items() if name in readers}


def _samples(reader: RunReader, request: Request) -> object:
    given = dict(request.query_params)
    offset, limit = max(0, int(given.pop("offset", 0))), max(0, min(_LARGEST_PAGE, int(given.pop("limit", 50))))
    whole = given.pop("whole", "") == "1"
    return answers.sample_list(reader, sample_filter(given), offset, limit, whole)


def sample_filter(given: Mapping[str, str]) -> SampleQuery:
    """The filter in a query string. Raises ValueError for an invalid number or an unknown name."""
    if unknown := given.keys() - set(SampleQuery.__dataclass_fields__):
        raise ValueError(f"expected fields of SampleQuery; found {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {key: _NUMBERS[key](value) if key in _NUMBERS else value for key, value in given.items() if value}
    return SampleQuery(**values)


def _timeline(reader: RunReader, request: Request) -> object:
    given = request.query_params
    return answers.timeline(reader, int(given.get("first", 0)), int(given.get("last", 0)))
