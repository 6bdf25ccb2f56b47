"""The pause of training for a checkpoint, compared with the time until the checkpoint is on disk, on one CPU.

    python bench/checkpoint.py [--rounds 5]

`stall_vs_save` (<= 0.25): seconds of `save`, over the seconds until `finish_save` returns the checkpoint while nothing else runs, which
would be the pause if training waited for the write; median over rounds. `stall_seconds` and `save_seconds` are the two times.
`iteration_beside_write`: seconds of an iteration during the write of a checkpoint, over those of an iteration alone; the writer shares the
machine's cores. The learner is the real one (`RunEngine`), case `layers` of bench/memory.py.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memory import batch_of, config_of, save_model

CASE = "layers"
TARGET = {"stall_vs_save": 0.25}


def seconds(work: Callable[[], Any]) -> float:
    """How long `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(engine: Any, config: Any, rounds: int) -> dict[str, float]:
    """Returns the medians over all rounds. A round saves twice: once alone, and once during an iteration."""
    stalls, saves, alone, beside = list[float](), list[float](), list[float](), list[float]()
    version = 0

    def train() -> None:
        nonlocal version
        version += 1
        engine.train(batch_of(config, version))

    def save() -> None:
        engine.save(written, version, {})

    train()  # the optimizer's moments exist from now on
    written = engine.write(0, version, 1)
    save()
    engine.finish_save(wait=True)
    for number in range(rounds):
        alone.append(seconds(train))
        written = engine.write(0, version, 1)
        stall = seconds(save)
        saves.append(stall + seconds(lambda: engine.finish_save(wait=True)))
        stalls.append(stall)
        train()
        written = engine.write(0, version, 1)
        save()
        beside.append(seconds(train))
        engine.finish_save(wait=True)
        print(
            f"round {number + 1}: stall {stall:.3f} s, save {saves[-1]:.3f} s, iteration {alone[-1]:.2f} s, {beside[-1]:.2f} s",
            flush=True,
        )
    ratio = statistics.median
    return {
        "stall_vs_save": ratio([stall / save for stall, save in zip(stalls, saves, strict=True)]),
        "stall_seconds": ratio(stalls),
        "save_seconds": ratio(saves),
        "iteration_beside_write": ratio([there / here for there, here in zip(beside, alone, strict=True)]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    from polyreme_trainer.learner.leader import Ranks
    from polyreme_trainer.megatron.device import Device
    from polyreme_trainer.megatron.models.build import close_parallel, init_parallel
    from polyreme_trainer.megatron.run_engine import RunEngine

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        save_model(CASE, path)
        config = config_of(CASE, path).model_copy(update={"groups_per_iteration": 1, "group_size": 2})
        device = Device("cpu")
        device.seed(0)
        init_parallel(config.trainer.parallel, device)
        ranks = Ranks()
        files = {"config.json": (path / "config.json").read_bytes()}
        engine = RunEngine(config, files, f"bench-checkpoint-{uuid.uuid4().hex[:8]}", ranks, device)
        try:
            engine.begin_iterations()
            if engine.algorithm.needs.reference:
                engine.make_reference(path)
            engine.save(engine.write(0, 0, 1), 0, {})
            engine.finish_save(wait=True)
            measured = measure(engine, config, rounds)
        finally:
            engine.close()
        ranks.close()
        close_parallel()
    met = measured["stall_vs_save"] <= TARGET["stall_vs_save"]
    print(
        json.dumps(
            {"bench": "checkpoint", "measured": {k: round(v, 3) for k, v in measured.items()}, "target": TARGET, "met": met}
        )
    )
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
