"""One rank of the learner of a run or stage, with torchrun's environment: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

POLYREME_REDIS and POLYREME_RUN name a run; its record has everything else. POLYREME_RUN_DIR names the run directory of a stage,
with its config.yaml and run.json. A rank that torchrun's agent started dies with the agent. SIGTERM asks a stage to save and to
end: the ranks agree on it between two steps, so no rank ends alone.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.errors import ConfigError
from polyreme.experience.listing import attached
from polyreme.experience.loading import reports_to, unreported
from polyreme.experience.metric_records import MetricRecord
from polyreme.experience.store import RECONNECT_TIMEOUT
from polyreme.process import logging_setup
from polyreme.process.lifecycle import die_with_parent, exit_on_error, freeze_gc
from polyreme.process.machine import memory_limit
from polyreme.process.prompt_exit import prompt_exit
from polyreme.process.quick_imports import quick_imports
from polyreme.rundir.input_files import read_model_files
from polyreme.rundir.run_directory import read_run_file, read_stage_config
from polyreme_trainer.data.template import Template
from polyreme_trainer.learner.device_turns import LearnerTurns
from polyreme_trainer.learner.leader import AGENT_PID, LeaderError, Ranks
from polyreme_trainer.learner.loop import Learner
from polyreme_trainer.learner.run_client import ATTACH_SECONDS, DrainError, reports_to_run
from polyreme_trainer.memory.memory_estimate import announce
from polyreme_trainer.observe.records import Recorder
from polyreme_trainer.observe.resource_use import StageUse
from polyreme_trainer.stages import program
from polyreme_trainer.stages.program import StageLog
from polyreme_trainer.stages.table import TABLE

with quick_imports():
    from polyreme_trainer.megatron.device import Device
    from polyreme_trainer.megatron.models.build import close_parallel, init_parallel
    from polyreme_trainer.megatron.parallel.channel import BroadcastChannel
    from polyreme_trainer.megatron.run_engine import RunEngine
    from polyreme_trainer.megatron.stage_engine import MegatronStageEngine

logger = logging.getLogger(__name__)


async def read_run(redis_url: str, run_id: str) -> tuple[RunConfig, dict[str, bytes]]:
    """The run's configuration and the model's small files."""
    async with attached(redis_url, run_id, ATTACH_SECONDS, RECONNECT_TIMEOUT) as run:
        return await run.config(), await run.model_files()


@contextmanager
def joined(config: RunConfig | StageConfig, rank: int) -> Iterator[tuple[Ranks, Device]]:
    """The ranks and this rank's device, until the block ends. Ends the process when rank 0 has failed."""
    device = Device(config.device, int(os.environ["LOCAL_RANK"]), config.trainer.parallel.threads)
    announce(config, device.memory(), memory_limit(), rank)
    init_parallel(config.trainer.parallel, device)
    ranks = Ranks(rank, BroadcastChannel(device.torch) if int(os.environ["WORLD_SIZE"]) > 1 else None)
    try:
        yield ranks, device
    except LeaderError as error:
        logger.info("rank 0 ended: %s", error.found)
        sys.exit(error.exit_code)
    ranks.close()
    close_parallel()


def run_iterations(kind: type[Learner], rank: int, redis_url: str, run_id: str) -> None:
    """Runs one rank of a run's learner to the run's end, or until it drains. Raises PolyremeError."""
    config, files = asyncio.run(read_run(redis_url, run_id))
    with joined(config, rank) as (ranks, device):
        device.seed(config.seed)
        try:
            with LearnerTurns(config, redis_url, run_id, ranks) as turns:
                turns.take()  # before anything is allocated on them
                loads = reports_to_run(redis_url, run_id) if ranks.leads else unreported
                with closing(RunEngine(config, files, run_id, ranks, device, loads)) as engine:
                    kind(config, files, engine, redis_url, run_id, ranks, turns).run()
        except DrainError as stopped:
            logger.info("%s", stopped)


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
    head, reference = stage.objective(config).head, stage.reference(config)
    with closing(Recorder.open(run_dir, run.run_id)) if ranks.leads else nullcontext() as recorder:
        write, loads = (no_record, unreported) if recorder is None else (with_use(recorder), reports_to(recorder.add))
        with closing(MegatronStageEngine(config, head, reference, files, template.stop_ids, ranks, device, loads)) as engine:
            return program.run_stage(config, template, stage, engine, ranks, StageLog(ranks, write, drains))


def with_use(recorder: Recorder) -> Callable[[MetricRecord], None]:
    """Writes records, with what the stage's ranks used."""
    use = StageUse(os.getppid())
    return lambda record: recorder.add(use.added(record))


def no_record(record: MetricRecord) -> None:
    """Only rank 0 writes records."""
    raise AssertionError(f"rank 0 to write the record {record}")


def main(kind: type[Learner] = Learner) -> None:
    """Runs this process's rank of a stage, or of a learner of class `kind`."""
    freeze_gc(collect=False)  # no collection looks at the modules
    if agent := os.environ.get(AGENT_PID):
        die_with_parent(int(agent))
    rank, run_dir = int(os.environ["RANK"]), os.environ.get("POLYREME_RUN_DIR")
    stopped = list[int]()
    if run_dir:
        signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    logging_setup.setup(f"learner-{rank}")
    with exit_on_error("learner"):
        if not run_dir:
            run_iterations(kind, rank, os.environ["POLYREME_REDIS"], os.environ["POLYREME_RUN"])
            return
        with joined(read_stage_config(Path(run_dir)), rank) as (ranks, device):
            if not run_stage(Path(run_dir), ranks, device, lambda: bool(stopped)):
                logger.info("stopped and saved")


if __name__ == "__main__":
    with prompt_exit():
        main()
