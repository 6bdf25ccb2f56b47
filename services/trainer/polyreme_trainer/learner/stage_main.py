"""One rank of a stage, under torchrun's contract: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

POLYREME_RUN_DIR names the run directory, whose config.yaml has everything else.

Invariant: SIGTERM requests a save and an exit. The ranks agree on it between two steps, so no rank exits alone.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from polyreme.errors import ConfigError
from polyreme.experience.loading import reports_to, unreported
from polyreme.process import logging_setup
from polyreme.process.lifecycle import exit_on_error
from polyreme.process.machine import memory_limit
from polyreme.rundir.input_files import read_model_files
from polyreme.rundir.run_directory import read_run_file, read_stage_config
from polyreme_trainer.data.template import Template
from polyreme_trainer.learner.leader import LeaderError, Ranks
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.models.build import close_parallel, init_parallel
from polyreme_trainer.megatron.parallel.channel import BroadcastChannel
from polyreme_trainer.megatron.stage_engine import MegatronStageEngine
from polyreme_trainer.memory.memory_estimate import announce
from polyreme_trainer.observe.stage_records import StageRecorder
from polyreme_trainer.stages.loop import StageLoop
from polyreme_trainer.stages.table import TABLE

logger = logging.getLogger(__name__)


class DrainRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.made = False
        signal.signal(signal.SIGTERM, self._make)

    def _make(self, number: int, frame: FrameType | None) -> None:
        self.made = True


def run_stage(run_dir: Path, ranks: Ranks, device: Device, drains: Callable[[], bool]) -> bool:
    """Runs one rank of a stage to the stage's end, or until it drains. Returns whether it is complete.

    Args:
        ranks, device: the ranks of this stage, and this rank's device. Requires `init_parallel`.
        drains: whether the stage should stop; called on rank 0.

    Raises:
        PolyremeError: the stage cannot continue.
    """
    config, run = read_stage_config(run_dir), read_run_file(run_dir)
    if run is None:
        raise ConfigError(f"a run in {run_dir}", "no run.json", f"Start it with `polyreme {config.stage}`.")
    files = read_model_files(config.model.path)
    template, stage = Template(files, config.data), TABLE[config.stage]
    device.seed(config.seed)
    objective, reference = stage.objective(config), stage.reference(config)
    recorder: Any = closing(StageRecorder(run_dir, run.run_id)) if ranks.leads else nullcontext()
    with recorder as records:
        emit = records.emit if ranks.leads else no_records
        loads = reports_to(lambda record: asyncio.run(emit(record))) if ranks.leads else unreported
        with closing(
            MegatronStageEngine(config, objective.head, reference, files, template.stop_ids, ranks, device, loads)
        ) as engine:
            return StageLoop(config, template, stage, objective, engine, ranks, emit, drains).run()


async def no_records(record: Any) -> None:
    raise AssertionError("only rank 0 writes records")


def main() -> None:
    request = DrainRequest()
    rank, local_rank, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    run_dir = Path(os.environ["POLYREME_RUN_DIR"])
    logging_setup.setup(f"learner-{rank}")
    with exit_on_error("learner"):
        config = read_stage_config(run_dir)
        device = Device(config.device, local_rank, config.trainer.parallel.threads)
        announce(config, device.memory(), memory_limit(), rank)
        init_parallel(config.trainer.parallel, device)
        ranks = Ranks(rank, BroadcastChannel(device.torch) if world > 1 else None)
        try:
            if not run_stage(run_dir, ranks, device, lambda: request.made):
                logger.info("stopped and saved")
        except LeaderError as error:
            logger.info("rank 0 failed: %s", error.found)
            sys.exit(error.exit_code)
        ranks.close()
        close_parallel()


if __name__ == "__main__":
    main()
