"""`python -m support.lone_machine NODE FOLDER`: one machine of a learner without replicas, and without an orchestrator.

Node 0 supervises like `polyreme train`, with its logs in FOLDER. The others join like `polyreme learner`. POLYREME_REDIS and POLYREME_RUN
name the run.
"""

import asyncio
import os
import sys
from pathlib import Path

from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme.process import logging_setup
from polyreme.process.lifecycle import exit_on_error, stop_event
from polyreme_trainer.launch.trainer_process import Trainer, trainer_processes
from polyreme_trainer.launch.worker_node import serve_launches

RANK = ("-m", "support.lone_rank")


async def live(node: int, folder: Path) -> None:
    url, run_id = os.environ["POLYREME_REDIS"], os.environ["POLYREME_RUN"]
    redis = await connect(url)
    try:
        run = await Run.attach(redis, run_id, 10)
        config = await run.config()
        if node == 0:
            learner, _ = trainer_processes(config, run_id, url, folder, RANK)
            await Trainer(config, run, [learner]).run()
        else:
            await serve_launches(run, config, url, node, stop_event(), RANK)
    finally:
        await redis.aclose()


if __name__ == "__main__":
    logging_setup.setup(f"node {sys.argv[1]}")
    with exit_on_error("machine"):
        asyncio.run(live(int(sys.argv[1]), Path(sys.argv[2])))
