"""The transfer of a version to many machines: the time for sixteen receivers over that for one, and the bytes that the trainer sends.

    python bench/relay.py [--receivers 16] [--mib 128] [--repeats 1] [--mbit 20]

Each receiver is a separate machine: a network namespace with a link of `--mbit` Mbit/s each way, like the trainer's. The publisher, the
replicas' service and the bytes are real; there is no engine. The links are slow, so that they bound the time, and not the processors, which
all receivers share here.

`receivers_16_vs_1` (<= 1.3): median seconds from the publication of a version to the last commit, sixteen receivers over one. In theory it
is 1 + 15 x (bytes of the largest tensor, or of a chunk of 1 MiB) / (bytes of the version), since a relay forwards verified data only.

`trainer_bytes_sent_per_version` (<= 2): bytes that the trainer's link sends, with all headers, over those of the version, for sixteen
receivers. `hop_seconds`: the cost of one more machine in the chain, (sixteen - one) / 15; `hop_bytes`: the same in bytes of the link.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from weights_side.streams import BENCH, Versions, run_id, start_replica

from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.leases import Registry
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme_trainer.weight_sync.publisher import Publisher
from support.machines import Machine, Network, missing, network
from support.receiver import lease

TASK = BENCH.parent / "examples" / "running_total"
TENSORS = 256
COMMIT_TIMEOUT = 500.0
BURST = "64kb"  # if a whole chunk passed at once, the cost of a hop would be hidden


@contextmanager
def replicas(machines: Sequence[Machine], nbytes: int, run: str) -> Iterator[list[str]]:
    """Starts a replica's service on each machine and returns the addresses."""
    with ExitStack() as processes:
        started = []
        for machine in machines:
            process = start_replica("stream", nbytes, run, machine.address, machine.command, TENSORS)
            processes.callback(process.wait, 60)
            processes.callback(process.terminate)
            started.append((machine, process))
        yield [f"{machine.address}:{int(process.stdout.readline())}" for machine, process in started if process.stdout]


async def publish(
    net: Network, machines: Sequence[Machine], nbytes: int, repeats: int, redis_url: str, config: RunConfig
) -> tuple[float, float]:
    """Returns the median seconds from publication to the last commit, and the median bytes that the trainer sent over the version's."""
    redis = await connect(redis_url)
    run = await Run.create(redis, run_id(), config, {})
    term = await ExperienceLog(run).take(Writer.LEARNER)
    versions = Versions(nbytes, run.run_id, TENSORS)
    versions.arena.unlink()  # as on another host
    publisher = Publisher(redis_url, run.run_id, term, versions.arena)
    publisher.start()
    taken, sent = [], []
    try:
        async with AsyncExitStack() as stack:
            addresses = stack.enter_context(replicas(machines, nbytes, run.run_id))
            for number, address in enumerate(addresses):
                entry = replace(lease(f"receiver{number:02}", 0), address=address)
                await stack.enter_async_context(await Registry(run).register(entry))
            for _ in range(repeats + 1):
                slot = await publisher.acquire_slot(COMMIT_TIMEOUT)
                sealed, generation = versions.write(slot)
                before, began = net.sent_bytes(), time.perf_counter()
                publisher.publish(sealed, slot, generation)
                await publisher.wait_committed(sealed.version, len(machines), COMMIT_TIMEOUT)
                taken.append(time.perf_counter() - began)
                sent.append((net.sent_bytes() - before) / versions.plan.nbytes)
    finally:
        publisher.close()
        versions.arena.close()
        await redis.aclose()
    return statistics.median(taken[1:]), statistics.median(sent[1:])


async def measure(receivers: int, nbytes: int, repeats: int, mbit: int) -> dict[str, float]:
    config = load_config(TASK / "run.yaml", ["weights.anchor_interval=1"])
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer.start(Path(folder)) as server, network() as net:
        net.shape(f"{mbit}mbit", BURST)
        machines = [net.add() for _ in range(receivers)]
        for machine in machines:
            machine.shape(f"{mbit}mbit", BURST)
        one, _ = await publish(net, machines[:1], nbytes, repeats, server.url, config)
        many, sent = await publish(net, machines, nbytes, repeats, server.url, config)
    hop = (many - one) / max(1, receivers - 1)
    return {
        f"receivers_{receivers}_vs_1": many / one,
        "trainer_bytes_sent_per_version": sent,
        "one_seconds": one,
        "many_seconds": many,
        "one_link_share": 8 * nbytes / one / (mbit * 1e6),
        "hop_seconds": hop,
        "hop_bytes": hop * mbit * 1e6 / 8,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receivers", type=int, default=16)
    parser.add_argument("--mib", type=int, default=128, help="size of the version")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--mbit", type=int, default=20, help="of each link, each way")
    options = parser.parse_args()
    most = {f"receivers_{options.receivers}_vs_1": 1.3, "trainer_bytes_sent_per_version": 2.0}
    if reason := missing():
        print(f"no shaped links: {reason}")
        measured: dict[str, float] = {}
    else:
        measured = asyncio.run(measure(options.receivers, options.mib << 20, options.repeats, options.mbit))
    for name, value in measured.items():
        print(f"{name:32} {value:12.3f}")
    met = all(measured.get(name, bound + 1) <= bound for name, bound in most.items())  # unmeasured: missed
    print(json.dumps({"bench": "relay", "measured": measured, "target": most, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
