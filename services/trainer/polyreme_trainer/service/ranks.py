"""Several ranks compute for tenants' models: rank 0 has the requests, and tells the others each engine call before it makes it.

Invariant: all ranks make the same calls in the same order. A call that fails for a tenant fails in the same way on every rank,
and the ranks go on; any other error ends its rank, and with it all of them.
"""

import json
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import validate_call
from pydantic_core import to_jsonable_python

from polyreme.config.trainer import LoraConfig
from polyreme_trainer.learner.leader import Ranks, join, split
from polyreme_trainer.service.batch import BatchResult, LossCall, pack_call, read_call
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.messages import AdamSettings
from polyreme_trainer.service.tenant_engine import TenantEngine

logger = logging.getLogger(__name__)

_END = b""


@dataclass(frozen=True)
class EngineCall:
    """A call of `TenantEngine`.

    Attributes:
        method: its name.
        fields: the arguments, except batches; after `unpack`, as JSON values.
        batches: the batches by model.
    """

    method: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    batches: Mapping[str, LossCall] = field(default_factory=dict)

    def pack(self) -> bytes:
        head = json.dumps({"method": self.method, "fields": to_jsonable_python(self.fields), "models": list(self.batches)})
        return join([head.encode(), *map(pack_call, self.batches.values())])

    @classmethod
    def unpack(cls, packed: bytes) -> "EngineCall":
        head, *batches = split(packed)
        tree = json.loads(head)
        return cls(tree["method"], tree["fields"], dict(zip(tree["models"], map(read_call, batches), strict=True)))

    def make(self, engine: TenantEngine) -> Any:
        """Makes the call. Returns its result. Raises TenantError."""
        method = getattr(engine, self.method)
        return method(calls=self.batches) if self.batches else validate_call(method)(**self.fields)


class LeadingEngine:
    """A `TenantEngine` on rank 0 whose calls all ranks make."""

    def __init__(self, engine: TenantEngine, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks

    @property
    def most(self) -> int:
        return self._engine.most

    @property
    def pass_bytes(self) -> int:
        return self._engine.pass_bytes

    @property
    def models(self) -> Mapping[str, LoraConfig | None]:
        return self._engine.models

    @property
    def critics(self) -> Collection[str]:
        return self._engine.critics

    def steps(self, name: str) -> int:
        return self._engine.steps(name)

    def create(self, name: str, lora: LoraConfig | None, seed: int, critic: bool = False) -> None:
        self._call("create", name=name, lora=lora, seed=seed, critic=critic)

    def save(self, name: str, folder: Path, gradient: bool) -> None:
        self._call("save", name=name, folder=folder, gradient=gradient)

    def load(self, name: str, folder: Path, lora: LoraConfig | None, steps: int, critic: bool = False) -> None:
        self._call("load", name=name, folder=folder, lora=lora, steps=steps, critic=critic)

    def remove(self, name: str) -> None:
        self._call("remove", name=name)

    def forward(self, calls: Mapping[str, LossCall]) -> Mapping[str, BatchResult | TenantError]:
        found: Mapping[str, BatchResult | TenantError] = self._tell(EngineCall("forward", batches=calls))
        return found

    def forward_backward(self, calls: Mapping[str, LossCall]) -> Mapping[str, BatchResult | TenantError]:
        found: Mapping[str, BatchResult | TenantError] = self._tell(EngineCall("forward_backward", batches=calls))
        return found

    def optim_step(self, name: str, given: AdamSettings) -> tuple[float, int]:
        norm, steps = self._call("optim_step", name=name, given=given)
        return norm, steps

    def write_sampler_weights(self, name: str, folder: Path) -> None:
        self._call("write_sampler_weights", name=name, folder=folder)

    @asynccontextmanager
    async def telling(self) -> AsyncIterator[TenantEngine]:
        """Yields the engine to call. The block's end is that of `follow` on the other ranks."""
        if self._ranks.alone:
            yield self._engine
            return
        async with self._ranks.telling():
            yield self
            try:
                self._ranks.tell(_END)
            except RuntimeError as lost:
                logger.warning("another rank has ended before: %s", lost)

    def _call(self, method: str, **fields: Any) -> Any:
        return self._tell(EngineCall(method, fields))

    def _tell(self, call: EngineCall) -> Any:
        self._ranks.tell(call.pack())
        return call.make(self._engine)


def follow(engine: TenantEngine, ranks: Ranks) -> None:
    """Makes rank 0's calls on another rank until rank 0 ends. Raises LeaderError when rank 0 fails, RuntimeError when it dies."""
    while message := ranks.hear():
        with suppress(TenantError):  # rank 0 answers with it
            EngineCall.unpack(message).make(engine)
