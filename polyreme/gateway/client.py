"""An HTTP client of the replicas of one run.

Invariant: it uses the run's TLS and token, and follows neither proxies of the environment nor redirects. A connection has a
deadline; the caller sets that of the reply.
"""

from typing import Any

import httpx

from polyreme.config.security import SecurityConfig
from polyreme.net import tls

_CONNECT_TIMEOUT = 5.0


class ReplicaHttp:
    """The client. Use as `async with ReplicaHttp(...) as http`.

    Args:
        security: security settings of the run; None: plain HTTP.
        connections: maximum number of connections that stay open for further requests.

    Raises:
        ConfigError: the security settings cannot be used.
    """

    def __init__(self, security: SecurityConfig | None, connections: int) -> None:
        token = tls.token(security) if security else None
        context = tls.peer_context(security) if security else None
        self._scheme = "https" if context else "http"
        self._extensions = {"sni_hostname": security.server_name} if security and security.server_name else {}
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {token}"} if token else {},
            verify=context or False,  # plain HTTP needs no trusted certificates, which take time to load
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections),
            trust_env=False,
        )

    async def send(self, method: str, address: str, path: str, **parts: Any) -> httpx.Response:
        """Sends a request. Returns the reply with status and headers; the caller reads the body and closes it.

        Args:
            address: host:port.
            parts: `headers`, `content`.

        Raises:
            httpx.TransportError: there is no reply.
        """
        request = self._client.build_request(method, f"{self._scheme}://{address}{path}", extensions=self._extensions, **parts)
        return await self._client.send(request, stream=True)

    async def __aenter__(self) -> "ReplicaHttp":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
