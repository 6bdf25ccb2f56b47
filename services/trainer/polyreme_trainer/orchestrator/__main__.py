"""`python -m polyreme_trainer.orchestrator`: the supervisor's child. POLYREME_REDIS and POLYREME_RUN tell it where it belongs."""

import asyncio
import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would take the cores of engine and learner

from polyreme import lifecycle, logs
from polyreme.log.run import Run
from polyreme.log.store import RIDE_OVER, connect
from polyreme_trainer.orchestrator.main import orchestrate


async def _main() -> None:
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
    finally:
        await redis.aclose()


if __name__ == "__main__":
    logs.setup("orchestrator")
    with lifecycle.exit_on_error("orchestrator"):
        asyncio.run(_main())
