"""`python -m polyreme_trainer.testing.simulated_learner`: a learner of one rank with the simulated engine.

Invariant: the control loop is the one that `polyreme train` runs; only the engine is simulated.
"""

import asyncio
import logging
import os
from contextlib import closing
from typing import Annotated

import typer

from polyreme.config.run import RunConfig
from polyreme.experience.listing import attached
from polyreme.experience.store import RECONNECT_TIMEOUT
from polyreme.process import logging_setup
from polyreme.process.lifecycle import exit_on_error
from polyreme_trainer.learner.device_turns import LearnerTurns
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.learner.loop import Learner
from polyreme_trainer.learner.run_client import ATTACH_SECONDS, DrainError
from polyreme_trainer.testing.simulated_engine import LAYOUT, SimulatedTrainEngine

logger = logging.getLogger(__name__)


async def _read_config(redis_url: str, run_id: str) -> RunConfig:
    async with attached(redis_url, run_id, ATTACH_SECONDS, RECONNECT_TIMEOUT) as run:
        return await run.config()


def simulated_learner(
    train_seconds: Annotated[float, typer.Option(min=0, help="Seconds that the training of an iteration takes.")] = 0.1,
    weight_bytes: Annotated[int, typer.Option(min=LAYOUT.nbytes, help="Size of a version.")] = LAYOUT.nbytes,
) -> None:
    """Runs the control loop without learning. POLYREME_REDIS and POLYREME_RUN name the run; its record has everything else."""
    redis_url, run_id = os.environ["POLYREME_REDIS"], os.environ["POLYREME_RUN"]
    logging_setup.setup("learner-0")
    with exit_on_error("learner"):
        config = asyncio.run(_read_config(redis_url, run_id))
        ranks = Ranks()
        try:
            with LearnerTurns(config, redis_url, run_id, ranks) as turns:
                turns.take()
                with closing(SimulatedTrainEngine(config, run_id, train_seconds, weight_bytes)) as engine:
                    Learner(config, {}, engine, redis_url, run_id, ranks, turns).run()
        except DrainError as stopped:
            logger.info("%s", stopped)
        ranks.close()


if __name__ == "__main__":
    typer.run(simulated_learner)
