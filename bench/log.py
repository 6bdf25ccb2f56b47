"""The cost of the experience log per sample, on a server with production settings (every write is on disk before its reply).

    python bench/log.py [--iterations 40] [--redis URL]

An iteration has 32 groups of 8 samples of about 40 tokens. They are admitted, encoded, appended by one task each, planned while the learner
waits, read, decoded, trained (not timed, since there is nothing to train) and released. `log_vs_writes` (<= 10) is the median of its
wall-clock time, over that of writing the same payloads to the same server with plain HSETs at the same concurrency. `ms_per_sample` is the
former over 256 samples.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import numpy as np
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.config.run import RunConfig
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.record_codec import decode_group, encode_group
from polyreme.experience.records import GroupRecord, RewardPart, SampleRecord
from polyreme.experience.run import Run
from polyreme.experience.store import connect

GROUPS, SAMPLES, TOKENS = 32, 8, 40
TARGET = {"log_vs_writes": 10.0}

Times = dict[str, list[float]]


def config() -> RunConfig:
    return RunConfig.model_validate(
        {
            "iterations": 100_000,
            "groups_per_iteration": GROUPS,
            "group_size": SAMPLES,
            "model": {"path": "/unused"},
            "data": {"train": "/unused"},
            "rollout": {"max_new_tokens": 1024, "max_model_len": 2048},
            "reward": {"rewards": [{"name": "unused"}]},
            "trainer": {"optimizer": {"lr": 1e-3}},
        }
    )


def group(index: int, version: int, rng: np.random.Generator) -> GroupRecord:
    """Returns a group as the orchestrator makes it: lengths around TOKENS, texts, one reward part per sample."""
    samples = []
    for _ in range(SAMPLES):
        length = int(rng.integers(TOKENS // 2, TOKENS * 3 // 2))
        score = float(rng.integers(0, 2))
        samples.append(
            SampleRecord(
                rng.integers(0, 32000, length, dtype=np.int32),
                -rng.random(length, dtype=np.float32),
                np.ones(length, np.uint8),
                pb.FINISH_REASON_STOP,
                [(version, 0, length)],
                score,
                [RewardPart("exact", score, score, "1")],
                "7 + 5 = 12; " * (length // 6),
            )
        )
    return GroupRecord(index, 1, rng.integers(0, 32000, 24, dtype=np.int32), samples, "3 5 2 9 =", "19", 0.5, 0.01)


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times[name].append(time.perf_counter() - start)


async def iterate(
    orchestrator: ExperienceLog, learner: ExperienceLog, iteration: int, rng: np.random.Generator, times: Times
) -> None:
    groups = [group(n, iteration - 1, rng) for n in range((iteration - 1) * GROUPS, iteration * GROUPS)]  # not timed

    async def append(record: GroupRecord) -> None:
        payload = encode_group(record)
        await orchestrator.append(record.index, record.attempt, payload, record.oldest_version, record.mean_reward)

    with timed(times, "iteration"):
        waiting = asyncio.create_task(learner.wait_plan(iteration, 600))
        with timed(times, "admit"):
            assert len(await orchestrator.admit(GROUPS)) == GROUPS
        with timed(times, "append and plan"):
            await asyncio.gather(*(append(record) for record in groups))
            plan = await waiting
        assert plan is not None
        with timed(times, "read and decode"):
            read = [decode_group(payload) for payload in await learner.read(plan)]
        assert [record.index for record in read] == [record.index for record in groups]
        await learner.set_version(iteration)
        with timed(times, "release"):
            await learner.release(iteration)


async def bare_writes(redis: Redis, rng: np.random.Generator, times: Times) -> None:
    payloads = [encode_group(group(n, 0, rng)) for n in range(GROUPS)]
    with timed(times, "bare writes"):
        await asyncio.gather(*(redis.execute_command("HSET", "polyreme:bench", n, payload) for n, payload in enumerate(payloads)))
    await redis.delete("polyreme:bench")


async def measure(url: str, iterations: int) -> tuple[Times, bool]:
    one, two = await connect(url), await connect(url)  # one connection per process, as in a run
    times: Times = defaultdict(list)
    run = await Run.create(one, f"bench-{uuid4().hex[:8]}", config(), {})
    orchestrator, learner = ExperienceLog(run), ExperienceLog(Run(two, run.run_id))
    await orchestrator.take(Writer.ORCHESTRATOR)
    await learner.take(Writer.LEARNER)
    await learner.begin(0)
    rng = np.random.default_rng(0)
    warm_up = 5
    for iteration in range(1, warm_up + iterations + 1):
        await iterate(orchestrator, learner, iteration, rng, times)
        await bare_writes(one, rng, times)
    clean = (await learner.audit()).clean
    await one.aclose()
    await two.aclose()
    return {name: values[warm_up:] for name, values in times.items()}, clean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--redis", help="URL of a server; default: an embedded one in a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.redis:
            times, clean = asyncio.run(measure(options.redis, options.iterations))
        else:
            with EmbeddedServer.start(Path(folder)) as server:
                times, clean = asyncio.run(measure(server.url, options.iterations))
    if not clean:
        raise SystemExit("the audit after the bench is not clean")
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    table = Table(title=f"{GROUPS} groups x {SAMPLES} samples x ~{TOKENS} tokens, {options.iterations} iterations (medians)")
    for column in ("part", "ms", "ms per sample", "x bare writes"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name, value in medians.items():
        table.add_row(name, f"{value:.2f}", f"{value / (GROUPS * SAMPLES):.4f}", f"{value / medians['bare writes']:.2f}")
    Console().print(table)
    measured = {
        "log_vs_writes": round(medians["iteration"] / medians["bare writes"], 2),
        "ms_per_sample": round(medians["iteration"] / (GROUPS * SAMPLES), 4),
    }
    met = all(measured[name] <= limit for name, limit in TARGET.items())
    print(json.dumps({"bench": "log", "measured": measured, "target": TARGET, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
