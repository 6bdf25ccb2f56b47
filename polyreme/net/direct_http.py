"""HTTP requests with urllib to the servers of a run.

Invariant: no request goes through a proxy. The environment's proxy is for the world outside; a run's servers are on this machine
or in its network, and a proxy cannot reach them.
"""

import ssl
import urllib.request
from http.client import HTTPResponse


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
