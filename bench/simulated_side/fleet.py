"""A fleet: simulated replicas and learner, and every other process real, with episodes of several turns whose tools take their time.

Invariant: the load of a replica is the same at all sizes: OPEN episodes, each of TURNS turns with a tool between two of them. Figures are of a
window that begins when a fifth of the open episodes have ended, so the start of all of them at once does not count.
"""

import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from simulated_side.runs import COUNT, cpu_seconds, orchestrators_of

from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.leases import Registry
from polyreme_rollout.engine.protocol import CHUNK_TOKENS
from polyreme_rollout.testing.simulated_engine import Lengths
from support.simulated_run import SimulatedRun, simulated_run

OPEN, GROUP, TURNS, SLOTS = 10, 8, 3, 16  # episodes of a replica, samples of a group, turns of an episode, slots of a replica
LENGTHS, LONGEST = Lengths(mean=64.0), 160  # tokens of a turn
SHORTEST_TOOL, LONGEST_TOOL = 0.1, 100.0  # seconds, log-uniform
REWARD_SERVERS_PER_REPLICA = 0.1
STALENESS = 6
START_SECONDS = 240.0
LIMIT = 900.0  # seconds up to the window
_BENCH = Path(__file__).resolve().parents[1]
TOOL = f"""
import asyncio, random
class Tool:
    def __init__(self): self.turns = 0
    async def reset(self, row, seed):
        self.random = random.Random(seed)
    async def step(self, message):
        self.turns += 1
        if self.turns == {TURNS}:
            return "", 0.0, True
        await asyncio.sleep({SHORTEST_TOOL} * {LONGEST_TOOL / SHORTEST_TOOL} ** self.random.random())
        return "go on", 0.0, False
"""


@dataclass(frozen=True)
class Moment:
    """What a run has done up to a time.

    Attributes:
        samples: episodes of the groups that have left the orchestrators.
        cpu_seconds: by process, of all orchestrators together.
        orchestrators: processor seconds of each orchestrator.
    """

    time: float
    samples: int
    tokens: int
    cpu_seconds: dict[str, float]
    orchestrators: list[float]


@dataclass(frozen=True)
class Window:
    """Two moments, and what was found at the second one.

    Attributes:
        open_episodes: those of the environment servers.
        peak_mib: the largest resident set of an orchestrator.
        files: the open files of the orchestrator that has most.
        shares: the processor time of each orchestrator, as a part of that of all.
        log_bytes: per sample, of the groups in the log.
    """

    first: Moment
    last: Moment
    open_episodes: int
    peak_mib: float
    files: int
    log_bytes: float
    shares: list[float]

    @property
    def seconds(self) -> float:
        return self.last.time - self.first.time

    @property
    def samples_rate(self) -> float:
        """Per second."""
        return (self.last.samples - self.first.samples) / self.seconds

    @property
    def tokens_rate(self) -> float:
        """Per second."""
        return (self.last.tokens - self.first.tokens) / self.seconds

    def cores(self) -> dict[str, float]:
        """Processor seconds per second, by process."""
        return {name: (spent - self.first.cpu_seconds[name]) / self.seconds for name, spent in self.last.cpu_seconds.items()}


def episode_seconds(step: float) -> float:
    """The mean time of an episode that never waits: its tokens, in whole chunks, and its tools."""
    end = 1.0 / LENGTHS.mean
    chunks = sum((1.0 - end) ** done for done in range(0, LONGEST, CHUNK_TOKENS))
    tool = (LONGEST_TOOL - SHORTEST_TOOL) / math.log(LONGEST_TOOL / SHORTEST_TOOL)
    return TURNS * chunks * CHUNK_TOKENS * step + (TURNS - 1) * tool


@asynccontextmanager
async def fleet_run(
    server: EmbeddedServer, folder: Path, replicas: int, step: float, orchestrators: int
) -> AsyncIterator[SimulatedRun]:
    (folder / "run").mkdir(parents=True)
    (folder / "tool.py").write_text(TOOL)
    os.environ["PYTHONPATH"] = str(_BENCH)
    groups = math.ceil(OPEN * replicas / GROUP)
    context = TURNS * (LONGEST + 32) + 32
    async with simulated_run(
        server.url,
        folder.name,
        folder,
        executable=sys.executable,
        replicas=(
            *("--replicas", str(replicas), "--step-seconds", str(step), "--no-http"),
            *("--mean-length", str(LENGTHS.mean), "--count", str(folder / COUNT)),
        ),
        reward_command=("simulated_side.reward_servers", str(math.ceil(REWARD_SERVERS_PER_REPLICA * replicas))),
        train_seconds=0.5,
        iterations=1000,
        groups_per_iteration=groups // 2,
        group_size=GROUP,
        max_staleness=STALENESS,
        rollout={
            **{"replicas": replicas, "max_num_seqs": SLOTS, "start_timeout": START_SECONDS, "chunk_timeout": 120.0},
            **{"max_new_tokens": LONGEST, "max_model_len": context},
        },
        environment={
            **{"file": str(folder / "tool.py"), "episodes": OPEN * replicas, "worker_calls": OPEN * replicas},
            **{"max_turns": TURNS, "max_seconds": 3600.0, "step_timeout": 3 * LONGEST_TOOL, "start_timeout": START_SECONDS},
        },
        trainer={"save_interval": 3, "orchestrators": orchestrators},
    ) as started:
        yield started


async def measured(started: SimulatedRun, redis_pid: int, replicas: int, seconds: float) -> Window:
    """Waits until the window begins, and for its seconds. Raises RuntimeError, with the logs, when the run ends or does not get there."""
    began = time.monotonic()
    while (first := await _moment(started, redis_pid)).samples < OPEN * replicas // 5:
        if started.children["train"].poll() is not None or time.monotonic() - began > LIMIT:
            raise RuntimeError(f"the run ended or stalled: {await started.run.state()}\n{started.logs()}")
        await asyncio.sleep(1.0)
    await asyncio.sleep(seconds)
    last = await _moment(started, redis_pid)
    redis, payloads = started.run.redis, started.run.key("payloads")
    sizes = [await redis.hstrlen(payloads, index) for index in await redis.hrandfield(payloads, 64)]
    processes = orchestrators_of(started)
    spent = [after - before for before, after in zip(first.orchestrators, last.orchestrators, strict=True)]
    return Window(
        first,
        last,
        open_episodes=await _open_episodes(started),
        peak_mib=max(_peak_mib(process.pid) for process in processes),
        files=max(process.num_fds() for process in processes),
        log_bytes=sum(sizes) / max(1, len(sizes)) / GROUP,
        shares=[seconds / sum(spent) for seconds in spent],
    )


async def _moment(started: SimulatedRun, redis_pid: int) -> Moment:
    redis, run = started.run.redis, started.run
    groups = await redis.hlen(run.key("ledger")) - await redis.zcard(run.key("in_flight"))
    lines = (started.folder / COUNT).read_text().splitlines() if (started.folder / COUNT).exists() else []
    tokens = int(lines[-1].split()[1]) if lines else 0
    each = [sum(process.cpu_times()[:2]) for process in orchestrators_of(started)]
    return Moment(time.time(), GROUP * groups, tokens, cpu_seconds(started, redis_pid), each)


async def _open_episodes(started: SimulatedRun) -> int:
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
        [lease] = await Registry(started.run).leases("environment")
        lines = (await client.get(f"http://{lease.http_address}/metrics")).text.splitlines()
    return int(next(float(line.split()[1]) for line in lines if line.startswith("polyreme_environment_episodes ")))


def _peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
