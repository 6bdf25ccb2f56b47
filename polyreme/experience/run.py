"""The run record: configuration, model files, state and metric records of a run, stored in Redis under the run's id.

Invariant: the keys are authoritative. An entry of the `events` stream only signals that some key has changed. The stream is
bounded and may lose entries, so every wait also polls the keys once per HEARTBEAT.
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
from polyreme.experience.metric_records import Line, MetricRecord, Restart, fields_of
from polyreme.experience.scripts import Scripts, key
from polyreme.net.seal import check_config, check_files, seal_of
from polyreme.process.tasks import running

T = TypeVar("T")
logger = logging.getLogger(__name__)

CURRENT = "polyreme:current"
HEARTBEAT = 1.0
"""Polling interval in seconds. It is below the sockets' timeout."""
OVER_SECONDS = 2.0
"""Seconds between two checks whether a run has ended."""
METRICS_BOUND = 200_000
"""Maximum number of records that wait for their writer, which trims those that are on disk."""


class RunState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in ENDED


ENDED = (RunState.DONE, RunState.STOPPED, RunState.FAILED)
"""Equal to their texts. A state that only a newer release knows counts as not ended."""


class Run:
    """A run that exists in Redis. Obtain one with `create`, `resume` or `attach`.

    `start` is the number of the start (creation or resume) that this process belongs to. A process cannot set the state of a
    later start. `seal` is that of `create` and `resume`, for the processes that the caller starts; see `seal`.
    """

    def __init__(self, redis: Redis, run_id: str) -> None:
        self.redis: Any = redis  # redis-py's types do not say whether replies are bytes or str
        self.run_id = run_id
        self.start, self.seal = 0, ""
        self._reports: set[asyncio.Task[None]] = set()  # asyncio alone keeps no task alive
        self._reporting = asyncio.Lock()
        self.scripts = Scripts(redis, run_id)

    def key(self, name: str) -> str:
        return key(self.run_id, name)

    # -- creating and finding a run

    @classmethod
    async def create(
        cls,
        redis: Redis,
        run_id: str,
        config: RunConfig,
        model_files: Mapping[str, bytes],
        first_group: int = 0,
        newest: bool = True,
    ) -> "Run":
        """Creates a run in state `starting`.

        Args:
            redis: client from `store.connect`.
            run_id: id that is new in this Redis, the prefix of every key, arena name and lease.
            config: the resolved configuration.
            model_files: contents by file name of what a replica needs besides the weights (config.json, tokenizer files, ...).
            first_group: index of the first group in the log, where a fork continues its parent's data.
            newest: whether it becomes the newest run of this Redis, which servers serve that are given no run id.

        Raises:
            ConfigError: the run id already exists.
        """
        place = {"first_group": first_group, "low_water": first_group}
        return await cls(redis, run_id)._write("create", config, model_files, newest, place)

    @classmethod
    async def resume(
        cls, redis: Redis, run_id: str, config: RunConfig, model_files: Mapping[str, bytes], newest: bool = True
    ) -> "Run":
        """Sets an existing run in any state back to `starting`, with this configuration. Keeps its log. `newest`: see `create`.

        Raises:
            UnavailableError: this Redis has no such run.
        """
        return await cls(redis, run_id)._write("resume", config, model_files, newest)

    async def _write(
        self,
        script: str,
        config: RunConfig,
        model_files: Mapping[str, bytes],
        newest: bool,
        place: Mapping[str, int] | None = None,
    ) -> "Run":
        limits = {
            **(place or {}),
            "groups_per_iteration": config.groups_per_iteration,
            "max_staleness": config.max_staleness,
            "max_attempts": config.max_attempts,
            "iterations": config.iterations,
            "orchestrators": config.trainer.orchestrators,
        }
        words: list[Any] = [word for pair in [*limits.items(), *model_files.items()] for word in pair]
        keys = [self.key("config"), self.key("files")]
        nonce, text = uuid.uuid4().hex, config.model_dump_json()
        self.start = int(await self.scripts.call(script, nonce, text, len(limits), *words, keys=keys))
        if newest:
            await self.redis.set(CURRENT, self.run_id)
        self.seal = seal_of(self.run_id, text.encode(), model_files)
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
        """Finds a run, or the newest one without a run id. Waits up to `timeout` seconds for it to appear.

        Args:
            redis: client from `store.connect`.
            run_id: id of the run, or None for the newest.
            timeout: seconds.
            ended: whether a newest run that has ended is accepted. If not, waits for an active one.
            start: start that this process belongs to, or None for the newest.

        Raises:
            UnavailableError: the run did not appear.
            StaleTermError: the run has been resumed since `start`.
        """
        store: Any = redis
        deadline = time.monotonic() + timeout
        while True:
            wanted = run_id or str(await store.get(CURRENT) or b"", "ascii")
            found = cls(redis, wanted)
            state, newest = await store.hmget(found.key("meta"), "state", "start") if wanted else (None, None)
            if state is not None and (ended or run_id or await found.is_current()):
                found.start = int(newest or 0)
                if start is not None and start < found.start:
                    raise StaleTermError(
                        f"run {wanted} at start {start}",
                        f"start {found.start}",
                        "Another process has taken over the run; this one must end without changing it.",
                    )
                return found
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"run {run_id} in Redis" if run_id else "a run in Redis",
                    f"none within {timeout:g} s",
                    "Start the run with `polyreme up` or `polyreme train`, or check the Redis URL and the run id.",
                )
            await asyncio.sleep(0.2)

    # -- its configuration and model

    async def config(self) -> RunConfig:
        """The resolved configuration. Raises ConfigError when another release wrote it, and GateError when it breaks the seal."""
        text = await self.redis.get(self.key("config")) or b"{}"
        check_config(self.run_id, text)
        try:
            return parse_config(json.loads(text), f"run {self.run_id}")
        except ConfigError as error:  # it was valid for the release that wrote it
            raise ConfigError(error.expected, error.found, "Install the same Polyreme version everywhere.") from None

    async def model_files(self) -> dict[str, bytes]:
        """Contents of all model files except the weights, by file name. Raises GateError when they break the seal."""
        files = {name.decode(): data for name, data in (await self.redis.hgetall(self.key("files"))).items()}
        check_files(self.run_id, files)
        return files

    async def model_fingerprint(self) -> str:
        """Identifies architecture and tokenizer: xxh3_64 (hexadecimal) of config.json and tokenizer.json."""
        return fingerprint(await self.model_files())

    # -- its state

    async def state(self) -> tuple[RunState, str]:
        """The state, and why it failed, stopped or drains (else ''). Raises UnavailableError for an unknown run or state."""
        name, reason = await self.recorded_state()
        try:
            return RunState(name), reason
        except ValueError:
            do = f"Use the release that started run {self.run_id}."
            raise UnavailableError(f"one of the states {', '.join(RunState)}", repr(name), do) from None

    async def recorded_state(self) -> tuple[str, str]:
        """As `state`, also a state that only a newer release knows. Raises UnavailableError for an unknown run."""
        name, reason = await self.redis.hmget(self.key("meta"), "state", "reason")
        if name is None:
            raise UnavailableError(f"run {self.run_id} in Redis", "no record of it", "Check the run id and the Redis URL.")
        return name.decode(), (reason or b"").decode()

    async def is_current(self) -> bool:
        """Whether this is the newest run and has not ended. If not, a server of the newest run must look for another one."""
        return bool(await self.redis.get(CURRENT) == self.run_id.encode()) and not (await self.state())[0].ended

    @asynccontextmanager
    async def set_when_over(self, over: asyncio.Event, interval: float = OVER_SECONDS) -> AsyncIterator[None]:
        """In the block, sets `over` once the run ended or is not the newest; looks every `interval` seconds, if Redis answers."""

        async def watch() -> None:
            while True:
                with suppress(StoreError):
                    if not await self.is_current():
                        break
                await asyncio.sleep(interval)
            logger.info("run %s has ended", self.run_id)
            over.set()

        async with running(watch()):
            yield

    async def set_state(self, state: RunState, reason: str = "") -> None:
        """Makes one transition: starting -> running -> draining -> stopped, or from any of these to failed or done.

        Raises:
            TransitionError: the transition is illegal. `done`, `stopped` and `failed` are final until `resume`.
            StaleTermError: the run has been resumed since this process started.
        """
        await self.scripts.call("state", state.value, reason, self.start)

    async def check(self) -> RunState:
        """The state of the run. Raises RunFailedError when it has failed."""
        state, reason = await self.state()
        if state is RunState.FAILED:
            raise RunFailedError("a run that has not failed", reason or "failed", "Fix the cause and start again with --resume.")
        return state

    # -- metric records

    async def emit(self, record: MetricRecord) -> None:
        """Appends a record to the durable stream `metrics`. Non-finite numbers become null."""
        text = json.dumps(_plain(fields_of(record)), allow_nan=False)
        keys = [self.key("metrics"), self.once()]
        await self.scripts.call("publish", METRICS_BOUND, text, keys=keys)

    def report(self, record: MetricRecord) -> None:
        """Emits a record in the background, after those of earlier calls, so that a lost Redis delays nothing. Call it in the
        event loop."""

        async def emit() -> None:
            async with self._reporting:  # grants its tasks in the order of their requests
                with suppress(PolyremeError):
                    await self.emit(record)

        task = asyncio.create_task(emit())
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    def report_restart(self, process: str, found: str) -> None:
        """Emits the record of a restart in the background."""
        self.report(Restart(process=process, text=found))

    async def records(self, after_id: str, block_ms: int, count: int = 1000) -> list[tuple[str, Line]]:
        """Records after `after_id` ("0": all), in order. Waits up to `block_ms` milliseconds for one (0: does not wait)."""
        return await self.read_json("metrics", after_id, block_ms, count)

    async def set_recorded(self, iteration: int) -> None:
        """Records that the samples of all iterations up to this one are in the run directory."""
        await self.redis.hset(self.key("meta"), "recorded", iteration)

    async def recorded(self) -> int:
        """The newest iteration whose samples are in the run directory; -1 before the first. Groups up to it may be released."""
        return int(await self.redis.hget(self.key("meta"), "recorded") or -1)

    async def set_trained(self, iteration: int, payload: bytes) -> None:
        """Stores an iteration's encoded TrainedSamples for the trainer's records."""
        await self.redis.hset(self.key("trained"), str(iteration), payload)

    async def trained(self, iteration: int) -> bytes | None:
        """The payload that `set_trained` stored for an iteration; None when there is none, or the records have discarded it."""
        found = await self.redis.hget(self.key("trained"), str(iteration))
        return None if found is None else bytes(found)

    async def discard_trained(self, iteration: int) -> None:
        """Deletes the payloads of `set_trained` for iterations up to this one."""
        there = [number for number in await self.redis.hkeys(self.key("trained")) if int(number) <= iteration]
        if there:
            await self.redis.hdel(self.key("trained"), *there)

    async def trim_records(self, before_id: str) -> None:
        """Deletes the records before an id. They are in the run directory, where late readers find them."""
        await self.redis.xtrim(self.key("metrics"), minid=before_id, approximate=False)

    async def watch(self, after_id: str, block_ms: int) -> tuple[str, list[tuple[str, str]]]:
        """Waits up to `block_ms` milliseconds for events after `after_id` ("$": now). Returns the new id and (kind, value) pairs.

        Kinds: admit, append, fail, drop, expire, pause, plan, version, evaluated, commit, state, lease, term, device, reward.
        Events may be lost, so the caller must also poll the keys.
        """
        entries = await self._read("events", after_id, block_ms, 1000)
        signals = [(fields[b"kind"].decode(), fields[b"value"].decode()) for _, fields in entries]
        return (entries[-1][0] if entries else after_id), signals

    async def last_event(self) -> str:
        """The id after which `watch` returns every event from now on."""
        entries = await self.redis.xrevrange(self.key("events"), count=1)
        return str(entries[0][0], "ascii") if entries else "0"

    async def until(self, look: Callable[[], Awaitable[T | None]], within: float = math.inf) -> T | None:
        """Calls `look` until it returns a value: at once, after every event, and at least every HEARTBEAT seconds.

        Returns None after `within` seconds. Without a limit, `look` must end the wait, for example when the run's state changes.
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

    async def read_json(self, name: str, after_id: str, block_ms: int, count: int = 1000) -> list[tuple[str, dict[str, object]]]:
        """Entries of one of the run's JSON streams after `after_id`, with their ids."""
        return [(at, json.loads(fields[b"json"])) for at, fields in await self._read(name, after_id, block_ms, count)]

    async def _read(self, name: str, after_id: str, block_ms: int, count: int) -> list[tuple[str, dict[bytes, bytes]]]:
        block = min(block_ms, 2000) or None  # a longer block would exceed the socket's timeout
        streams = await self.redis.xread({self.key(name): after_id}, count=count, block=block)
        if not streams:
            return []
        [(_, entries)] = streams.items() if isinstance(streams, dict) else streams
        return [(at.decode(), fields) for at, fields in entries]

    def once(self) -> str:
        """A unique key that marks one change as done, so that a retry of the change has no effect."""
        return self.key(f"once:{uuid.uuid4().hex}")


def fingerprint(model_files: Mapping[str, bytes]) -> str:
    """xxh3_64 (16 hexadecimal digits) of config.json and tokenizer.json. A missing file counts as empty."""
    digest = xxhash.xxh3_64()
    for name in ("config.json", "tokenizer.json"):
        data = model_files.get(name, b"")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _plain(value: object) -> object:
    """Converts a value to JSON types. NumPy scalars and arrays become numbers and lists."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
