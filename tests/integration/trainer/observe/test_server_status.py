"""The current values of a run's servers."""

import pytest

from polyreme.page.server_status import scrape
from support.one_reply import one_reply


@pytest.mark.parametrize("reply", [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\na", b"-ERR no HTTP\r\n"])
def test_an_answer_that_breaks_off_is_no_answer(reply: bytes) -> None:
    """What measures a run's servers goes on with the others."""
    with one_reply(reply) as address, pytest.raises(OSError, match="no whole answer"):
        scrape(address, None)
