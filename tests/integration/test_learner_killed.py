"""A learner that is killed at any point and restarted produces the same bits as an uninterrupted one.

The test fills the log like an orchestrator: it admits groups within the bound and appends them at once. The content of a group follows from
its index, so every run of one mode has the same log.
"""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from redis.asyncio import Redis

from polyreme.config.model import ModelConfig
from polyreme.config.recipes.algorithm import AlgorithmConfig
from polyreme.config.run import RunConfig
from polyreme.config.trainer import CriticConfig, ParallelConfig
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run, RunState
from support.configs import algorithm, run_config
from support.filled_log import fill
from support.models import tiny_model
from support.mortal_learner import BESIDE, MOMENTS
from support.tiny_tokenizer import model_files

pytestmark = pytest.mark.real

SEEDS = 20
PPO_SEEDS = (3, 10)  # two moments: stepped weights that are not written anywhere, and a torn checkpoint
ITERATIONS, GROUPS, SAMPLES, SAVE_INTERVAL = 6, 4, 4, 2
PER_SAVE = (
    "export written",
    "checkpoint half written",
    "checkpoint named",
    "old checkpoint half removed",
    "release asked",
    "released",
    "state copied",
    "files written",
    BESIDE,
)
OF_EVERY_RANK = ("gradients summed", "weights stepped", "checkpoint half written", "files written", BESIDE)
ALONE = ParallelConfig()
LIFE_SECONDS = 600.0
OF_TIME = (
    "time",
    "timing/",
    "e2e_tps",
    "update_tps",
    "vllm_tps",
    "tokens_per_second",
    "samples_per_second",
    "alarms",
    "staleness/",
    "mismatch_kl",
)
PPO_WITH_STATE = {
    "preset": "ppo",
    "minibatches": 2,
    "kl": {"adaptive": {"target": 0.5, "horizon": 100}, "renew_interval": 3},
    "shaping": {"normalise": True},
}


@pytest.fixture(scope="module")
def nursery() -> Iterator["Nursery"]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-m", "support.mortal_learner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )  # fmt: skip
    with process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield Nursery(process)
        process.stdin.close()
        process.wait(LIFE_SECONDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model("tied", tmp_path_factory.mktemp("model"))
    for name, content in model_files().items():
        if name != "config.json":
            (path / name).write_bytes(content)
    return path


@dataclass
class Nursery:
    process: "subprocess.Popen[str]"

    async def life(self, **told: Any) -> int:
        """Lives one life; its exit status, negative when a signal ended it."""

        def live() -> int:
            assert self.process.stdin is not None and self.process.stdout is not None
            print(json.dumps(told), file=self.process.stdin, flush=True)
            return int(self.process.stdout.readline())

        return await asyncio.wait_for(asyncio.to_thread(live), LIFE_SECONDS)


@dataclass
class World:
    """A run with a log that is being filled."""

    nursery: Nursery
    redis_url: str
    run: Run
    config: RunConfig
    folder: Path
    lags: list[int] = field(default_factory=list)

    async def live(self, **end: Any) -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return await self.nursery.life(
            config=self.config.model_dump_json(), redis_url=self.redis_url, run_id=self.run.run_id, port=port,
            log=str(self.folder / "learner.log"), **end,
        )  # fmt: skip

    async def measured(self) -> dict[int, dict[str, Any]]:
        """The metrics of each iteration, without times and values that depend on the time of admission. Repetitions must have the same
        ones."""
        found: dict[int, dict[str, Any]] = {}
        for _, record in await self.run.records("0", 0):
            if record["kind"] == "iteration":
                kept = {name: value for name, value in record.items() if not name.startswith(OF_TIME)}
                assert found.setdefault(record["iteration"], kept) == kept
        return found

    async def plans(self) -> list[Any]:
        return [await ExperienceLog(self.run).find_plan(iteration) for iteration in range(1, ITERATIONS + 1)]

    def made(self) -> dict[str, Any]:
        """The last checkpoint's weights, moments, random states and facts, and all exported weights."""
        path = self.config.run_dir / "checkpoints" / f"iteration-{ITERATIONS:06d}"
        export = self.config.run_dir / "hf" / f"iteration-{ITERATIONS:06d}"
        facts = json.loads((path / "checkpoint.json").read_text())["facts"]
        return {
            "export": {str(file.relative_to(export)): file.read_bytes() for file in sorted(export.rglob("*.safetensors"))},
            "facts": {name: facts[name] for name in ("version", "algorithm", "reference", "pass_rates")},
            "state": [torch.load(file, weights_only=True) for file in sorted(path.glob("state-*.pt"))],
            "random": [file.read_bytes() for file in sorted(path.glob("rng-*.pt"))],
        }


Worlds = Callable[[str, int, ParallelConfig, str], AbstractAsyncContextManager[World]]


@pytest.fixture
def world(nursery: "Nursery", redis_url: str, redis: Redis, run_id: str, tmp_path: Path, model: Path) -> Worlds:
    """`async with world(name, max_staleness, layout, preset)` provides a separate run."""

    @asynccontextmanager
    async def world(name: str, staleness: int, parallel: ParallelConfig, preset: str) -> AsyncIterator[World]:
        folder = tmp_path / name
        os.mkdir(folder)
        config = config_of(folder, model, staleness, parallel, preset)
        run = await Run.create(redis, f"{run_id}-{name}", config, {"config.json": (model / "config.json").read_bytes()})
        made = World(nursery, redis_url, run, config, folder)
        filling = asyncio.create_task(fill(run, GROUPS, SAMPLES, made.lags, episodes=preset == "ppo"))
        try:
            yield made
            assert not filling.done(), filling.exception()
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)

    return world


def config_of(folder: Path, model: Path, staleness: int, parallel: ParallelConfig, preset: str) -> RunConfig:
    """GRPO, or PPO with every part that has state: critic, controller, normalisation, renewed reference, moving average, mixed rows."""
    base = run_config(folder, iterations=ITERATIONS, groups_per_iteration=GROUPS, group_size=SAMPLES, max_staleness=staleness)
    changes: dict[str, Any] = {"save_interval": SAVE_INTERVAL, "parallel": parallel}
    section = algorithm(minibatches=2)
    if preset == "ppo":
        rows = [{"prompt": f"{number}+1=", "response": f"{number + 1}"} for number in range(9)]
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        changes |= {"critic": CriticConfig(warmup_iterations=1), "ema_decay": 0.9}
        ptx = {"data": folder / "rows.jsonl", "coef": 0.1, "batch_size": 2}
        section = AlgorithmConfig.model_validate({**PPO_WITH_STATE, "ptx": ptx})
    trainer = base.trainer.model_copy(update=changes)
    return base.model_copy(update={"model": ModelConfig(path=model), "trainer": trainer, "algorithm": section})


def deaths(seed: int, ranks: int = 1) -> list[dict[str, Any]]:
    """Draws one to three deaths. The first one covers all moments over the seeds; later ones may be at any time, or never occur.

    Of several ranks, one or all die. At a moment that only rank 0 has, rank 0 dies.
    """
    rng = random.Random(seed)

    def who(moment: str | None) -> dict[str, Any]:
        own = moment is not None and moment not in OF_EVERY_RANK
        return {} if ranks == 1 else {"mortal": [0] if own else rng.choice([*([rank] for rank in range(ranks)), [*range(ranks)]])}

    def at(moment: str) -> dict[str, Any]:
        return {"moment": moment, "occurrence": rng.randint(1, 3 if moment in PER_SAVE else ITERATIONS), **who(moment)}

    first = list(MOMENTS if ranks == 1 else OF_EVERY_RANK)
    chosen = [at(first[seed % len(first)])]
    for _ in range(rng.randint(0, 2)):
        chosen.append(rng.choice([at(rng.choice(list(MOMENTS))), {"after": rng.uniform(0.3, 1.5), **who(None)}]))
    return chosen


def told(end: dict[str, Any]) -> str:
    when = f"{end['moment']} x{end['occurrence']}" if "moment" in end else f"after {end['after']:.2f} s"
    return when + (f" (ranks {end['mortal']})" if "mortal" in end else "")


async def one_run(made: World, ends: list[dict[str, Any]]) -> int:
    """Runs until the last iteration. Returns how many lives were cut short."""
    cut = 0
    for end in [*ends, {}]:
        status = await made.live(**end)
        if status == 0:
            break
        assert status == -9, (made.folder / "learner.log").read_text()[-4000:]
        cut += 1
    assert status == 0, (made.folder / "learner.log").read_text()[-4000:]
    return cut


async def compare(
    world: Worlds, staleness: int, seeds: Iterable[int], parallel: ParallelConfig = ALONE, preset: str = "grpo"
) -> list[tuple[int, str, int]]:
    """Compares the bits of an uninterrupted run with those of killed ones, per seed. Yields (seed, its deaths, lives cut short)."""
    async with world("whole", staleness, parallel, preset) as whole:
        assert await one_run(whole, []) == 0
        expected, plans, measured = whole.made(), await whole.plans(), await whole.measured()
        assert max(whole.lags) == staleness and None not in plans
    rows = []
    for seed in seeds:
        ends = deaths(seed, parallel.world_size)
        async with world(f"seed-{seed}", staleness, parallel, preset) as made:
            cut = await one_run(made, ends)
            assert await made.plans() == plans
            assert (await ExperienceLog(made.run).audit()).clean
            assert (await made.run.state())[0] is RunState.RUNNING
            found = made.made()
            assert await made.measured() == measured, told(ends[0])
        assert cut, f"{told(ends[0])} never came"
        assert (found["export"], found["facts"]) == (expected["export"], expected["facts"]), told(ends[0])
        torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)
        assert found["random"] == expected["random"], told(ends[0])
        rows.append((seed, "; ".join(map(told, ends)), cut))
    return rows


@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_killed_learner_arrives_at_the_same_bits(world: Worlds, staleness: int) -> None:
    await compare(world, staleness, (6, list(MOMENTS).index(BESIDE)) if staleness else (0, 1))


async def test_a_killed_ppo_arrives_at_the_same_bits(world: Worlds) -> None:
    """On episodes with rewards of turns. This includes critic, KL controller, normalisation, renewed reference, moving average, mixed
    rows and pass rates."""
    await compare(world, 0, PPO_SEEDS, preset="ppo")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("preset", "staleness"), [("grpo", 0), ("grpo", 2), ("ppo", 0), ("ppo", 2)])
async def test_twenty_seeds_of_kills(world: Worlds, preset: str, staleness: int) -> None:
    rows = await compare(world, staleness, range(SEEDS), preset=preset)
    print(f"\n{preset}, max_staleness {staleness}: {ITERATIONS} iterations, saved every {SAVE_INTERVAL}; same bits for")
    for seed, ends, cut in rows:
        print(f"  seed {seed:>2}  {cut} of its lives cut short  killed at: {ends}")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [ParallelConfig(tensor=2), ParallelConfig(data=2)], ids=["tensor", "data"])
async def test_two_ranks_of_which_one_is_killed_or_both(world: Worlds, parallel: ParallelConfig) -> None:
    for seed, ends, cut in await compare(world, 0, range(5), parallel):
        print(f"  seed {seed:>2}  {cut} of its lives cut short  killed at: {ends}")
