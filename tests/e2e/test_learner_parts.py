"""A learner on two machines, each of which writes, seals and serves its part of every version, and vLLM on a third machine.

Everything is started by the commands of the guide. Each version that the replica serves passes the canary: the replica's log-probabilities of
fixed tokens equal those of the learner, so it has all parts of one version.
"""

import asyncio
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml
from safetensors.torch import load_file

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.api.v1 import weights_pb2_grpc
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run, RunState
from polyreme.experience.store import connect
from polyreme.net import rpc
from polyreme.process.lifecycle import Child
from support.guide import ROOT, blocks
from support.machines import Machine, Network, redis_on
from support.models import tiny_family_model
from support.whole_run import make_task

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(1800)]

SECONDS = 600.0  # for one step of a run, on a slow and loaded machine
SLOW_LINK, SMALL_BURST = "1mbit", "32kb"
"""Of a link on which a part takes seconds."""
CANARY_LIMIT = 1e-3
DOCUMENTED_REDIS = "redis://10.0.0.1:6379/0"
TOKEN = "s3cret-token"
ESTABLISHED = "01"


def documented() -> dict[str, list[str]]:
    """The commands of the guide for a learner on several machines, by name."""
    [block] = [each for each in blocks(ROOT / "docs" / "machines.md") if "pipeline: 2" in each.text]
    found = [shlex.split(line) for line in block.text.splitlines() if line.startswith("polyreme ")]
    return {words[1]: words for words in found}


def make_small_task(folder: Path) -> None:
    """`make_task` with a shorter warm start: rewards must differ, but need not rise."""
    path = make_task(folder)
    tree = yaml.safe_load(path.read_text())
    tree["trainer"]["sft"][0]["steps"] = 20
    path.write_text(yaml.safe_dump(tree))


@dataclass
class Started:
    """A run on three machines: node 0 of the learner with Redis and the reward, node 1, and a replica."""

    folder: Path
    url: str
    trainer: Machine
    other: Machine
    far: Machine
    children: dict[str, Child] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)

    def start(self, name: str, machine: Machine, *options: str) -> None:
        """Starts the guide's command of this name."""
        environment = {"OMP_NUM_THREADS": "1", "POLYREME_TOKEN": TOKEN}
        values = {DOCUMENTED_REDIS: self.url, "run.yaml": str(self.folder / "run.yaml")}
        argv = [values.get(word, word) for word in documented()[name]]
        command = machine.command((sys.executable, "-m", *argv, *options))
        path = self.folder / f"{name}-{next(self.numbers)}.log"
        self.children[name] = Child.spawn(name, command, environment, path, signal.SIGTERM)

    def begin(self, iterations: int, *options: str) -> None:
        """Starts everything but node 1."""
        self.start("rollout", self.far)
        self.start("reward", self.trainer)
        smaller = (f"iterations={iterations}", "trainer.save_interval=1", "eval_samples=8")
        self.start("train", self.trainer, *smaller, *options)

    def join(self) -> None:
        self.start("learner", self.other)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "run"

    def records(self, kind: str) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [record for line in lines if line.endswith(b"\n") if (record := json.loads(line))["kind"] == kind]

    def part_address(self) -> tuple[str, int]:
        """Where the newest ranks of node 1 serve their part."""
        logs = sorted(self.run_dir.glob("logs/*/learner-node-1.log"))
        found = re.findall(rf"serving part 1 of the weights at ({re.escape(self.other.address)}):(\d+)", logs[-1].read_text())
        return found[-1][0], int(found[-1][1])

    def fetching(self, port: int) -> bool:
        """Whether the replica has a connection to node 1's part server. It has one only during a fetch."""
        tables = Path(f"/proc/{self.children['learner'].pid}/net")
        rows = [line.split() for name in ("tcp", "tcp6") for line in (tables / name).read_text().splitlines()[1:]]
        return any(row[1].endswith(f":{port:04X}") and row[3] == ESTABLISHED for row in rows)

    def rank(self, rank: int) -> psutil.Process:
        """The rank's process."""
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            if environment.get("RANK") == str(rank) and environment.get("POLYREME_REDIS") == self.url:
                return process
        raise AssertionError(f"no process of rank {rank}")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition during the run. Polls slowly, since the run needs the processors."""
        try:
            async with asyncio.timeout(SECONDS):
                while not condition():
                    assert self.children["train"].poll() is None, self.logs()
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(self.logs()) from None

    async def ended(self) -> None:
        """Waits for the run's end and the end of its processes on all machines."""
        for name in ("train", "learner", "rollout", "reward"):
            assert await self.children[name].gone(SECONDS), f"{name}\n{self.logs()}"
        assert [self.children[name].poll() for name in ("train", "learner")] == [0, 0], self.logs()

    def logs(self) -> str:
        files = [*sorted(self.folder.glob("*.log")), *sorted(self.run_dir.glob("logs/*/*.log"))]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


@asynccontextmanager
async def started(net: Network, folder: Path) -> AsyncIterator[Started]:
    trainer, other, far = (net.add() for _ in range(3))
    async with redis_on(trainer, folder) as url:
        made = Started(folder, url, trainer, other, far)
        try:
            yield made
        finally:
            await asyncio.gather(*(child.stop(30) for child in made.children.values()))


async def check(run: Started, iterations: int) -> None:
    """The run is done and trained every group once; every version reached the replica from both machines, and passed the canary."""
    redis = await connect(run.url)
    try:
        found = await Run.attach(redis, None, 5)
        assert await found.state() == (RunState.DONE, ""), run.logs()
        assert (await ExperienceLog(found).audit()).clean
    finally:
        await redis.aclose()
    assert sorted({record["iteration"] for record in run.records("iteration")}) == [*range(1, iterations + 1)]
    commits = run.records("commit")
    assert {commit["version"] for commit in commits} == {*range(iterations + 1)}
    nbytes = sum(
        tensor.nbytes for tensor in load_file(run.run_dir / "hf" / f"iteration-{iterations:06d}" / "model.safetensors").values()
    )
    assert commits[0]["bytes"] >= nbytes
    for commit in commits:
        assert commit["path"] in ("stream", "delta") and commit["canary_difference"] < CANARY_LIMIT, commit


async def test_stages_on_two_machines_serve_their_parts_and_a_killed_part_is_pushed_again(net: Network, tmp_path: Path) -> None:
    make_small_task(tmp_path)
    async with started(net, tmp_path) as run:
        run.begin(3, "weights.anchor_interval=1")  # whole parts, which take long enough to be cut off
        await run.until(lambda: any("waits for machine 1" in record["text"] for record in run.records("notice")))
        run.join()
        await run.until(lambda: any(commit["version"] == 1 for commit in run.records("commit")))

        host, port = run.part_address()
        async with rpc.connect(f"{host}:{port}") as channel:  # without the token
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in weights_pb2_grpc.WeightsServiceStub(channel).Fetch(pb.FetchRequest(part=1), timeout=60):
                    raise AssertionError("bytes were sent")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

        run.other.shape(SLOW_LINK, SMALL_BURST)
        await run.until(lambda: run.fetching(port))
        os.kill(run.rank(1).pid, signal.SIGKILL)
        committed = len(run.records("commit"))
        run.other.shape()
        await run.until(lambda: len(run.records("commit")) > committed)
        assert run.part_address() != (host, port)
        await run.ended()
        await check(run, 3)
        assert any("learner" in record["process"] for record in run.records("restart"))


async def test_experts_on_two_machines_serve_their_parts_and_a_run_is_resumed(net: Network, tmp_path: Path) -> None:
    make_small_task(tmp_path)
    model = tmp_path / "model"
    sizes = json.loads((model / "config.json").read_text())
    fields = {name: sizes[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    experts = {"num_experts": 4, "moe_intermediate_size": 64, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 256}
    tiny_family_model("qwen3_moe", model, **fields, **experts)
    layout = "trainer.parallel={tensor: 1, data: 2, expert: 2, nodes: 2}"
    async with started(net, tmp_path) as run:
        for iterations, options in ((2, []), (3, ["--resume"])):
            run.begin(iterations, layout, *options)
            run.join()
            await run.ended()
            await check(run, iterations)
