"""A client's request in the form that every replica receives.

Invariant: pure. A request that no replica could answer is refused here, with an error for the client. Headers pass as bytes,
without the spaces around a value.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from polyreme.gateway.names import ModelNames, VersionBounds, Wanted

_EXACT = b"polyreme-exact-policy-version"
_BOUNDS = (b"polyreme-min-policy-version", _EXACT)
_TO_REPLICA = (b"content-type", b"accept", b"x-request-id", *_BOUNDS)
_SHOWN = 100
"""Maximum characters of a client's text in an error."""

RawHeaders = Sequence[tuple[bytes, bytes]]


class RefusedRequest(Exception):
    """An error in the client's request, with the status and the code of the reply."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(frozen=True)
class ForwardedRequest:
    """A request to forward, and the eligible versions.

    Attributes:
        wanted: the version that the model's name selects.
        bounds: from the client's headers. The replica checks them and a version in `wanted` again, since it may have swapped.
    """

    path: str
    headers: RawHeaders
    body: bytes
    wanted: Wanted
    bounds: VersionBounds


def parse(path: str, headers: RawHeaders, body: bytes, names: ModelNames, served: Iterable[int]) -> ForwardedRequest:
    """Reads a client's request.

    Args:
        headers: headers with lower-case names.
        served: the served versions, for the message about a wrong name.

    Raises:
        RefusedRequest: the body, the model's name or a version's header cannot be used.
    """
    try:
        asked: object = json.loads(body)
        if not isinstance(asked, dict) or not isinstance(model := asked.get("model"), str | None):
            raise RefusedRequest(400, "expected a JSON object whose `model` is a name. Fix the request.", "invalid_body")
        sent = body if model in (None, names.base) else _dumped({**asked, "model": names.base})
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(400, f"expected a JSON object; found {error}. Fix the request's body.", "invalid_body") from None
    wanted = names.wanted(model)
    if wanted is None:
        raise RefusedRequest(
            404, f"expected {names.described(served)}; found `{model:.{_SHOWN}}`. Fix `model`.", "model_not_found"
        )
    passed = [(name, value.strip()) for name, value in headers if name in _TO_REPLICA]  # the server keeps spaces at the end
    bounds = _bounds(dict(passed))
    passed += [(_EXACT, b"%d" % wanted)] if isinstance(wanted, int) and bounds.exact is None else []
    return ForwardedRequest(path, [*passed, (b"accept-encoding", b"identity")], sent, wanted, bounds)


def _bounds(headers: Mapping[bytes, bytes]) -> VersionBounds:
    try:
        return VersionBounds(*(int(headers[name]) if name in headers else None for name in _BOUNDS))
    except ValueError:
        found = " and ".join(f"{name.decode()}: {headers[name]!r:.{_SHOWN}}" for name in _BOUNDS if name in headers)
        raise RefusedRequest(400, f"expected a policy version; found {found}. Fix the header.", "invalid_header") from None


def _dumped(body: dict[str, object]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can hold
        return json.dumps(body, separators=(",", ":")).encode()
