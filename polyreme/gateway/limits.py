"""Bounds of a gateway."""

from dataclasses import dataclass

from polyreme.net.http_server import BODY_LIMIT


@dataclass(frozen=True)
class GatewayLimits:
    """Times are in seconds.

    Attributes:
        requests: maximum number of concurrent requests; further ones get 429.
        seconds: deadline of a request, from its headers to the end of its reply.
        last_word: for sending the error at a deadline, so that a client that reads nothing does not occupy a place longer.
        poll_interval: between two reads of the leases and of the replicas' metrics.
        poll: for a replica's metrics.
        leave: for which a replica may answer after its lease has gone: draining takes up to 25, see `polyreme_rollout.serving`.
        body_bytes: of a request.
    """

    requests: int
    seconds: float
    last_word: float = 5.0
    poll_interval: float = 1.0
    poll: float = 2.0
    leave: float = 30.0
    body_bytes: int = BODY_LIMIT
