"""What the service needs of an inference engine, in numbers and token ids.

Kept by every engine: tokens of a request come in order, each with the log-probability of the distribution it was sampled from;
between `pause` and `resume` nothing is sampled; `load` says how many tokens each request had when its policy changed.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from polyreme.weights.manifest import Manifest


class EngineDeadError(RuntimeError):
    """The engine's processes are gone; the service cannot go on."""


class LoadError(RuntimeError):
    """The engine could not take the weights. Its model may hold any mixture of old and new."""


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_p 1 and top_k -1 leave the distribution whole. A stop id ends a request and is its last token."""

    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class EngineRequest:
    """One sequence to continue.

    Args:
        request_id: unique among those under way.
        prompt_ids: what is there already, prompt and prefix.
        max_new: tokens to sample at most.
        seed: of this request's own sampler, 63 bits.
        salt: requests share cached prefixes only under the same salt.
    """

    request_id: str
    prompt_ids: Sequence[int]
    max_new: int
    seed: int
    salt: str
    sampling: Sampling


class Delta(NamedTuple):
    """Further tokens of a request. `finish`: None, "stop" (by a stop id) or "length"."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str | None


@dataclass(frozen=True)
class ArenaSource:
    """One part of a version in an arena slot: mapped by each of the engine's workers."""

    path: str
    nonce: bytes
    slot: int
    generation: int
    manifest: Manifest


@dataclass(frozen=True)
class Loaded:
    """`sampled`: tokens that each unfinished request had at the change, by request id; one that never ran may be missing."""

    seconds: float
    sampled: Mapping[str, int]


class Engine(Protocol):
    """An engine that runs; made by its module's `start`."""

    name: str
    max_model_len: int
    vocab_size: int
    weight_names: frozenset[str]
    """Hugging Face names of all tensors the model is made of, without those that are aliases."""

    def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """Samples one request. Closing the iterator aborts it. Raises EngineDeadError."""
        ...

    async def pause(self) -> None:
        """Stops sampling between two steps; requests stay, and new ones wait. Raises EngineDeadError."""
        ...

    async def load(self, sources: Sequence[ArenaSource]) -> Loaded:
        """Loads all parts of a version while paused. Raises LoadError, EngineDeadError."""
        ...

    async def resume(self) -> None:
        """Goes on sampling. Raises EngineDeadError."""
        ...

    @property
    def dead(self) -> bool:
        """Whether the engine's processes are gone."""
        ...

    def close(self) -> None:
        """Ends the engine's processes. Idempotent."""
        ...
