"""A client of an OpenAI-compatible /v1, for a terminal: it streams one answer at a time.

Invariant: every request has a deadline for its connection and for each wait for data.
"""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

from polyreme.config.security import EndpointSecurity, SecurityConfig
from polyreme.errors import ConfigError, PolyremeError, UnavailableError
from polyreme.net import tls
from polyreme.net.direct_http import open_direct

Chat = list[dict[str, str]]
_DATA = b"data:"


class RequestRefusedError(PolyremeError):
    """The server refused a request (status 400)."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer. `version`: the policy version that the reply names for it, or ''."""

    text: str
    version: str = ""


class V1Client:
    """A client of one server.

    Args:
        url: URL of its /v1, such as http://127.0.0.1:39121/v1.
        security: TLS and token, or None.
        timeout: seconds for a connection, and for each wait for data.
    """

    def __init__(self, url: str, security: SecurityConfig | EndpointSecurity | None = None, timeout: float = 120.0) -> None:
        self._url, self._timeout = url.rstrip("/"), timeout
        self._token = tls.token(security) if security else None
        self._context: ssl.SSLContext | None = None
        if self._url.startswith("https://"):
            trusted = security.ca if security else None
            shown = isinstance(security, EndpointSecurity) or bool(security and security.mutual)
            pair = {"certificate": security.certificate, "key": security.key} if security and shown else {}
            self._context = tls.client_context(EndpointSecurity(ca=trusted, **pair))

    def model(self) -> str:
        """Name of the model that the server has. Raises UnavailableError, PolyremeError."""
        with self._open("/models", None) as reply:
            text = b"".join(self._lines(reply))
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"the models of a /v1 at {self._url}/models", repr(text[:80])[1:], "Pass the address of a /v1, which ends in /v1."
            ) from None

    def chat(self, model: str, messages: Sequence[dict[str, str]], max_tokens: int | None, temperature: float) -> Iterator[Piece]:
        """Streams the answer to a conversation, of at most `max_tokens` (None: the rest of the context). Raises UnavailableError,
        RequestRefusedError, PolyremeError."""
        body = {"messages": list(messages)}
        for event in self._stream("/chat/completions", model, body, max_tokens, temperature):
            for choice in event.get("choices", ()):
                yield Piece(choice.get("delta", {}).get("content") or "", _version(event))

    def complete(self, model: str, prompt: str, max_tokens: int | None, temperature: float) -> Iterator[Piece]:
        """Streams the continuation of a text, as `chat` does."""
        for event in self._stream("/completions", model, {"prompt": prompt}, max_tokens, temperature):
            for choice in event.get("choices", ()):
                yield Piece(choice.get("text") or "", _version(event))

    def _stream(
        self, path: str, model: str, body: Mapping[str, object], max_tokens: int | None, temperature: float
    ) -> Iterator[dict[str, Any]]:
        length = {} if max_tokens is None else {"max_tokens": max_tokens}
        asked = {"model": model, **length, "temperature": temperature, "stream": True, **body}
        with self._open(path, asked) as reply:
            for line in self._lines(reply):
                text = line.removeprefix(_DATA).strip()
                if line.startswith(_DATA) and text == b"[DONE]":
                    return
                if line.startswith(_DATA):
                    event = json.loads(text)
                    if error := event.get("error"):
                        raise PolyremeError("an answer", str(error), "See the log of the replica.")
                    yield event
        raise UnavailableError(f"the rest of an answer from {self._url}", "the end of the stream", "Ask again.")

    def _lines(self, reply: HTTPResponse) -> Iterator[bytes]:
        try:
            yield from reply
        except (OSError, ValueError, HTTPException) as error:
            raise UnavailableError(
                f"the rest of an answer from {self._url}", str(error) or type(error).__name__, "Ask again."
            ) from None

    def _open(self, path: str, body: Mapping[str, object] | None) -> HTTPResponse:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self._token}"} if self._token else {})
        try:
            request = urllib.request.Request(self._url + path, json.dumps(body).encode() if body else None, headers)
            return open_direct(request, self._timeout, self._context)
        except urllib.error.HTTPError as error:
            found = f"status {error.code}: {_message(error.read())}"
            kind = RequestRefusedError if error.code == 400 else PolyremeError
            raise kind(f"an answer from {self._url}", found, "Fix the request, or see the log of the replica.") from None
        except (OSError, ValueError, HTTPException) as error:
            raise UnavailableError(
                f"a server at {self._url}", str(error), "Check that the run is live, and its address."
            ) from None


def _version(event: dict[str, object]) -> str:
    fingerprint = str(event.get("system_fingerprint") or "")
    return fingerprint.removeprefix("policy-") if fingerprint.startswith("policy-") else ""


def _message(body: bytes) -> str:
    """The message in an error's body, otherwise the beginning of the body."""
    try:
        found = json.loads(body)
        message = found.get("error", {}).get("message") or found.get("detail") or found.get("message") or found.get("status")
        return str(message or found)[:500]
    except (ValueError, AttributeError):
        return body.decode(errors="replace")[:500]
