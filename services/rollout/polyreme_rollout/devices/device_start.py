"""Holds the devices of a colocated replica while its engine starts, before the replica has an event loop.

Invariant: the grant is renewed until the replica's event loop renews it, and ends when this process dies. The engine may fork, so
a separate process makes the renewals: `python -m polyreme_rollout.devices.device_start HOLDER COUNTER`.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from polyreme.errors import RunFailedError
from polyreme.experience.device_lease import DeviceLease
from polyreme.experience.run import Run, RunState
from polyreme.experience.store import connect, connected
from polyreme.process.lifecycle import die_with_parent
from polyreme_rollout.run_spec import RunSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartupGrant:
    """A grant of `generate`: its holder and counter, and the process that renews it."""

    holder: str
    counter: int
    renewals: subprocess.Popen[bytes]

    def end_renewals(self) -> None:
        """Ends the process, because the event loop renews the grant from now on. Idempotent."""
        self.renewals.kill()
        self.renewals.wait()


@contextmanager
def devices_while_starting(spec: RunSpec, redis_url: str) -> Iterator[StartupGrant | None]:
    """Waits for the devices of a colocated run and renews the grant until `StartupGrant.end_renewals`, or the end of the block.

    Yields None if the devices are not shared.

    Raises:
        RunFailedError: the run has failed in the meantime.
        SystemExit: it has ended well, so the replica has nothing to do.
    """
    if spec.config.placement != "colocated":
        yield None
        return
    holder = f"rollout-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    counter = asyncio.run(_acquire(redis_url, spec.run_id, holder))
    environment = {**os.environ, "POLYREME_REDIS": redis_url, "POLYREME_RUN": spec.run_id}
    command = (sys.executable, "-m", "polyreme_rollout.devices.device_start", str(os.getpid()), holder, str(counter))
    held = StartupGrant(holder, counter, subprocess.Popen(command, env=environment))
    try:
        yield held
    finally:
        held.end_renewals()


async def release(redis_url: str, run_id: str, held: StartupGrant) -> None:
    """Ends the grant now, not at its deadline. Raises StoreError."""
    async with connected(redis_url) as redis:
        await DeviceLease(Run(redis, run_id), "generate", held.holder, counter=held.counter).give_up()


async def _acquire(redis_url: str, run_id: str, holder: str) -> int:
    async with connected(redis_url) as redis:
        run = Run(redis, run_id)

        async def goes_on() -> None:
            state, _ = await run.state()
            if state is RunState.FAILED:
                raise RunFailedError("a run that needs replicas", f"a run that is {state}", "Start it again with --resume.")
            if state.ended:
                logger.info("the run is %s", state)
                sys.exit()

        return (await DeviceLease(run, "generate", holder).acquire(alive=goes_on)).counter


async def _renew(parent: int, holder: str, counter: int) -> None:
    die_with_parent(parent)
    redis = await connect(os.environ["POLYREME_REDIS"])
    await DeviceLease(Run(redis, os.environ["POLYREME_RUN"]), "generate", holder, counter=counter).renew_during(
        asyncio.get_running_loop().create_future()
    )


if __name__ == "__main__":
    asyncio.run(_renew(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
