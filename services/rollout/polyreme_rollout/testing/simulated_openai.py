"""The text of the simulated engine: token ids in decimal.

Invariant: a completion's text can be checked against `simulated_engine.sample`.
"""

from collections.abc import Sequence
from typing import Any


class DecimalCodec:
    """A `plain_openai.Codec`. No token ends an answer."""

    stop_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return [id for message in messages for id in self.encode(str(message["content"]))]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))
