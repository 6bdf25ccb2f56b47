"""Scaling: the throughput of 64 replicas compared with that of one, and the orchestrator's cost per sample.

    python bench/scale.py [--replicas 1 4 16 64] [--slots 8] [--step 0.01] [--seconds 18]

Replicas (all in one process) and learner are simulated, everything else is real: Redis with every write on disk, gRPC, and reward server,
supervisor, orchestrator and log in separate processes. A replica decodes `--slots` samples at once, each at `--step` seconds per token:
100 tokens/s, like a 7B model on one accelerator. Such a model would decode more samples at once, which two cores cannot simulate. Lengths
have a long tail: they are geometric, with a mean that varies log-normally over samples, and cut at 512 tokens. Half have less than 65, a
tenth more than 360. The work of a replica per iteration is the same for all sizes: 4 groups of 8 samples. At `max_staleness` 2 the longest
answers of an iteration overlap with the next ones.

linear_at_64                 tokens/s of 64 replicas over 64 times those of one (>= 0.95)
orchestrator_ms_per_sample   processor time of the orchestrator per sample, at 64 replicas
first_group_seconds          from the start of a replica that joins the largest run to the end of its first group, most of it decoding
first_call_seconds           from the same start to its first call

The table compares each run's tokens/s with those of an engine that never waits. The lines above it show each process's share of a core.

    python bench/scale.py --fleet [--replicas 64 1000] [--orchestrators 1] [--step 0.7] [--seconds 90]

measures 1,000 replicas with 10,000 open episodes of three turns, tools of 0.1 to 100 s, and 100 reward servers; replicas and learner are
simulated, and the servers of a kind share a process. `--step` stretches a replica's time, so that two cores bear all sides. The orchestrator's
cost of an episode is that of its calls and messages, which is not stretched: a turn of 64 tokens comes in four or five messages, like one of
400 tokens from a real replica under this load, which sends once in two seconds. It needs 8 GiB and 12,000 open files (`ulimit -n`).

With several `--orchestrators`, each size is measured with each of these numbers.

linear_at_fleet                     tokens/s per replica at the largest size over that at the smallest (>= 0.95), with the first number
orchestrator_seconds_per_1000       processor time of all orchestrators for 1,000 episodes
orchestrator_peak_mib               the largest resident set of one
log_bytes_per_sample                size of an episode in the log
samples_per_second_of_one_process   the rate at which one orchestrator needs a whole core
samples_per_second_of_all           the rate at which the busiest of them does
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
from rich.console import Console
from rich.table import Table
from simulated_side import fleet
from simulated_side.runs import COUNT, Stretch, measured

from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.net.endpoint import Endpoint
from polyreme.process.lifecycle import StopEvent
from polyreme_rollout.engine.protocol import CHUNK_TOKENS, EngineRequest, NewTokens, Sampling
from polyreme_rollout.run_spec import fetch_run_spec
from polyreme_rollout.serving import serve
from polyreme_rollout.testing.simulated_engine import WEIGHT_NAMES, Lengths, SimulatedInferenceEngine, sample
from support.simulated import VOCAB
from support.simulated_run import SimulatedRun, simulated_run

TARGET = {"linear_at_64": 0.95}
FLEET_TARGET = {"linear_at_fleet": 0.95}
FLEET = {"replicas": [64, 1000], "step": 0.7, "seconds": 90.0}
GROUPS, SAMPLES = 4, 8  # per replica and iteration
LENGTHS, LONGEST = Lengths(mean=96.0, spread=1.0), 512
TRAIN_SECONDS = 0.5
WARM_UP = 1  # iterations that do not count
JOIN_SECONDS = 60.0
CONTEXT = LONGEST + 32


class JoiningEngine(SimulatedInferenceEngine):
    """Records the times of its first call and of its first complete group."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.called: float | None = None
        self.whole: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._ended = 0

    async def generate(self, request: EngineRequest) -> AsyncIterator[NewTokens]:
        self.called = self.called or time.perf_counter()
        async for delta in super().generate(request):
            yield delta
            if delta.finish and int(request.request_id.rpartition(".")[2]) < SAMPLES:  # samples of the first group
                self._ended += 1
                if self._ended == SAMPLES:
                    self.whole.set_result(time.perf_counter())


async def join(started: SimulatedRun, options: argparse.Namespace) -> dict[str, float]:
    """Adds a replica, in this process, until it has generated a group. Returns the seconds from its start to its first call and to the
    group."""
    spec = await fetch_run_spec(started.redis_url, started.run.run_id)
    engine = JoiningEngine(WEIGHT_NAMES, CONTEXT, VOCAB, options.step, options.slots, LENGTHS)
    stop, began = StopEvent(), time.perf_counter()
    serving = asyncio.create_task(serve(engine, spec, started.redis_url, Endpoint(http_port=None), stop))
    try:
        whole = await asyncio.wait_for(engine.whole, JOIN_SECONDS)
        assert engine.called is not None
        return {"first_call_seconds": engine.called - began, "first_group_seconds": whole - began}
    finally:
        stop.set()
        await serving
        engine.close()


async def one(
    server: EmbeddedServer, folder: Path, replicas: int, options: argparse.Namespace, found: dict[str, float]
) -> Stretch:
    """Measures one run. The largest run then gets one more replica, whose times are added to `found`."""
    (folder / "run").mkdir(parents=True)
    async with simulated_run(
        server.url,
        folder.name,
        folder,
        executable=sys.executable,  # the processes themselves are measured, without a wrapper
        replicas=(
            *("--replicas", str(replicas), "--step-seconds", str(options.step)),
            *("--mean-length", str(LENGTHS.mean), "--length-spread", str(LENGTHS.spread)),
            *("--count", str(folder / COUNT)),
        ),
        train_seconds=TRAIN_SECONDS,
        iterations=1000,
        groups_per_iteration=GROUPS * replicas,
        group_size=SAMPLES,
        max_staleness=2,
        rollout={
            **{"replicas": replicas, "max_num_seqs": options.slots, "start_timeout": 60.0},
            **{"max_new_tokens": LONGEST, "max_model_len": CONTEXT},
        },
        trainer={"save_interval": 3},
    ) as started:
        stretch = await measured(started, server.pid, WARM_UP, options.seconds)
        if replicas == max(options.replicas):
            found |= await join(started, options)
        return stretch


def engine_rate(options: argparse.Namespace) -> float:
    """Returns tokens per second of one replica that never waits. A slot is occupied until the end of its last chunk."""
    sampling = Sampling(1.0, 1.0, -1, (LENGTHS.end_id,))
    lengths = np.array([len(sample(0, [0], seed, sampling, LONGEST, VOCAB, LENGTHS)[0]) for seed in range(4000)])
    return float(options.slots / options.step * lengths.mean() / (np.ceil(lengths / CHUNK_TOKENS) * CHUNK_TOKENS).mean())


async def measure(server: EmbeddedServer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    table = Table(
        title=f"{GROUPS} groups x {SAMPLES} samples per replica and iteration, {options.slots} slots x {1 / options.step:.0f} tokens/s"
    )
    for column in ("replicas", "tokens/s", "each", "of engine", "linear", "samples/s", "iteration s", "orchestrator ms/sample"):
        table.add_column(column, justify="right")
    alone, rates, found = engine_rate(options), dict[int, float](), dict[str, float]()
    for replicas in options.replicas:
        stretch = await one(server, folder / f"bench-{replicas}", replicas, options, found)
        iterations = len(stretch.records) - 1
        samples = iterations * GROUPS * SAMPLES * replicas
        tokens, seconds = stretch.tokens
        rates[replicas] = tokens / seconds
        linear = rates[replicas] / replicas * min(options.replicas) / rates[min(options.replicas)]
        cost = stretch.cpu_seconds["orchestrator"] / samples * 1e3
        shares = ", ".join(f"{name} {seconds / stretch.seconds:.2f}" for name, seconds in stretch.cpu_seconds.items())
        print(f"{replicas} replicas: {linear:.3f}; cores: {shares}", flush=True)
        table.add_row(
            *(
                str(replicas),
                f"{rates[replicas]:.0f}",
                f"{rates[replicas] / replicas:.0f}",
                f"{rates[replicas] / replicas / alone:.3f}",
            ),
            *(f"{linear:.3f}", f"{samples / stretch.seconds:.1f}", f"{stretch.seconds / iterations:.2f}", f"{cost:.2f}"),
        )
    Console(width=120).print(table)
    return {"linear_at_64": linear, "orchestrator_ms_per_sample": cost, **found}


async def measure_fleet(server: EmbeddedServer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    ideal = fleet.OPEN / fleet.episode_seconds(options.step)
    table = Table(title=f"{fleet.OPEN} episodes per replica, each of {fleet.TURNS} turns; {options.step} s per token")
    columns = (
        "replicas",
        "orchestrators",
        "open",
        "samples/s",
        "of ideal",
        "linear",
        "orchestrator s/1,000",
        "core",
        "peak MiB",
        "files",
        "log B/sample",
    )
    for column in columns:
        table.add_column(column, justify="right")
    rates = dict[int, float]()
    for replicas, count in ((replicas, count) for replicas in options.replicas for count in options.orchestrators):
        async with fleet.fleet_run(server, folder / f"fleet-{replicas}-{count}", replicas, options.step, count) as started:
            window = await fleet.measured(started, server.pid, replicas, options.seconds)
        cores, rate = window.cores(), window.samples_rate
        cost, busiest = cores["orchestrator"] / rate * 1000, max(window.shares)
        each = window.tokens_rate / replicas
        linear = each / rates.setdefault(min(options.replicas), each)
        shares = " + ".join(f"{share:.2f}" for share in window.shares)
        print(
            f"{replicas} replicas, {count} orchestrators: {linear:.3f}; cores: "
            f"{', '.join(f'{name} {core:.3f}' for name, core in cores.items())}; of the orchestrators' {shares}",
            flush=True,
        )
        row = (rate / replicas / ideal, linear, cost, cores["orchestrator"])
        table.add_row(
            *(str(replicas), str(count), str(window.open_episodes), f"{rate:.2f}", *(f"{number:.3f}" for number in row)),
            *(f"{window.peak_mib:.0f}", str(window.files), f"{window.log_bytes:.0f}"),
        )
        if count == options.orchestrators[0]:
            found = {"linear_at_fleet": linear, "samples_per_second_of_one_process": 1000 / cost}
        found |= {"orchestrator_seconds_per_1000": cost, "orchestrator_peak_mib": window.peak_mib}
        found |= {"log_bytes_per_sample": window.log_bytes, "samples_per_second_of_all": 1000 / cost / busiest}
    Console(width=140).print(table)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", action="store_true", help="episodes with slow tools, at 64 and 1,000 replicas")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--orchestrators", type=int, nargs="+", default=[1], help="numbers of orchestrators, with --fleet")
    parser.add_argument("--slots", type=int, default=8, help="samples that a replica decodes at once")
    parser.add_argument("--step", type=float, default=0.01, help="seconds per token")
    parser.add_argument("--seconds", type=float, default=18.0, help="measured time of each run")
    if "--fleet" in sys.argv:
        parser.set_defaults(**FLEET)
    options = parser.parse_args()
    target = FLEET_TARGET if options.fleet else TARGET
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer.start(Path(folder) / "redis") as server:
        found = asyncio.run((measure_fleet if options.fleet else measure)(server, Path(folder), options))
    measurements = {name: round(value, 3) for name, value in found.items()}
    met = all(found[name] >= least for name, least in target.items())
    print(json.dumps({"bench": "scale", "measured": measurements, "target": target, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
