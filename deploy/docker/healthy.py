"""Checks that a service in this container answers: `healthy http://127.0.0.1:8080/ready`, `healthy redis://127.0.0.1:6379`.

`healthy primary://127.0.0.1:6379` checks that a Redis also takes writes: it is a primary with a replica.

Invariant: uses the standard library only, since it runs every few seconds. With mutual TLS it presents the service's own certificate. It
does not verify the server's certificate, since the connection stays in the container.
"""

import os
import socket
import ssl
import sys
import urllib.request
from urllib.parse import urlsplit

SECONDS = 5


def http(url: str) -> None:
    context = None
    certificate, key = os.environ.get("POLYREME_CERTIFICATE"), os.environ.get("POLYREME_KEY")
    if certificate and key:
        url = url.replace("http:", "https:", 1)
        context = ssl._create_unverified_context()
        context.load_cert_chain(certificate, key)
    # no proxy: one of the container's environment does not lead back into it
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    opener.open(url, timeout=SECONDS).close()  # raises for a bad status


def redis(host: str, port: int, primary: bool) -> None:
    password = os.environ.get("POLYREME_REDIS_PASSWORD", "").encode()
    with socket.create_connection((host, port), SECONDS) as connection, connection.makefile("rb") as replies:
        if password:
            connection.sendall(b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%s\r\n" % (len(password), password))
            replies.readline()
        connection.sendall(b"PING\r\n")
        if (answer := replies.readline()) != b"+PONG\r\n":
            raise OSError(answer.decode(errors="replace").strip())
        if primary:
            connection.sendall(b"INFO replication\r\n")
            facts = replies.read(int(replies.readline()[1:])).split()
            if b"role:master" not in facts or b"connected_slaves:0" in facts:
                raise OSError("no primary with a replica")


def main() -> None:
    url = urlsplit(sys.argv[1])
    try:
        if url.scheme in ("redis", "primary"):
            redis(url.hostname or "127.0.0.1", url.port or 6379, url.scheme == "primary")
        else:
            http(sys.argv[1])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error}")


if __name__ == "__main__":
    main()
