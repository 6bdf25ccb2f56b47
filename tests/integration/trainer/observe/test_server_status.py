"""The current values of a run's servers."""

import socket
import threading

import pytest

from polyreme.page.server_status import scrape


@pytest.mark.parametrize("reply", [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\na", b"-ERR no HTTP\r\n"])
def test_an_answer_that_breaks_off_is_no_answer(reply: bytes) -> None:
    """What measures a run's servers goes on with the others."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="no whole answer"):
            scrape(f"127.0.0.1:{server.getsockname()[1]}", None)
        thread.join()
