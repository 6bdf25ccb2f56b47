"""A sampling request as it is in the log, and which of those that wait start together."""

import json
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class SampleRequest:
    """A request as it is in the log.

    Attributes:
        weights: the directory of a saved model; None: the base model.
        prompt: token ids.
        samples: the number of answers.
        max_tokens: of an answer; None: as many as fit.
        seed: None: that of the request's id.
        stop_ids: tokens that end an answer; None: the model's own.
        stop_strings: texts that end an answer.
        prompt_logprobs: whether the prompt's log-probabilities are returned.
        prompt_logprobs_last: of how many of its last tokens; None: of all.
        topk: how many of the most likely tokens of each place in the prompt are returned.
    """

    weights: str | None
    prompt: Sequence[int]
    samples: int = 1
    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_ids: Sequence[int] | None = None
    stop_strings: Sequence[str] = ()
    prompt_logprobs: bool = False
    prompt_logprobs_last: int | None = None
    topk: int = 0

    @property
    def is_scoring(self) -> bool:
        """Whether the request is for the prompt's log-probabilities."""
        return self.prompt_logprobs and self.max_tokens == 1

    @property
    def load(self) -> int:
        """The sequences that the engine computes for it."""
        return max(1, self.samples)

    @cached_property
    def files(self) -> str | None:
        """The files of the saved model as they are at first use, since its name may be saved again. None: the base model."""
        if self.weights is None:
            return None
        with suppress(FileNotFoundError):  # the load says so
            return f"{self.weights} {Path(self.weights).stat().st_mtime_ns}"
        return self.weights

    @cached_property
    def rank(self) -> int:
        """The rank of the adapter that was saved; 0 for the base model and for all weights."""
        if self.weights is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):  # no adapter; of a damaged one the load says so
                return int(json.loads((Path(self.weights) / "adapter_config.json").read_text())["r"])
        return 0

    @classmethod
    def unpack(cls, payload: bytes) -> "SampleRequest":
        fields = json.loads(payload.partition(b"\n")[0])
        return cls(**{name: value for name, value in fields.items() if name not in ("op", "arrived")})


def fitting(loads: Sequence[int], running: int, most: int) -> int:
    """How many of the requests that wait in this order fit into the room of an engine; one larger than the room runs alone.

    Args:
        loads: sequences of each waiting request.
        running: sequences that run.
        most: the room.
    """
    for number, load in enumerate(loads):
        if running and running + load > most:
            return number
        running += load
    return len(loads)


def admitted(adapters: Sequence[Path | None], running: Set[Path], most: int) -> list[int]:
    """The places of the requests that start now, of those that wait in this order.

    An engine has room for a number of adapters. While it has none for the first request, no other one starts, so that this one
    waits for running requests only.

    Args:
        adapters: of each waiting request; None: it needs none.
        running: those of the running requests.
        most: the number that may run.
    """
    taken, places = set(running), list[int]()
    for place, adapter in enumerate(adapters):
        if adapter is not None and adapter not in taken:
            if len(taken) >= most:
                if place == 0:
                    return []
                continue
            taken.add(adapter)
        places.append(place)
    return places
