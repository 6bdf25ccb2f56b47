"""What stands in a row of JSON lines, wherever rows are read: by the trainer, and by those who try rewards on a file.

Kept here: a row means the same to all of them.
"""

import json
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
