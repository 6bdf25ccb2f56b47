"""Another machine of the learner: it answers each launch of the trainer's machine and runs its share of the ranks.

Invariant: ranks run here only while their launch is the newest one and names this machine. When the launch ends, they end. No
shared memory of theirs outlives this process, and a killed predecessor's is removed at the start.
"""

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from polyreme import API_VERSION
from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme.experience.leases import Lease
from polyreme.experience.run import Run
from polyreme.net.endpoint import address_towards
from polyreme.process.supervisor import describe_end, last_error
from polyreme.weights.arena import arena_path, remove_stale
from polyreme_trainer.launch.rendezvous import AGENT, TIMES, LaunchTimes, Machines, check_files, log_path_of, start_agent
from polyreme_trainer.launch.supervision import LEARNER

logger = logging.getLogger(__name__)

_RELEASE_SECONDS = 10.0
"""Seconds for killed ranks to disappear after their agent."""


async def serve_launches(
    run: Run,
    config: RunConfig,
    redis_url: str,
    node: int,
    stop: asyncio.Event,
    ranks: Sequence[str] = LEARNER,
    agent: Sequence[str] = AGENT,
    times: LaunchTimes = TIMES,
) -> None:
    """Runs machine `node`'s share of the ranks, launch after launch, until `stop` or until the run is done.

    Raises:
        ConfigError: the run has no such machine. RunFailedError: the run failed.
    """
    if not 0 < node < (nodes := config.trainer.parallel.nodes):
        raise ConfigError(
            f"--node from 1 to {nodes - 1}" if nodes > 1 else "trainer.parallel.nodes above 1",
            str(node if nodes > 1 else nodes),
            "Node 0 is the trainer's machine.",
        )
    name = f"learner-{node}-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    facts = {"node": node, "launch": "", "status": None, "why": ""}
    lease = Lease("learner", name, address_towards(redis_url), "", API_VERSION, facts)
    machines, known = Machines(run, times), ""
    remove_stale()
    async with _no_arena_left(run.run_id, node), await machines.register(lease) as keeper:

        async def over() -> bool:
            return stop.is_set() or (await run.check()).ended

        async def called() -> tuple[Lease | None] | None:
            if await over():
                return (None,)
            call = await machines.call()
            return (call,) if call is not None and call.id != known else None

        async def left() -> bool | None:
            """True once this launch is no longer the newest one, or the run is over."""
            call = await machines.call()
            ours = call is not None and call.id == known
            lost = machines.is_lost(known, ours)
            return True if lost or (call is not None and not ours) or await over() else None

        async def named() -> bool | None:
            call = await machines.call()
            if call is not None and call.id == known and name in call.facts["members"]:
                return True
            return False if await left() else None

        async def run_share(call: Lease) -> None:
            parallel = config.trainer.parallel
            first, log_path = node * parallel.ranks_per_node, log_path_of(call, node)
            last = first + parallel.ranks_per_node - 1
            logger.info("launch %s: ranks %d to %d of %d, log in %s", known, first, last, parallel.world_size, log_path)
            child = start_agent(call, node, run, config, redis_url, ranks, agent, log_path)
            here, leaving = asyncio.create_task(child.wait()), asyncio.create_task(run.until(left))
            try:
                await asyncio.wait({here, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if here.done():
                    why = "" if here.result() == 0 else last_error(child.log_tail(60)) or describe_end(child)
                    logger.info("launch %s: %s %s", known, describe_end(child), why)
                    await keeper.update({"status": here.result(), "why": why})
                await leaving
            finally:
                child.kill()  # before the first await, which a cancellation may end
                for task in (here, leaving):
                    task.cancel()
                await child.reap()
                await asyncio.gather(here, leaving, return_exceptions=True)

        while (found := await run.until(called)) and (call := found[0]):
            known = call.id
            try:
                await check_files(run, config, known, times.files)
            except ConfigError as error:
                logger.error("%s", error)
                await keeper.update({"launch": known, "status": error.exit_code, "why": str(error)})
                await run.until(left)
                continue
            await keeper.update({"launch": known, "status": None, "why": ""})
            if await run.until(named):
                await run_share(call)


@asynccontextmanager
async def _no_arena_left(run_id: str, node: int) -> AsyncIterator[None]:
    """At the end of the block, removes the arena of ranks that were killed. They die shortly after their agent."""
    try:
        yield
    finally:
        deadline = time.monotonic() + _RELEASE_SECONDS
        while arena_path(run_id, node).exists() and time.monotonic() < deadline:
            remove_stale(run_id)
            await asyncio.sleep(0.05)
