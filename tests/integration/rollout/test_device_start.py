"""A replica holds the devices while its engine starts, at most until its own end."""

import subprocess
import sys

import psutil  # type: ignore[import-untyped]

from polyreme.experience.run import Run
from support.processes import runs
from support.waiting import until

STARTING = """
import sys, time
from types import SimpleNamespace
from polyreme_rollout.devices.device_start import devices_while_starting
spec = SimpleNamespace(run_id=sys.argv[2], config=SimpleNamespace(placement="colocated"))
with devices_while_starting(spec, sys.argv[1]) as held:
    print(held.counter, flush=True)
    time.sleep(600)
"""


async def test_the_renewals_of_a_replica_that_is_killed_while_it_starts_end_with_it(run: Run, redis_url: str) -> None:
    command = [sys.executable, "-c", STARTING, redis_url, run.run_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as replica:  # noqa: ASYNC220 - nothing else runs in this loop
        assert replica.stdout is not None and int(replica.stdout.readline()) == 1

        async def deadline() -> int:
            stored = await run.redis.hgetall(run.key("device"))
            return max(int(entry.split()[1]) for name, entry in stored.items() if name != b"counter")

        first = await deadline()

        async def renewed() -> bool:
            return await deadline() > first

        await until(renewed)
        [renewals] = psutil.Process(replica.pid).children()
        replica.kill()
    await until(lambda: not runs(renewals))
