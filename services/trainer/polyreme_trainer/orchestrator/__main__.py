"""`python -m polyreme_trainer.orchestrator [NUMBER]`: an orchestrator process, by default the leading one. POLYREME_REDIS and
POLYREME_RUN name its run.

Invariant: it exits with 0 only when the run is over; after any other stop the supervisor starts a successor.
"""

import asyncio
import os
import signal
import sys

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would compete with engine and learner

from polyreme.experience.listing import attached
from polyreme.experience.run import RunState
from polyreme.experience.shard import role_of
from polyreme.experience.store import RECONNECT_TIMEOUT
from polyreme.process import lifecycle, logging_setup
from polyreme.process.event_loop import run_service
from polyreme.process.prompt_exit import prompt_exit
from polyreme_trainer.orchestrator.main import orchestrate


async def _main(number: int) -> int:
    """Returns the exit status."""
    stop = lifecycle.stop_event()
    async with attached(os.environ["POLYREME_REDIS"], os.environ["POLYREME_RUN"], 10.0, RECONNECT_TIMEOUT) as run:
        work = asyncio.create_task(orchestrate(run, number))
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
            run.redis.reconnect_timeout = 0.0  # a lost Redis must not delay the stop
            if (await run.state())[0] in (RunState.STARTING, RunState.RUNNING):
                return 128 + signal.SIGTERM
        return 0


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    name = role_of(number)
    logging_setup.setup(name)
    with prompt_exit(), lifecycle.exit_on_error(name):
        sys.exit(run_service(_main(number)))
