"""`python -m polyreme_trainer.orchestrator`: the orchestrator process. POLYREME_REDIS and POLYREME_RUN name its run.

Invariant: it exits with 0 only when the run is over; after any other stop the supervisor starts a successor.
"""

import asyncio
import os
import signal
import sys

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would compete with engine and learner

from polyreme.experience.run import Run, RunState
from polyreme.experience.store import RECONNECT_TIMEOUT, connect
from polyreme.process import lifecycle, logging_setup
from polyreme.process.event_loop import run_service
from polyreme_trainer.orchestrator.main import orchestrate


async def _main() -> int:
    """Returns the exit status."""
    stop = lifecycle.stop_event()
    redis = await connect(os.environ["POLYREME_REDIS"], RECONNECT_TIMEOUT)
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
            redis.reconnect_timeout = 0.0  # a lost Redis must not delay the stop
            if (await run.state())[0] in (RunState.STARTING, RunState.RUNNING):
                return 128 + signal.SIGTERM
        return 0
    finally:
        await redis.aclose()


if __name__ == "__main__":
    logging_setup.setup("orchestrator")
    with lifecycle.exit_on_error("orchestrator"):
        sys.exit(run_service(_main()))
