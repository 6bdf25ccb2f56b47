"""Server-sent events, as bytes.

Invariant: only whole events are forwarded, each unchanged, so that a stream can break between two events but never inside one.
"""

import json

_END = b"\n\n"
DONE = b"data: [DONE]\n\n"


class EventSplitter:
    """Cuts a stream of bytes at the ends of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The events that `data` completes; may be empty."""
        events, end, self._rest = (self._rest + data).rpartition(_END)
        return events + end


def is_done(events: bytes) -> bool:
    """Whether whole events end with the end of an OpenAI stream."""
    return events.endswith(DONE)


def error_code(events: bytes) -> str | None:
    """The code of the OpenAI error in the last event, '' if it has no code; None: the last event is not an error."""
    *_, last = events.removesuffix(_END).rsplit(_END, 1)
    event: dict[str, object] = json.loads(last.removeprefix(b"data: ")) if last.startswith(b"data: {") else {}
    error = event.get("error")
    if error is None:
        return None
    return str((error.get("code") if isinstance(error, dict) else None) or "")
