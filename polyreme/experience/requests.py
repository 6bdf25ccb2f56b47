"""The request log of the training service: each request is in Redis before it is executed, and its first result stands.

A request belongs to a worker, the learner or the sampler. Requests for a model also have a sequence number, and form the model's
lane: they are submitted and executed in order, without gaps. An executed request that changed the model is kept until a saved
state includes it: the model after a restart is the newest saved state and the kept requests since.

Invariant: a request submitted again, before or after its execution or a restart of any process, has one execution and one result.
"""

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from redis.asyncio import Redis

from polyreme.experience.metric_records import MetricRecord
from polyreme.experience.scripts import Scripts, key
from polyreme.experience.service_records import MAX_RECORDS, ServiceRecords, as_line
from polyreme.process.lifecycle import until_set
from polyreme.process.supervisor import STARTS_WITHOUT_MEMORY

Worker = Literal["learner", "sampler"]
QueueState = Literal["active", "paused_capacity"]
"""active: the request, or another one of its tenant, is executed or next. paused_capacity: other tenants have their turn."""
Submitted = Literal["new", "known", "early", "gone", "full", "quota"]
"""What became of a submission. early: a request with a lower sequence number is missing. gone: executed long ago, its result has
expired. full: the log has no room now. quota: the tenant has too many open requests."""

TENANT_DIGITS = 16
"""The hexadecimal digits of a tenant, a digest of its key."""
LOAD = ":load"
"""The end of the id of a request with which a model waits until the sampler has loaded its weights."""
MAX_NAMES = 10_000
"""Most records of a group that can be listed, the newest ones."""
MAX_BEGUN = STARTS_WITHOUT_MEMORY - 1
"""Executions of a request that may end with their process. After them the request fails, so that it does not stop all others: one
more start without memory would end the service."""
_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class LogPlace:
    """Where a request stands.

    Attributes:
        id: unique among all requests.
        worker: who executes it.
        lane: the model's name; empty for a request without an order.
        seq: its number in the lane, from 0; -1 without a lane.
    """

    id: str
    worker: Worker
    lane: str = ""
    seq: int = -1


def tenant_in(id: str) -> str:
    """Whose request, model or session it is: ids begin with their tenant."""
    return id[:TENANT_DIGITS]


def queue_state(id: str, begun: Sequence[str]) -> QueueState:
    """What an open request waits for. `begun`: the requests that are executed now."""
    others = begun and not any(tenant_in(each) == tenant_in(id) for each in begun)
    return "paused_capacity" if others else "active"


def in_turns(waiting: Sequence[LogPlace]) -> list[LogPlace]:
    """Requests in an order that is fair to tenants: the first of each, then the second of each. A tenant's own keep their order,
    after those that its model waits for."""
    count = Counter[str]()
    ranks = []
    waiting = sorted(waiting, key=lambda place: not place.id.endswith(LOAD))
    for place in waiting:
        ranks.append(count[tenant_in(place.id)])
        count[tenant_in(place.id)] += 1
    return [place for _, place in sorted(zip(ranks, waiting, strict=True), key=lambda pair: pair[0])]


def in_lane(model: str, seq: int) -> LogPlace:
    """The place of a model's request."""
    return LogPlace(f"{model}:{seq}", "learner", model, seq)


def place_of(id: str, worker: Worker) -> LogPlace:
    """The place of a request by its id."""
    if worker == "sampler":
        return LogPlace(id, worker)
    lane, _, seq = id.rpartition(":")
    return LogPlace(id, worker, lane, int(seq))


@dataclass(frozen=True)
class Waiting:
    """The open requests of a worker.

    Attributes:
        places: all, by arrival.
        newest: the arrival of the newest one.
        begun: id -> beginnings of its execution, of all workers' requests that have begun.
        payloads: id -> the request, of new ones.
    """

    places: list[LogPlace]
    newest: float
    begun: dict[str, int]
    payloads: dict[str, bytes]


@dataclass
class RequestBounds:
    """Bounds of a log, read at each use.

    Attributes:
        open: most open requests of a worker.
        lane_bytes: most bytes of a model's open and kept requests.
        result_seconds: how long a result can be read.
        result_bytes: most bytes of the results of a session, or of a tenant's requests without one. The oldest go beyond them.
        record_seconds: how long a record lives that nobody renews.
        ended_records: most sessions, or models, of a tenant that have ended and are kept beyond its quota.
    """

    open: int = 20_000
    lane_bytes: int = 1 << 30
    result_seconds: float = 6 * 3600.0
    result_bytes: int = 256 << 20
    record_seconds: int = 7 * 86400
    ended_records: int = 1000


class RequestLog:
    """The log of service `name` in a Redis that persists all writes. `records`: for its observer. `limits`: None: a service's."""

    def __init__(self, redis: Redis, name: str, limits: RequestBounds | None = None) -> None:
        self.limits = limits or RequestBounds()
        self._name, self._scripts = f"service:{name}", Scripts(redis, f"service:{name}")
        self._redis: Any = redis  # its answers are typed as bytes or str, and are bytes here
        self._given_up = set[str]()
        self._waiters: dict[str, set[asyncio.Future[bytes]]] = {}
        self.records = ServiceRecords(redis, name)

    def _key(self, *parts: str) -> str:
        return key(self._name, ":".join(parts))

    async def submit(self, place: LogPlace, payload: bytes, most: int | None = None) -> Submitted:
        """Adds a request. `most`: open requests of its tenant; None: as of the worker. Raises StoreError."""
        keys = [
            self._key("requests"),
            self._key("open", place.worker),
            self._key("result", place.id),
            self._key("lane", place.lane),
            self._key("events", place.worker),
        ]
        limits = self.limits.open, self.limits.lane_bytes
        owner = tenant_in(place.id), self.limits.open if most is None else most
        answer = await self._scripts.call("submit", place.id, payload, place.seq, *limits, *owner, keys=keys)
        word: Submitted = answer.decode()
        return word

    async def begin(self, places: Sequence[LogPlace]) -> list[int]:
        """Counts and returns the starts of each request's execution: above 1 after executions that ended with their process."""
        if not places:
            return []
        ids, nonce = [place.id for place in places], secrets.token_hex(8)
        return list(await self._scripts.call("begun", nonce, *ids, keys=[self._key("begun")]))

    async def attempt(self, id: str) -> bool:
        """Counts a beginning of work that is no request. Returns False once MAX_BEGUN beginnings have ended with their process:
        this one does not try the work any more, a later one does. `id`: begins with a tenant."""
        if id not in self._given_up:
            [begun] = await self.begin([LogPlace(id, "learner")])
            if begun <= MAX_BEGUN:
                return True
            self._given_up.add(id)
            await self.end_attempt(id)
        return False

    async def end_attempt(self, id: str) -> None:
        """Ends the count: the work is done, or not wanted any more."""
        await self._redis.hdel(self._key("begun"), id)

    async def finish(self, place: LogPlace, result: bytes, keep: bool = False, record: MetricRecord | None = None) -> bool:
        """Stores a result, and a record of its model for the observer. Returns False when the request has a result. `keep`: a
        restart executes it again unless a saved state includes it."""
        client = place.id.partition(":")[0] if ":" in place.id else tenant_in(place.id)
        names = [
            ("requests",),
            ("open", place.worker),
            ("result", place.id),
            ("lane", place.lane),
            ("kept", place.lane),
            ("begun",),
            ("lanes",),
            ("results", client),
            ("bytes", client),
            ("events", "result"),
        ]
        life = int(self.limits.result_seconds * 1000)
        keys = [*(self._key(*name) for name in names), self.records.stream]
        arguments = (
            place.id,
            result,
            life,
            place.seq,
            int(keep),
            place.lane,
            self._key("result"),
            self.limits.result_bytes,
            tenant_in(place.id),
            "" if record is None else as_line(record),
            MAX_RECORDS,
        )
        return bool(await self._scripts.call("finish", *arguments, keys=keys))

    async def forget(self, lane: str, seq: float) -> None:
        """Deletes the lane's kept requests up to `seq`, which a saved state includes."""
        keys = [self._key("requests"), self._key("kept", lane), self._key("lane", lane), self._key("lanes")]
        await self._scripts.call("forget", str(seq), lane, keys=keys)

    async def end(self, lane: str) -> None:
        """Deletes all kept requests of a lane whose model is gone. The numbers of its requests are known as long as a record."""
        await self.forget(lane, math.inf)
        await self._redis.expire(self._key("lane", lane), self.limits.record_seconds)

    async def lanes(self) -> set[str]:
        """The lanes with kept requests."""
        return {lane.decode() for lane in await self._redis.smembers(self._key("lanes"))}

    async def open(self, worker: Worker) -> list[LogPlace]:
        """The requests that wait for a worker, in the order of their arrival."""
        return [place_of(id.decode(), worker) for id in await self._redis.zrange(self._key("open", worker), 0, -1)]

    async def waiting(self, worker: Worker, after: float, most_bytes: int) -> Waiting:
        """What waits for a worker, with payloads of requests after the arrival `after`, as many as fit `most_bytes` bytes."""
        keys = [self._key("requests"), self._key("open", worker), self._key("begun")]
        ids, newest, begun, new = await self._scripts.call("waiting", str(after), most_bytes, keys=keys)
        counts = {id.decode(): int(count.split()[0]) for id, count in zip(begun[::2], begun[1::2], strict=True)}
        payloads = {id.decode(): payload for id, payload in zip(new[::2], new[1::2], strict=True)}
        return Waiting([place_of(id.decode(), worker) for id in ids], float(newest), counts, payloads)

    async def kept(self, lane: str) -> list[LogPlace]:
        """The lane's executed requests that no saved state includes, in order."""
        return [place_of(id.decode(), "learner") for id in await self._redis.zrange(self._key("kept", lane), 0, -1)]

    async def submitted(self, lane: str) -> int:
        """The sequence number of the lane's newest request; -1 before the first."""
        return int(await self._redis.hget(self._key("lane", lane), "submitted") or -1)

    async def payload(self, place: LogPlace) -> bytes:
        """A request that is open or kept."""
        [found] = await self.payloads([place])
        return found

    async def payloads(self, places: Sequence[LogPlace]) -> list[bytes]:
        """Requests that are open or kept."""
        found = await self._redis.hmget(self._key("requests"), [place.id for place in places]) if places else []
        lost = [place.id for place, payload in zip(places, found, strict=True) if payload is None]
        assert not lost, f"requests {lost} are neither open nor kept"
        return [bytes(payload) for payload in found]

    async def is_open(self, id: str) -> bool:
        """Whether a request waits for a worker, or is executed."""
        scores = [await self._redis.zscore(self._key("open", worker), id) for worker in get_args(Worker)]
        return any(score is not None for score in scores)

    async def queue_state(self, id: str) -> QueueState:
        """What an open request waits for."""
        begun = [name.decode() for name in await self._redis.hkeys(self._key("begun"))]
        return queue_state(id, begun)

    async def is_past(self, id: str) -> bool:
        """Whether a request was in a lane."""
        lane, _, seq = id.rpartition(":")
        return bool(lane) and seq.isdecimal() and len(seq) < 16 and int(seq) <= await self.submitted(lane)

    async def result(self, id: str, within: float = 0.0) -> bytes | None:
        """A request's result; None after `within` seconds without one. The waits need `following`."""
        deadline = time.monotonic() + within
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(id, set()).add(waiter)
        try:
            while True:
                if (found := await self._redis.get(self._key("result", id))) is not None:
                    return bytes(found)
                if (left := deadline - time.monotonic()) <= 0:
                    return None
                if (await asyncio.wait({waiter}, timeout=min(left, 5 * _POLL_SECONDS)))[0]:  # an event may be lost
                    return waiter.result()
        finally:
            self._waiters[id].discard(waiter)
            if not self._waiters[id]:
                del self._waiters[id]

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """In the block, `result` returns as soon as there is one. Raises StoreError, also in the block, when Redis is lost."""

        async def follow() -> None:
            last = await self.last_event("result")
            while True:
                last, ids = await self.wait("result", last)
                ids = [id for id in ids if id in self._waiters]
                results = await self._redis.mget([self._key("result", id) for id in ids]) if ids else []
                for id, result in zip(ids, results, strict=True):
                    for waiter in self._waiters.get(id, ()):
                        if result is not None and not waiter.done():
                            waiter.set_result(bytes(result))

        over = asyncio.Event()
        task = asyncio.create_task(follow(), name="results of the request log")
        task.add_done_callback(lambda _: over.set())
        try:
            async with until_set(over):
                yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def last_event(self, kind: Worker | Literal["result"]) -> str:
        """The point after which `wait` sees every event from now on."""
        entries = await self._redis.xrevrange(self._key("events", kind), count=1)
        return str(entries[0][0], "ascii") if entries else "0"

    async def wait(self, kind: Worker | Literal["result"], last: str) -> tuple[str, list[str]]:
        """Waits at most two seconds for requests of a worker, or results, after the event `last`. Returns the newest event, and
        their ids. Events may be lost, so the caller looks again in any case."""
        streams = await self._redis.xread({self._key("events", kind): last}, count=1000, block=int(_POLL_SECONDS * 1000))
        if not streams:
            return last, []
        [(_, entries)] = streams.items() if isinstance(streams, dict) else streams
        return entries[-1][0].decode(), [fields[b"value"].decode() for _, fields in entries]

    async def record(self, kind: str, name: str) -> Mapping[str, str] | None:
        """What is known of a session or a model; None for an unknown or expired one."""
        found = await self._redis.hgetall(self._key(kind, name))
        return {field.decode(): value.decode() for field, value in found.items()} or None

    async def set_record(self, kind: str, name: str, fields: Mapping[str, str], groups: Sequence[str] = ()) -> None:
        """Stores fields of a session or model that expires `record_seconds` after its last use. `names` lists it in groups."""
        await self._redis.hset(self._key(kind, name), mapping=dict(fields))
        await self._redis.expire(self._key(kind, name), self.limits.record_seconds)
        for group in groups:
            await self._redis.zadd(self._key("names", kind, group), {name: time.time()}, nx=True)
            await self._redis.zremrangebyrank(self._key("names", kind, group), 0, -MAX_NAMES - 1)
            await self._redis.expire(self._key("names", kind, group), 4 * self.limits.record_seconds)

    async def delete_record(self, kind: str, name: str, groups: Sequence[str] = ()) -> None:
        """Deletes a record, also from its groups."""
        for group in groups:
            await self._redis.zrem(self._key("names", kind, group), name)
        await self._redis.delete(self._key(kind, name))

    async def names(self, kind: str, group: str) -> list[str]:
        """The records of a group, the newest first. Some may have expired."""
        return [name.decode() for name in await self._redis.zrevrange(self._key("names", kind, group), 0, -1)]

    async def use_record(self, tenant: str, kind: str, name: str) -> tuple[Mapping[str, str], float] | None:
        """A tenant's record, which is renewed, and when it was last used, seconds since the epoch; None: unknown or expired."""
        life = self.limits.record_seconds
        found = await self._scripts.call("use", tenant, life, keys=[self._key(kind, name)])
        if not found:
            return None
        words = [word.decode() for word in found[1:]]
        return dict(zip(words[::2], words[1::2], strict=True)), time.time() - life + max(0, found[0])
