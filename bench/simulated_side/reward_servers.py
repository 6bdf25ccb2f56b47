"""`python -m simulated_side.reward_servers COUNT`: reward servers of a run, all in one process. Each has its own lease and ports."""

import asyncio
import os
import sys
from contextlib import AsyncExitStack

from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme.process.event_loop import run_service
from polyreme.process.lifecycle import stop_event, until_set
from polyreme.process.logging_setup import setup
from polyreme_reward.server import serve

_ATTACH_SECONDS = 60.0


async def _serve(count: int) -> None:
    redis = await connect(os.environ["POLYREME_REDIS"])
    try:
        run = await Run.attach(redis, os.environ["POLYREME_RUN"], _ATTACH_SECONDS)
        config = (await run.config()).reward
        assert config is not None
        async with until_set(stop_event()), AsyncExitStack() as servers:
            for _ in range(count):
                await servers.enter_async_context(serve(config, run=run))
            await asyncio.Event().wait()
    finally:
        await redis.aclose()


if __name__ == "__main__":
    setup("reward")
    run_service(_serve(int(sys.argv[1])))
