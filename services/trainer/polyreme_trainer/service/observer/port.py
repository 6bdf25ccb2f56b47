"""The observer's HTTP port: /health, /metrics, and the run page of the service's models at /ui.

Invariant: it listens on loopback only, since it shows all tenants.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import make_asgi_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from polyreme.net.http_server import serve_http
from polyreme.net.ports import loopback
from polyreme.page.api import application
from polyreme.page.runs import Runs
from polyreme.page.threads import PageThreads
from polyreme.process.tasks import running
from polyreme_trainer.service.observer.metrics import ServiceMetrics
from polyreme_trainer.service.observer.observer import Observer

_PAGE_NICENESS = 10


@asynccontextmanager
async def observer_port(observer: Observer, folder: Path, port: int) -> AsyncIterator[int]:
    """Serves until the block ends. Yields the port. `folder`: the service's directory; `port` 0: a free one.

    Raises:
        ConfigError: the port is taken.
    """
    runs = Runs([folder], PageThreads(_PAGE_NICENESS))
    page = application(runs)
    routes = [Route("/health", _health), Mount("/metrics", make_asgi_app(ServiceMetrics(observer).registry)), *page.routes]
    served = Starlette(routes=routes, middleware=page.user_middleware)
    async with running(runs.keep_current()), serve_http(loopback(), port, served) as bound:
        yield bound


async def _health(request: Request) -> Response:
    return PlainTextResponse("ok\n")
