"""Throughput with overlapping generation and training, relative to the slower of the two alone.

    python bench/asynchrony.py [--groups 8] [--samples 8] [--tokens 128] [--generate 1.5]

Times are simulated, everything else is real: Redis with every write on disk, gRPC, and reward server, supervisor, orchestrator and log in
separate processes. Two simulated replicas decode an iteration's samples at once, each of `--tokens` tokens, in `--generate` seconds. The
simulated learner sleeps for 0.5, 1 and 2 times as long, then writes a version and pushes it to both replicas.

The ceiling is the number of samples of one iteration divided by the longer of the two times. `throughput_vs_ceiling` (>= 0.95) is the
smallest share of it that `max_staleness` 1 reaches. The table also has 0, which waits for both times in turn, and 2 and 4, which buffer
more.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from rich.console import Console
from rich.table import Table
from simulated_side.runs import COUNT, Stretch, measured

from polyreme.experience.embedded_redis import EmbeddedServer
from support.simulated_run import simulated_run

TARGET = {"throughput_vs_ceiling": 0.95}
REPLICAS = 2
WARM_UP, MEASURED = 2, 8  # iterations
RUNS = ((0.5, 1), (1.0, 0), (1.0, 1), (1.0, 2), (1.0, 4), (2.0, 1))  # training over generation, max_staleness


async def one(server: EmbeddedServer, folder: Path, train: float, max_staleness: int, options: argparse.Namespace) -> Stretch:
    """Measures one run. Args: train: seconds of an iteration's training."""
    (folder / "run").mkdir(parents=True)
    slots = -(-options.groups * options.samples // REPLICAS)
    async with simulated_run(
        server.url,
        folder.name,
        folder,
        executable=sys.executable,  # the processes themselves are measured, without a wrapper
        replicas=(
            *("--replicas", str(REPLICAS), "--step-seconds", str(options.generate / options.tokens)),
            *("--mean-length", "1e15", "--count", str(folder / COUNT)),  # the end token is never sampled
        ),
        train_seconds=train,
        iterations=1000,
        groups_per_iteration=options.groups,
        group_size=options.samples,
        max_staleness=max_staleness,
        rollout={
            **{"replicas": REPLICAS, "max_num_seqs": slots},
            **{"max_new_tokens": options.tokens, "max_model_len": options.tokens + 32},
        },
        trainer={"save_interval": 5},
    ) as started:
        longest = (options.generate + train) if max_staleness == 0 else max(options.generate, train)
        return await measured(started, server.pid, WARM_UP, (MEASURED - 0.5) * longest)


async def measure(server: EmbeddedServer, folder: Path, options: argparse.Namespace) -> float:
    samples, worst = options.groups * options.samples, 1.0
    table = Table(
        title=f"{options.groups} groups x {options.samples} samples x {options.tokens} tokens in {options.generate:g} s"
    )
    for column in (
        "training s",
        "max_staleness",
        "ceiling samples/s",
        "samples/s",
        "of ceiling",
        "staleness",
        "learner waits s",
        "CPU share",
    ):
        table.add_column(column, justify="right")
    for ratio, max_staleness in RUNS:
        train = ratio * options.generate
        stretch = await one(server, folder / f"bench-{ratio:g}-{max_staleness}".replace(".", "-"), train, max_staleness, options)
        ceiling = samples / max(train, options.generate)
        rate = samples * (len(stretch.records) - 1) / stretch.seconds
        if max_staleness == 1:
            worst = min(worst, rate / ceiling)
        busy = sum(stretch.cpu_seconds.values()) / stretch.seconds
        print(f"training {train:.2f} s, max_staleness {max_staleness}: {rate / ceiling:.3f} of the ceiling", flush=True)
        table.add_row(
            *(f"{train:.2f}", str(max_staleness), f"{ceiling:.1f}", f"{rate:.1f}", f"{rate / ceiling:.3f}"),
            *(f"{stretch.mean('staleness/mean'):.2f}", f"{stretch.mean('time/learner_wait'):.3f}", f"{busy:.2f}"),
        )
    Console(width=120).print(table)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--generate", type=float, default=1.5, help="seconds of an iteration's generation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer.start(Path(folder) / "redis") as server:
        worst = asyncio.run(measure(server, Path(folder), options))
    measurements = {"throughput_vs_ceiling": round(worst, 3)}
    met = worst >= TARGET["throughput_vs_ceiling"]
    print(json.dumps({"bench": "asynchrony", "measured": measurements, "target": TARGET, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
