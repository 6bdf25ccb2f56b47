"""`polyreme rollout`: one replica, from a Redis URL alone.

Kept here: the engine is started before any thread or event loop, since it forks; and however the process ends, its engine's
processes and files end with it.
"""

from typing import Annotated

import typer

from polyreme.net.endpoint import Advertise, Host, HttpPort, Port, place_of
from polyreme.net.redis_url import redis_option


def rollout(
    redis: Annotated[str, redis_option("URL of the run's Redis.")],
    run: Annotated[str | None, typer.Option(envvar="POLYREME_RUN", help="Run id; without it, the newest run.")] = None,
    host: Host = None,
    port: Port = 0,
    http_port: HttpPort = 0,
    advertise: Advertise = None,
    wait: Annotated[float, typer.Option(envvar="POLYREME_WAIT", min=0, help="Seconds to wait for the run to be there.")] = 60.0,
) -> None:
    """Serves a run's policy: vLLM behind gRPC and HTTP. It needs no copy of the model."""
    from polyreme_rollout.replica import serve_replica

    serve_replica(redis, run, place_of(host, port, http_port, advertise, redis), wait)
