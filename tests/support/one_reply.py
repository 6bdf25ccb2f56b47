"""A TCP server that gives one connection the bytes of a reply, and closes it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_reply(reply: bytes) -> Iterator[str]:
    """Serves on loopback until its one connection has ended. Yields HOST:PORT."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()
