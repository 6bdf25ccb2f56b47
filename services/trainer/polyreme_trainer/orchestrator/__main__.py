"""`python -m polyreme_trainer.orchestrator`: the supervisor's child. POLYREME_REDIS and POLYREME_RUN tell it where it belongs."""

import asyncio
import os
import signal
import sys

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would take the cores of engine and learner

from polyreme.experience.run import Run, RunState
from polyreme.experience.store import RIDE_OVER, connect
from polyreme.process import lifecycle, logging_setup
from polyreme_trainer.orchestrator.main import orchestrate


async def _main() -> int:
    """The exit status: 0 only where the run is at its end, so that after any other stop the supervisor starts a successor."""
    stop = lifecycle.stop_event()
    redis = await connect(os.environ["POLYREME_REDIS"], RIDE_OVER)
    try:
        run = await Run.attach(redis, os.environ["POLYREME_RUN"], timeout=10.0)
        work = asyncio.create_task(orchestrate(run))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not work.done():
            work.cancel()
        try:
            await work
        except asyncio.CancelledError:
            if not stop.is_set():
                raise
            redis.patience = 0.0  # a store that is away holds up no stop
            if (await run.state())[0] in (RunState.STARTING, RunState.RUNNING):
                return 128 + signal.SIGTERM
        return 0
    finally:
        await redis.aclose()


if __name__ == "__main__":
    logging_setup.setup("orchestrator")
    with lifecycle.exit_on_error("orchestrator"):
        sys.exit(asyncio.run(_main()))
