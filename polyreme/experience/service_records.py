"""What the processes of a training service tell its observer: records about models in a stream, and counters.

Invariant: a record of a request is added once, also when the request is executed again. The observer deletes a record once its
run directory has it; the stream is bounded, so that a missing observer costs the newest records only.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from polyreme.experience.metric_records import MetricRecord, fields_of
from polyreme.experience.scripts import Scripts, key
from polyreme.experience.store_errors import RefusedError

MAX_RECORDS = 10_000
"""Most records that wait for the observer."""
MAX_ANSWER_BYTES = 1 << 16
"""Most bytes of a request's answers in its record. Further answers are left out."""


@dataclass(frozen=True)
class SampledAnswer:
    """A sampled answer. `logprobs`: of each token, in nats."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str


@dataclass(frozen=True)
class SampledGroup:
    """The answers to one request.

    Attributes:
        weights: the saved model that sampled them, KIND/NAME.
        prompt: its text, special tokens included.
        began, seconds: Unix time at which sampling began, and how long it took.
    """

    weights: str
    prompt: str
    prompt_tokens: int
    began: float
    seconds: float
    answers: Sequence[SampledAnswer]

    def line(self) -> str:
        """As JSON, with as many answers as fit into MAX_ANSWER_BYTES, but at least one."""
        kept, size = list[dict[str, object]](), 0
        for answer in self.answers:
            size += len(answer.text.encode()) + 16 * len(answer.token_ids)
            if kept and size > MAX_ANSWER_BYTES:
                break
            kept.append(vars(answer))
        return json.dumps({"kind": "sampled", **vars(self), "answers": kept})


@dataclass(frozen=True)
class ModelLine:
    """A record about a model. `id`: of its place in the stream; `fields`: its JSON object."""

    id: str
    model: str
    fields: dict[str, object]


def as_line(record: MetricRecord) -> str:
    """A record as JSON."""
    return json.dumps(fields_of(record))


class ServiceRecords:
    """The records and counters of the service `name`. stream: the key of the records."""

    def __init__(self, redis: Redis, name: str) -> None:
        self._scripts, self.stream = Scripts(redis, f"service:{name}"), key(f"service:{name}", "records")
        self._usage = key(f"service:{name}", "usage")
        self._redis: Any = redis  # its answers are typed as bytes or str, and are bytes here

    async def add_sampled(self, model: str, group: SampledGroup) -> None:
        """Adds the answers to a request."""
        await self.add(model, group.line())

    async def add(self, model: str, line: str) -> None:
        """Adds a record as JSON, or drops it while Redis is full. `RequestLog.finish` adds a request's once, with its result."""
        try:
            await self._redis.xadd(self.stream, {"model": model, "line": line}, maxlen=MAX_RECORDS)
        except RefusedError as error:
            if error.code != "OOM":
                raise

    async def read(self, after: str, count: int, wait_ms: int) -> list[ModelLine]:
        """The records after the stream id `after`, in order, at most `count`; empty after `wait_ms` without one."""
        streams = await self._redis.xread({self.stream: after}, count=count, block=wait_ms)
        if not streams:
            return []
        [(_, entries)] = streams.items() if isinstance(streams, dict) else streams
        return [ModelLine(id.decode(), line[b"model"].decode(), json.loads(line[b"line"])) for id, line in entries]

    async def drop(self, until: str) -> None:
        """Deletes the records up to the stream id `until`."""
        await self._redis.xdel(self.stream, until)
        await self._redis.xtrim(self.stream, minid=until, approximate=False)

    async def count(self, amounts: Mapping[str, Mapping[str, float]]) -> None:
        """Adds to counters: tenant or worker -> field -> amount. They are inexact: what Redis adds as it ends may count twice."""
        fields = [
            str(each) for name, of in amounts.items() for field, amount in of.items() for each in (f"{name} {field}", amount)
        ]
        await self._scripts.call("count", *fields, keys=[self._usage])

    async def counts(self) -> dict[str, dict[str, float]]:
        """Every counter: name -> field -> value."""
        found: dict[str, dict[str, float]] = {}
        for field, value in (await self._redis.hgetall(self._usage)).items():
            name, _, what = field.decode().partition(" ")
            found.setdefault(name, {})[what] = float(value)
        return found
