"""What a failed command of Redis means: expected, found and do."""

import socket
import ssl
from collections.abc import Iterator

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.sentinel import SentinelConnectionPool

from polyreme.errors import StoreError
from polyreme.net.ports import join
from polyreme.net.redis_url import PASSWORD, SENTINEL_PASSWORD

REQUIRED_SETTINGS = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
"""The settings with which Redis loses no acknowledged write."""
SERVER_FLAGS = " ".join(f"--{name} {value}" for name, value in REQUIRED_SETTINGS.items())
USER_RULES = (
    "~polyreme:* resetchannels -@all +@hash +@list +@set +@sortedset +@stream +@string -@dangerous +del +exists +expire "
    "+pexpire +ttl +scan +evalsha +script|load +wait +time +ping +select +info +config|get"
)
"""The least rights with which a Redis user can do all that Polyreme does, as rules of ACL SETUSER."""


class RefusedError(StoreError):
    """Redis answered a command with an error. This includes errors of our scripts; `Scripts` recognizes them by their code.

    Attributes:
        code, detail: the first word of the reply, and the rest.
    """

    def __init__(self, error: exceptions.ResponseError) -> None:
        # The client removes a known code from the text.
        first, _, rest = str(error).partition(" ")
        self.code, self.detail = (error.status_code, str(error)) if error.status_code else (first, rest)
        super().__init__(*_refusal(self.code, f"{self.code} {self.detail}"))


def _refusal(code: str, reply: str) -> tuple[str, str, str]:
    """Expected, found and do, for an error reply."""
    if code == "NOPERM" or "ACL failure in script" in reply or "The user executing the script" in reply:  # Valkey, and Redis 7.0
        return (
            "a Redis user with the permissions of a run",
            reply,
            f"Give this user, as an administrator of Redis, what it needs: ACL SETUSER <user> {USER_RULES}",
        )
    match code:
        case "OOM":
            return (
                "free memory in Redis",
                "Redis at its `maxmemory`",
                "Raise maxmemory. In a run, a lower trainer.save_interval releases groups sooner; in a training service, "
                "requests leave as they are executed, and results expire. Nothing was lost.",
            )
        case "READONLY" | "MISCONF":
            return "a Redis that accepts writes", reply, "Use the primary, not a replica, and check that its disk has room."
    return "a Redis that executes commands", reply, "Check its log, and its replicas if it has any."


def address(client: Redis) -> str:
    """The address of a client's server, without its password."""
    pool = client.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        return f"the primary {pool.service_name} of its Sentinels"
    kwargs = pool.connection_kwargs
    return kwargs.get("path") or join(kwargs.get("host", "localhost"), kwargs.get("port", 6379))


def is_final(error: Exception) -> bool:
    """Whether a lost or refused connection fails again, however often it is tried."""
    refused = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.InvalidResponse)
    return isinstance(error, refused) or any(isinstance(each, ssl.SSLCertVerificationError) for each in _causes(error))


def store_error(client: Redis, error: Exception) -> StoreError:
    """The StoreError of a failed command."""
    if isinstance(error, exceptions.ResponseError):
        return RefusedError(error)
    where = address(client)
    if isinstance(error, exceptions.BusyLoadingError):
        return StoreError(
            f"Redis at {where} to answer", "it is loading its data", "Wait until it has finished, then start again."
        )
    if isinstance(error, (exceptions.AuthenticationError, exceptions.AuthorizationError)):
        return StoreError(
            f"Redis at {where} to accept the login",
            str(error),
            f"Set {PASSWORD}. The URL names any user other than the default one: redis://user@host:port/0.",
        )
    if isinstance(error, exceptions.InvalidResponse):
        return StoreError(f"a Redis at {where}", "a server that speaks another protocol", "Check host and port of the URL.")
    for each in _causes(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            return StoreError(
                f"a certificate of Redis at {where} that a known CA has signed for this host",
                each.verify_message,
                "Add the file of its CA to the URL (rediss://host:port/0?ssl_ca_certs=/path/ca.pem), and write the host as it "
                "stands in the certificate.",
            )
    if isinstance(client.connection_pool, SentinelConnectionPool):
        return StoreError(
            f"{where} to be named by one of them, and to answer",
            cause(client, error),
            f"Check the Sentinels in the URL, the name of the primary, and {SENTINEL_PASSWORD}.",
        )
    return StoreError(
        f"a Redis that answers at {where}",
        cause(client, error),
        "Check the URL (rediss:// with TLS, redis:// without), and that Redis runs there and is reachable "
        f"(`redis-server {SERVER_FLAGS}` starts one). Without a URL Polyreme starts its own Redis.",
    )


def cause(client: Redis, error: Exception) -> str:
    """The root cause, which redis-py wraps in several layers."""
    for each in _causes(error):
        if isinstance(each, ConnectionRefusedError):
            return "connection refused (nothing listens there)"
        if isinstance(each, socket.gaierror):
            return "no host of that name"
        if isinstance(each, (TimeoutError, exceptions.TimeoutError)):
            return f"no answer within {client.get_connection_kwargs().get('socket_timeout'):g} s"
    return str(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
