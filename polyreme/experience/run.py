"""The run record: what every process of a run must know, kept in Redis under the run's id.

The truth is in the keys; the `events` stream only says that it is worth looking again. It is bounded and may lose entries, so
every wait here also looks by itself once a heartbeat.
"""

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from typing import Any, TypeVar

import xxhash
from redis.asyncio import Redis

from polyreme.config.load import parse_config
from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError, PolyremeError, RunFailedError, StaleTermError, StoreError, UnavailableError
from polyreme.experience.scripts import Scripts, key

T = TypeVar("T")
log = logging.getLogger(__name__)

CURRENT = "polyreme:current"
HEARTBEAT = 1.0  # seconds; below the sockets' timeout
OVER_SECONDS = 2.0
METRICS_BOUND = 200_000  # records that wait for their writer; those that are on disk are trimmed


class RunState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (RunState.DONE, RunState.STOPPED, RunState.FAILED)


class Run:
    """A run that exists in Redis. Get one by `create`, `resume` or `attach`.

    `start` counts how often it was created or resumed, up to the time this process is of: a later start's state is not its to set.
    """

    def __init__(self, redis: Redis, run_id: str) -> None:
        self.redis: Any = redis  # redis-py's types leave open whether replies are bytes or text
        self.run_id = run_id
        self.start = 0
        self._reports: set[asyncio.Task[None]] = set()  # asyncio alone keeps no task alive
        self.scripts = Scripts(redis, run_id)

    def key(self, name: str) -> str:
        return key(self.run_id, name)

    # -- making and finding a run

    @classmethod
    async def create(
        cls, redis: Redis, run_id: str, config: RunConfig, model_files: Mapping[str, bytes], first_group: int = 0
    ) -> "Run":
        """Makes a new run in state `starting` and names it the current one.

        Args:
            redis: from `store.connect`.
            run_id: new in this Redis; prefixes every key, arena name and lease.
            config: the resolved configuration.
            model_files: name -> bytes of what a replica needs besides weights (config.json, tokenizer files, ...).
            first_group: index of the first group in the log; a fork continues its parent's data there.

        Raises:
            ConfigError: the run id exists.
        """
        place = {"first_group": first_group, "low_water": first_group}
        return await cls(redis, run_id)._write("create", config, model_files, place)

    @classmethod
    async def resume(cls, redis: Redis, run_id: str, config: RunConfig, model_files: Mapping[str, bytes]) -> "Run":
        """Puts an existing run, whatever its state, back to `starting`, with this configuration. Its log stays.

        Raises:
            UnavailableError: this Redis has no such run.
        """
        return await cls(redis, run_id)._write("resume", config, model_files)

    async def _write(
        self, script: str, config: RunConfig, model_files: Mapping[str, bytes], place: Mapping[str, int] | None = None
    ) -> "Run":
        limits = {
            **(place or {}),
            "groups_per_iteration": config.groups_per_iteration,
            "max_staleness": config.max_staleness,
            "max_attempts": config.max_attempts,
            "iterations": config.iterations,
        }
        words: list[Any] = [word for pair in [*limits.items(), *model_files.items()] for word in pair]
        keys = [self.key("config"), self.key("files")]
        nonce, text = uuid.uuid4().hex, config.model_dump_json()
        self.start = int(await self.scripts.call(script, nonce, text, len(limits), *words, keys=keys))
        await self.redis.set(CURRENT, self.run_id)
        return self

    @classmethod
    async def attach(
        cls,
        redis: Redis,
        run_id: str | None,
        timeout: float,  # noqa: ASYNC109
        ended: bool = True,
        start: int | None = None,
    ) -> "Run":
        """Finds a run, waiting up to `timeout` seconds for it to appear; without a run id, the newest.

        Args:
            ended: whether a newest run that has ended will do; no: waits for one that goes on.
            start: of the process that this one acts for; None: the run's newest.

        Raises:
            UnavailableError: it did not appear.
            StaleTermError: it has been started again since `start`.
        """
        store: Any = redis
        deadline = time.monotonic() + timeout
        while True:
            wanted = run_id or str(await store.get(CURRENT) or b"", "ascii")
            found = cls(redis, wanted)
            state, newest = await store.hmget(found.key("meta"), "state", "start") if wanted else (None, None)
            if state is not None and (ended or run_id or await found.goes_on()):
                found.start = int(newest or 0)
                if start is not None and start < found.start:
                    raise StaleTermError(
                        f"run {wanted} at its start {start}",
                        f"start {found.start}",
                        "Another process has taken the run over; this one must end and change nothing.",
                    )
                return found
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"run {run_id} in Redis" if run_id else "a run in Redis",
                    f"none within {timeout:g} s",
                    "Start it with `polyreme up` or `polyreme train`, or check the Redis URL and the run id.",
                )
            await asyncio.sleep(0.2)

    # -- what it is

    async def config(self) -> RunConfig:
        """The resolved configuration. Raises ConfigError: another release has written it."""
        text = await self.redis.get(self.key("config"))
        try:
            return parse_config(json.loads(text or b"{}"), f"run {self.run_id}")
        except ConfigError as error:  # it was valid where it was written
            raise ConfigError(error.expected, error.found, "Install the same Polyreme version everywhere.") from None

    async def model_files(self) -> dict[str, bytes]:
        """Everything but weights that a replica or tokenizer needs, by file name."""
        return {name.decode(): data for name, data in (await self.redis.hgetall(self.key("files"))).items()}

    async def model_fingerprint(self) -> str:
        """What a replica's weights and tokens must fit: xxh3_64 (hex) of config.json and tokenizer.json."""
        return fingerprint(await self.model_files())

    # -- its state

    async def state(self) -> tuple[RunState, str]:
        """The state, and the reason of `failed`, `stopped` or `draining` (else empty). Raises UnavailableError: no such run."""
        name, reason = await self.redis.hmget(self.key("meta"), "state", "reason")
        if name is None:
            raise UnavailableError(f"run {self.run_id} in Redis", "no record of it", "Check the run id and the Redis URL.")
        return RunState(name.decode()), (reason or b"").decode()

    async def goes_on(self) -> bool:
        """Whether it is the newest run and has not ended: else a server that serves the newest has another one to look for."""
        return bool(await self.redis.get(CURRENT) == self.run_id.encode()) and not (await self.state())[0].ended

    @asynccontextmanager
    async def telling(self, over: asyncio.Event) -> AsyncIterator[None]:
        """Sets `over` once the run no longer goes on, as long as the block lasts. A Redis that is away is no end."""

        async def watch() -> None:
            while True:
                with suppress(StoreError):
                    if not await self.goes_on():
                        break
                await asyncio.sleep(OVER_SECONDS)
            log.info("run %s is over", self.run_id)
            over.set()

        task = asyncio.create_task(watch(), name=f"end of {self.run_id}")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def set_state(self, state: RunState, reason: str = "") -> None:
        """One legal step: starting -> running -> draining -> stopped, from each of them to failed or done.

        Raises:
            TransitionError: the step is none; `done`, `stopped` and `failed` are final until `resume`.
            StaleTermError: the run has been resumed since, and its state is that start's to set.
        """
        await self.scripts.call("state", state.value, reason, self.start)

    async def check(self) -> RunState:
        """The state of a run that goes on or has been done. Raises RunFailedError when it has failed."""
        state, reason = await self.state()
        if state is RunState.FAILED:
            raise RunFailedError("the run to go on", reason or "failed", "Mend the cause and start again with --resume.")
        return state

    # -- records for people and tools

    async def emit(self, record: Mapping[str, Any]) -> None:
        """Appends one JSON record to the durable stream `metrics`. Numbers that are not finite become null."""
        text = json.dumps(_plain(record), allow_nan=False)
        keys = [self.key("metrics"), self.once()]
        await self.scripts.call("publish", METRICS_BOUND, "record", str(record.get("kind", "")), text, keys=keys)

    def report_restart(self, process: str, found: str) -> None:
        """Emits the record of a restart in the background, so that a lost Redis does not delay the restart. Call it in the event loop."""

        async def report() -> None:
            with suppress(PolyremeError):
                await self.emit({"kind": "restart", "process": process, "text": found})

        task = asyncio.create_task(report())
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def records(self, after_id: str, block_ms: int, count: int = 1000) -> list[tuple[str, dict[str, Any]]]:
        """Records behind `after_id` ("0": from the first), in order, waiting up to `block_ms` (0: not at all) for one."""
        return await self.read_json("metrics", after_id, block_ms, count)

    async def set_recorded(self, iteration: int) -> None:
        """The samples of all iterations up to this one are in the run directory."""
        await self.redis.hset(self.key("meta"), "recorded", iteration)

    async def recorded(self) -> int:
        """The newest iteration up to which samples are in the run directory; -1 before the first. Their groups may be released."""
        return int(await self.redis.hget(self.key("meta"), "recorded") or -1)

    async def trim_records(self, before_id: str) -> None:
        """Deletes the records before an id: they are in the run directory, where late readers find them."""
        await self.redis.xtrim(self.key("metrics"), minid=before_id, approximate=False)

    async def watch(self, after_id: str, block_ms: int) -> tuple[str, list[tuple[str, str]]]:
        """Waits up to `block_ms` for signals behind `after_id` ("$": from now). Returns the new id and (kind, value) pairs.

        Kinds: append, fail, drop, expire, plan, version, evaluated, commit, state, lease, term, record. They may be lost: look at the truth.
        """
        entries = await self._read("events", after_id, block_ms, 1000)
        signals = [(fields[b"kind"].decode(), fields[b"value"].decode()) for _, fields in entries]
        return (entries[-1][0] if entries else after_id), signals

    async def last_event(self) -> str:
        """The id to `watch` after, so that no signal from now on is missed."""
        entries = await self.redis.xrevrange(self.key("events"), count=1)
        return str(entries[0][0], "ascii") if entries else "0"

    async def until(self, look: Callable[[], Awaitable[T | None]], within: float = math.inf) -> T | None:
        """Calls `look` until it returns something: at once, then at every signal, and at least every HEARTBEAT seconds.

        Returns None after `within` seconds; without that, `look` itself must know when to end (the run's state tells).
        """
        deadline = time.monotonic() + within
        last = await self.last_event()
        while True:
            if (found := await look()) is not None:
                return found
            left = min(HEARTBEAT, deadline - time.monotonic())
            if left <= 0:
                return None
            last, _ = await self.watch(last, max(1, int(left * 1000)))

    async def read_json(self, name: str, after_id: str, block_ms: int, count: int = 1000) -> list[tuple[str, dict[str, Any]]]:
        """Entries of one of the run's JSON streams behind `after_id`, with their ids."""
        return [(at, json.loads(fields[b"json"])) for at, fields in await self._read(name, after_id, block_ms, count)]

    async def _read(self, name: str, after_id: str, block_ms: int, count: int) -> list[tuple[str, dict[bytes, bytes]]]:
        block = min(block_ms, 2000) or None  # a longer block would look like a dead server to the socket's timeout
        streams = await self.redis.xread({self.key(name): after_id}, count=count, block=block)
        if not streams:
            return []
        [(_, entries)] = streams.items() if isinstance(streams, dict) else streams
        return [(at.decode(), fields) for at, fields in entries]

    def once(self) -> str:
        """A key that marks one change as made, so that its repetition is known as such."""
        return self.key(f"once:{uuid.uuid4().hex}")


def fingerprint(model_files: Mapping[str, bytes]) -> str:
    """xxh3_64 (16 hex digits) of config.json and tokenizer.json; a missing file counts as empty."""
    digest = xxhash.xxh3_64()
    for name in ("config.json", "tokenizer.json"):
        data = model_files.get(name, b"")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """JSON types only: numpy scalars and arrays become numbers and lists."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
