"""The meaning of a row of JSON lines.

Invariant: a row means the same to every reader: to the trainer, and to `polyreme reward test`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def lines_of(text: str) -> list[str]:
    """The lines of a JSON lines file; `splitlines` would cut at U+2028 inside a text."""
    return text.split("\n")


def label_text(value: Any) -> str:
    """A reference answer as text: texts as they are, numbers as JSON writes them, a list of one (PaddleNLP's `tgt`), nothing as ''.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return json.dumps(value)
    raise TypeError(f"{value!r:.80}")


def plain_prompt(value: Any) -> str:
    """A prompt as plain text: a text as it is, a list of one text (PaddleNLP's `src`), of chat messages the last one by the user.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(value, str):
        return value
    messages = value if isinstance(value, Sequence) else ()
    if len(messages) == 1 and isinstance(messages[0], str):
        return messages[0]
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise TypeError(f"{value!r:.80}")
    by_user = [message for message in messages if message.get("role") == "user"]
    content = (by_user or messages)[-1].get("content")
    if isinstance(content, list):  # parts of a message: texts, and what is no text
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
