"""Server-sent events, as bytes.

Invariant: only whole events are passed on, each unchanged, so that a stream can break between two events but never inside one.
"""

import json
from typing import Any

_END = b"\n\n"
DONE = b"data: [DONE]\n\n"


class EventSplitter:
    """Cuts a stream of bytes at the ends of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The whole events that are complete with `data`; may be empty."""
        events, end, self._rest = (self._rest + data).rpartition(_END)
        return events + end


def is_done(events: bytes) -> bool:
    """Whether whole events end with the end of an OpenAI stream."""
    return events.endswith(DONE)


def is_error(events: bytes) -> bool:
    """Whether the last of whole events is an OpenAI error."""
    *_, last = events.removesuffix(_END).rsplit(_END, 1)
    return last.startswith(b"data: {") and "error" in json.loads(last.removeprefix(b"data: "))


def versions(events: bytes) -> set[str]:
    """The policy versions that whole events name in `system_fingerprint`, such as {"7"} or {"7-8"}."""
    found = set()
    for line in events.split(b"\n"):
        if line.startswith(b"data: {"):
            event: dict[str, Any] = json.loads(line[len(b"data: ") :])
            if fingerprint := event.get("system_fingerprint"):
                found.add(str(fingerprint).removeprefix("policy-"))
    return found
