"""`python -m support.mortal_learner`: a learner with one or more ranks that kills itself at given points.

The learner, its log, arena, publisher and checkpoints are real. There are no replicas, so there is no start gate, and the publisher pushes
to none. One process imports torch once and forks for every life, so that a life takes a second. It reads lives (one JSON object per line)
from standard input, and answers each with its exit status.
"""

import functools
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from polyreme.config.run import RunConfig
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.metric_records import DoneLearning
from polyreme.process import logging_setup
from polyreme.process.lifecycle import die_with_parent
from polyreme.weights.arena import Arena
from polyreme_trainer.learner.device_turns import LearnerTurns
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.learner.loop import Learner
from polyreme_trainer.megatron import atomic
from polyreme_trainer.megatron.checkpoints import checkpoint, checkpoint_writer
from polyreme_trainer.megatron.checkpoints.checkpoint_writer import BackgroundWork
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.models.build import close_parallel, init_parallel
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.parallel.channel import BroadcastChannel
from polyreme_trainer.megatron.run_engine import RunEngine
from polyreme_trainer.megatron.training.optimizer import Optimizer
from polyreme_trainer.weight_sync.publisher import Publisher


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def torn_checkpoint(_: Any, stream: Any) -> None:
    """Truncates a file, as a crash during its write would."""
    stream.flush()
    os.truncate(stream.fileno(), os.fstat(stream.fileno()).st_size // 2)


def torn_directory(path: Path) -> None:
    """Simulates a partial removal of a directory."""
    if path.exists() and (files := sorted(file for file in path.rglob("*") if file.is_file())):
        files[0].unlink()
        die()


BESIDE = "weights stepped beside a write"
"""The moment of an optimizer step during a save."""

Moment = tuple[Any, str, str, Callable[..., None] | None]
MOMENTS: dict[str, Moment] = {
    # name: owner, function, before or after it, and an additional effect
    "plan asked": (ExperienceLog, "wait_plan", "before", None),
    "plan made": (ExperienceLog, "wait_plan", "after", None),
    "gradients summed": (Optimizer, "step", "before", None),
    "weights stepped": (Optimizer, "step", "after", None),
    "arena slot begun": (Arena, "begin", "after", None),
    "arena slot written": (Policy, "write_slices", "after", None),
    "arena slot complete": (Arena, "complete", "after", None),
    "version set, not pushed": (ExperienceLog, "set_version", "after", None),
    "version pushed": (Publisher, "publish", "after", None),
    "export written": (checkpoint_writer, "export_hf", "after", None),
    "checkpoint half written": (torch, "save", "after", torn_checkpoint),
    "checkpoint named": (atomic, "publish", "after", None),
    "old checkpoint half removed": (atomic, "discard", "before", torn_directory),
    "release asked": (ExperienceLog, "release", "before", None),
    "released": (ExperienceLog, "release", "after", None),
    "state copied": (checkpoint.RankContents, "copied", "after", None),
    "files written": (checkpoint, "write", "after", None),
    BESIDE: (Optimizer, "step", "after", None),
}


class HeldWork(BackgroundWork[Any]):
    """A save that is written only when training waits for it."""

    newest: ClassVar["HeldWork | None"] = None

    def __init__(self, *args: Any) -> None:
        self.waited_for = threading.Event()
        HeldWork.newest = self
        super().__init__(*args)

    def _run(self) -> None:
        self.waited_for.wait()
        super()._run()

    def finished(self, seconds: float = 0.0) -> bool:
        if seconds:
            self.waited_for.set()
        return super().finished(seconds)


def arm(moment: str, occurrence: int) -> None:
    """Kills this process at the n-th occurrence of a moment."""
    owner, name, when, also = MOMENTS[moment]
    real, count = getattr(owner, name), 0

    if moment == BESIDE:
        vars(checkpoint_writer)["BackgroundWork"] = HeldWork

    def reached(*args: Any) -> None:
        nonlocal count
        if moment == BESIDE and (HeldWork.newest is None or HeldWork.newest.waited_for.is_set()):
            return
        count += 1
        if count >= occurrence:
            if also is not None:
                also(*args)
            if also is not torn_directory:
                die()

    if inspect.iscoroutinefunction(real):

        @functools.wraps(real)
        async def mortal_async(*args: Any, **options: Any) -> Any:
            if when == "before":
                reached(*args)
            result = await real(*args, **options)
            if when == "after":
                reached(*args)
            return result

        setattr(owner, name, mortal_async)
        return

    @functools.wraps(real)
    def mortal(*args: Any, **options: Any) -> Any:
        if when == "before":
            reached(*args)
        result = real(*args, **options)
        if when == "after":
            reached(*args)
        return result

    setattr(owner, name, mortal)


class AloneLearner(Learner):
    """A learner without replicas, so it has no start gate and no final wait."""

    def compare_replicas(self) -> None:
        pass

    async def finish(self) -> None:
        await self.client.run.emit(DoneLearning())


def live(life: dict[str, Any], rank: int, world: int) -> None:
    """Runs one rank's life to its regular end or to a given moment: {moment, occurrence}, or {after: seconds}.

    Only the ranks in `mortal` die at that moment; by default all.
    """
    output = os.open(life["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    logging_setup.setup(f"learner-{rank}")
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(life["port"]),
    }
    if rank not in life.get("mortal", range(world)):
        pass
    elif "moment" in life:
        arm(life["moment"], life["occurrence"])
    elif "after" in life:
        timer = threading.Timer(life["after"], die)
        timer.daemon = True
        timer.start()
    config = RunConfig.model_validate_json(life["config"])
    files = {file.name: file.read_bytes() for file in config.model.path.iterdir() if file.suffix != ".safetensors"}
    device = Device("cpu")
    device.seed(config.seed)
    init_parallel(config.trainer.parallel, device)
    ranks = Ranks(rank, BroadcastChannel(device.torch) if world > 1 else None)
    engine = RunEngine(config, files, life["run_id"], ranks, device)
    there = life["redis_url"], life["run_id"]
    with LearnerTurns(config, *there, ranks) as turns:
        AloneLearner(config, files, engine, *there, ranks, turns).run()
    ranks.close()
    close_parallel()


def main() -> None:
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401 (a life must not spend its time on it)

    parent = os.getpid()
    print("ready", flush=True)
    for line in sys.stdin:
        life = json.loads(line)
        world = RunConfig.model_validate_json(life["config"]).trainer.parallel.world_size
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    die_with_parent(parent)
                    live(life, rank, world)
                    status = 0
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        print(outcome(children), flush=True)


def outcome(ranks: list[int]) -> int:
    """Waits for all ranks. When one fails, the others are killed, as by the supervisor. Returns 0, or the lowest failed status."""
    codes: list[int] = []
    while ranks:
        pid, status = os.waitpid(-1, 0)
        ranks.remove(pid)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1] == 0:
            continue
        for other in ranks:
            ended, status = os.waitpid(other, os.WNOHANG)
            if ended:
                codes.append(os.waitstatus_to_exitcode(status))
            else:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
        break
    return min(codes)


if __name__ == "__main__":
    main()
