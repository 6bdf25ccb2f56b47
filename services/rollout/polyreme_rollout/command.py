"""`polyreme rollout`: starts one replica, which needs only the URL of Redis.

Invariant: importing this module is cheap, because `polyreme --help` and the command line's checks do so.
"""

from pathlib import Path
from typing import Annotated

import typer

from polyreme.config.named_input import MODEL
from polyreme.errors import ConfigError
from polyreme.hub.resolve import resolve_path
from polyreme.net.endpoint import Advertise, Host, HttpPort, Port, endpoint_of
from polyreme.net.redis_url import redis_option


def rollout(
    redis: Annotated[str | None, redis_option("URL of the run's Redis.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Serve the weights of this Hugging Face directory or name over HTTP only, without a run. Its policy version is"
            " 0."
        ),
    ] = None,
    run: Annotated[str | None, typer.Option(envvar="POLYREME_RUN", help="Run id; default: the newest run.")] = None,
    host: Host = None,
    port: Port = 0,
    http_port: HttpPort = 0,
    advertise: Advertise = None,
    wait: Annotated[float, typer.Option(envvar="POLYREME_WAIT", min=0, help="Seconds to wait for the run to start.")] = 60.0,
) -> None:
    """Serve a run's policy over gRPC and HTTP. It needs no copy of the model."""
    from polyreme_rollout.replica import serve_model, serve_replica

    if model is not None:
        return serve_model(resolve_path(model, MODEL, "--model"), endpoint_of(host, port, http_port, advertise, None))
    if redis is None:
        raise ConfigError("the URL of a run's Redis, or a model directory", "neither", "Pass --redis URL or --model DIR.")
    serve_replica(redis, run, endpoint_of(host, port, http_port, advertise, redis), wait)
