"""HTTP requests to the servers of a run, and replies of servers that are not trusted.

Invariant: no request goes through a proxy. The environment's proxy is for the world outside; a run's servers are on this machine
or in its network, and a proxy cannot reach them.
"""

import ssl
import urllib.request
from http.client import HTTPResponse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

UNCOMPRESSED = {"accept-encoding": "identity"}
"""The header of a request whose reply `read_reply` reads."""


class ReplyError(Exception):
    """A body that is not read to its end."""


async def read_reply(reply: "httpx.Response", limit: int) -> bytes:
    """The body of a streamed reply. None is decompressed, since a few bytes can stand for gigabytes.

    Raises:
        ReplyError: it has more than `limit` bytes, or is compressed.
        httpx.TransportError: it breaks off.
    """
    if (found := reply.headers.get("content-encoding", "identity")) != "identity":
        raise ReplyError(f"expected no Content-Encoding, as the request says; found {found:.20}")
    body = bytearray()
    async for part in reply.aiter_raw():
        body += part
        if len(body) > limit:
            raise ReplyError(f"expected a body of at most {limit} bytes; found more")
    return bytes(body)


def open_direct(request: urllib.request.Request, timeout: float, context: ssl.SSLContext | None) -> HTTPResponse:
    """Sends a request, and returns the reply as `urllib.request.urlopen` does.

    Args:
        timeout: seconds for the connection, and for each wait for data.
        context: TLS for a https URL, or None.

    Raises:
        OSError: no reply, or (urllib.error.HTTPError) a reply with an error's status.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    reply: HTTPResponse = opener.open(request, timeout=timeout)
    return reply
