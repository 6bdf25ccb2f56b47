"""`polyreme rollout`: one replica, from a Redis URL alone.

Kept here: the engine is started before any thread or event loop, since it forks; and however the process ends, its engine's
processes and files end with it.
"""

from typing import Annotated

import typer

from polyreme.redis_url import redis_option


def rollout(
    redis: Annotated[str, redis_option("URL of the run's Redis.")],
    run: Annotated[str | None, typer.Option(envvar="POLYREME_RUN", help="Run id; without it, the newest run.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to serve on; without it, this machine's on the way to Redis.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0: a free one.")] = 0,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0: a free one.")] = 0,
    wait: Annotated[float, typer.Option(envvar="POLYREME_WAIT", min=0, help="Seconds to wait for the run to be there.")] = 60.0,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Where the trainer reaches the gRPC port, when that is not where it serves: behind a proxy.",
        ),
    ] = None,
) -> None:
    """Serves a run's policy: vLLM behind gRPC and HTTP. It needs no copy of the model."""
    from polyreme.registry import address_towards
    from polyreme_rollout.replica import Place, serve_replica

    serve_replica(redis, run, Place(host or address_towards(redis), port, http_port, advertise), wait)
