"""Redis servers with TLS, as a managed service or one's own machines have them. The bundled Valkey is built without."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError, TimeoutError

from polyreme.experience.store_errors import REQUIRED_SETTINGS, USER_RULES
from polyreme.net.ports import free_port
from support.certificates import Issued
from support.waiting import wait_until

# In Debian one program is the server and its tools: its name decides. The package of the tools starts no service.
TLS_REDIS = os.environ.get("POLYREME_TLS_REDIS") or shutil.which("redis-check-rdb") or shutil.which("redis-server")
NO_TLS_REDIS = "no Redis with TLS: apt-get install redis-tools, or set POLYREME_TLS_REDIS; .ci/run installs it"
USER, PASSWORD = "polyreme", "correct-horse"
OPERATOR, SENTINEL = "operator", "battery-staple"
"""Passwords of the default user, who may do everything, and of Sentinels."""


def settings(issued: Issued, host: str, port: int) -> str:
    """Lines of a server's or Sentinel's configuration: it listens with TLS only."""
    return f"bind {host}\nport 0\ntls-port {port}\n" + "".join(
        f"tls-{name} {value}\n"
        for name, value in {
            "cert-file": issued.certificate,
            "key-file": issued.key,
            "ca-cert-file": issued.ca,
            "auth-clients": "no",
            "replication": "yes",
        }.items()
    )


def server_settings(issued: Issued, folder: Path, host: str, port: int) -> str:
    """Lines of a server's configuration: the settings and the user of a run."""
    durable = "".join(f"{name} {value}\n" for name, value in REQUIRED_SETTINGS.items())
    users = f"user default on >{OPERATOR} ~* &* +@all\nuser {USER} on >{PASSWORD} {USER_RULES}\n"
    return settings(issued, host, port) + durable + users + f'dir {folder}\nsave ""\n'


def started(folder: Path, name: str, config: str, *options: str) -> "subprocess.Popen[bytes]":
    """Starts a server with a configuration, in its folder."""
    program = folder / "redis-server"
    if not program.is_symlink():
        program.symlink_to(str(TLS_REDIS))
    (path := folder / f"{name}.conf").write_text(config)
    with open(folder / f"{name}.log", "ab") as log:
        return subprocess.Popen([program, path, *options], stdout=log, stderr=log)


@contextmanager
def tls_redis(folder: Path, issued: Issued) -> Iterator[int]:
    """A server at 127.0.0.1. Yields its port."""
    port = free_port()
    process = started(folder, "server", server_settings(issued, folder, "127.0.0.1", port))
    try:
        with operator(issued, "127.0.0.1", port) as client:
            wait_until(lambda: process.poll() is not None or answers(client))
        assert process.poll() is None, (folder / "server.log").read_text()
        yield port
    finally:
        process.kill()
        process.wait()


def operator(issued: Issued, host: str, port: int, password: str = OPERATOR) -> Redis:
    """A client that may do everything."""
    return Redis(host=host, port=port, password=password, ssl=True, ssl_ca_certs=str(issued.ca), socket_timeout=5)


def answers(client: Redis) -> bool:
    """Whether the server has started. Raises what is not a lost connection."""
    try:
        return bool(client.ping())
    except (ConnectionError, TimeoutError):
        return False
