"""One rank of the learner, with torchrun's environment: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

POLYREME_REDIS and POLYREME_RUN name the run; its record has everything else. A rank that torchrun's agent started dies with the agent.
"""

import asyncio
import logging
import os
import sys
from contextlib import closing

from polyreme.config.run import RunConfig
from polyreme.experience.loading import unreported
from polyreme.experience.run import Run
from polyreme.experience.store import RECONNECT_TIMEOUT, connect
from polyreme.process import logging_setup
from polyreme.process.lifecycle import die_with_parent, exit_on_error
from polyreme.process.machine import memory_limit
from polyreme_trainer.learner.device_turns import LearnerTurns
from polyreme_trainer.learner.leader import AGENT_PID, LeaderError, Ranks
from polyreme_trainer.learner.loading import reports_to_run
from polyreme_trainer.learner.loop import Learner
from polyreme_trainer.learner.run_client import ATTACH_SECONDS, DrainError
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.models.build import close_parallel, init_parallel
from polyreme_trainer.megatron.parallel.channel import BroadcastChannel
from polyreme_trainer.megatron.run_engine import RunEngine
from polyreme_trainer.memory.memory_estimate import announce

logger = logging.getLogger(__name__)


async def read_run(redis_url: str, run_id: str) -> tuple[RunConfig, dict[str, bytes]]:
    """The run's configuration and the model's small files."""
    redis = await connect(redis_url, RECONNECT_TIMEOUT)
    try:
        run = await Run.attach(redis, run_id, ATTACH_SECONDS)
        return await run.config(), await run.model_files()
    finally:
        await redis.aclose()


def main(kind: type[Learner] = Learner) -> None:
    """Runs this process's rank of a learner of class `kind`."""
    if agent := os.environ.get(AGENT_PID):
        die_with_parent(int(agent))
    rank, local_rank, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    redis_url, run_id = os.environ["POLYREME_REDIS"], os.environ["POLYREME_RUN"]
    logging_setup.setup(f"learner-{rank}")
    with exit_on_error("learner"):
        config, files = asyncio.run(read_run(redis_url, run_id))
        device = Device(config.device, local_rank, config.trainer.parallel.threads)
        device.seed(config.seed)
        announce(config, device.memory(), memory_limit(), rank)
        init_parallel(config.trainer.parallel, device)
        ranks = Ranks(rank, BroadcastChannel(device.torch) if world > 1 else None)
        try:
            with LearnerTurns(config, redis_url, run_id, ranks) as turns:
                turns.take()  # before anything is allocated on them
                loads = reports_to_run(redis_url, run_id) if ranks.leads else unreported
                with closing(RunEngine(config, files, run_id, ranks, device, loads)) as engine:
                    kind(config, files, engine, redis_url, run_id, ranks, turns).run()
        except DrainError as stopped:
            logger.info("%s", stopped)
        except LeaderError as error:
            logger.info("rank 0 ended: %s", error.found)
            sys.exit(error.exit_code)
        ranks.close()
        close_parallel()


if __name__ == "__main__":
    main()
