"""A store of encoded prompts that keeps a bounded part in memory.

Invariant: a prompt is read back as it was stored. Beyond `_IN_MEMORY` bytes the prompts are in an unnamed temporary file (TMPDIR)
that ends with the process.
"""

import json
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

_IN_MEMORY = 256 << 20


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for generation and scoring.

    Attributes:
        ids: int32 [length], the templated prompt.
        text: the templated prompt as text.
        metadata_json: a JSON object with the row's columns except the label.
        plain: the prompt before the template, as `plain_prompt` returns it.
    """

    ids: np.ndarray
    text: str
    label: str
    metadata_json: str
    plain: str


class PromptStore(Sequence[Prompt]):
    """A list of prompts that can only grow.

    Args:
        in_memory: bytes to keep in memory before the prompts move to the temporary file.
    """

    def __init__(self, in_memory: int = _IN_MEMORY) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=in_memory)  # noqa: SIM115 closed with this object
        weakref.finalize(self, self._file.close)
        self._starts = np.zeros(1024, dtype=np.int64)  # byte offset of each prompt, and the end of the last one
        self._count = 0

    def append(self, prompt: Prompt) -> None:
        """Adds a prompt at the end."""
        texts = json.dumps([prompt.text, prompt.label, prompt.metadata_json, prompt.plain]).encode()
        ids = prompt.ids.astype("<i4").tobytes()
        start = int(self._starts[self._count])
        self._file.seek(start)
        self._file.write(len(ids).to_bytes(8, "little") + ids + texts)
        self._count += 1
        if self._count == len(self._starts):
            self._starts = np.concatenate([self._starts, np.zeros_like(self._starts)])
        self._starts[self._count] = start + 8 + len(ids) + len(texts)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Prompt: ...

    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...

    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(self._count))]
        if not -self._count <= place < self._count:
            raise IndexError(place)
        start, end = self._starts[place % self._count :][:2].tolist()
        self._file.seek(start)
        stored = self._file.read(end - start)
        size = 8 + int.from_bytes(stored[:8], "little")
        text, label, metadata_json, plain = json.loads(stored[size:])
        return Prompt(np.frombuffer(stored[8:size], dtype="<i4"), text, label, metadata_json, plain)
