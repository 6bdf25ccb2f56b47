"""A push of 1T parameters from 256 senders to 1,024 receivers, simulated from the measured cost of one hop on this machine.

    python bench/scale_push.py [--parameters 1e12] [--senders 256] [--receivers 1024] [--replicas 32] [--gbit 400] [--cores 32]
        [--memory-gb 300]

It first measures, with the code of a push, how much processor time a byte costs: in a stream, at the busier of its two ends, and in
comparing, applying and verifying a delta. Processor time does not depend on other work of the machine as much as elapsed time does; the
best of a few counts. Then it simulates: every receiver takes its share of a replica's weights, a chain of receivers holds the same share, and
a tensor is forwarded when it has arrived and is verified. A machine runs `--cores` streams in, as many out, and as many threads that compare
and apply, which share its memory's bandwidth. docs/design.md has its results, and names the parts
that do not exist.

`full_seconds` (<= 5), `delta_seconds` (<= 1): from the sealed version to the last receiver that has verified it. `trainer_copies`: bytes
of all senders together over those of the model.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
from weights_side.streams import stream_costs

from polyreme.weights import delta as deltas
from polyreme.weights.digest import seal, verify
from polyreme.weights.manifest import TensorSpec, plan_manifest
from polyreme.weights.wire import CHUNK_BYTES

MOST = {"full_seconds": 5.0, "delta_seconds": 1.0}
BYTES = 2  # of a bfloat16 parameter
LARGEST_TENSOR = 64 << 20  # bytes of a tensor in a share; a relay forwards a tensor when it is verified
CHANGED = 0.01  # share of the elements in a delta
CACHE_LINE = 64  # bytes
NETWORK_SECONDS = 10e-6  # one way, in a data centre
CALL_SECONDS = 5e-3  # seconds of the call that orders a fetch
REPEATS = 5


@dataclass(frozen=True)
class Costs:
    """Bytes of whole tensors per second of one core: in a stream, comparing two versions, applying a delta, and verifying the result.

    `delta_fraction`: bytes of a delta over those of the tensors.
    """

    stream: float
    compare: float
    apply: float
    verify: float
    delta_fraction: float

    @property
    def two_applied(self) -> float:
        """The same for what a receiver does with a delta: it applies the delta before to the older of its two buffers, then this one,
        and verifies the result."""
        return 1 / (2 / self.apply + 1 / self.verify)


@dataclass(frozen=True)
class Fleet:
    """`replicas` hold the model; the receivers are spread evenly over them. `link`, `memory`: bytes per second, of the link each way."""

    parameters: float
    senders: int
    receivers: int
    replicas: int
    link: float
    cores: int
    memory: float

    @property
    def sent(self) -> float:
        """Bytes of one sender's share of the model."""
        return self.parameters * BYTES / self.senders

    @property
    def received(self) -> float:
        """Bytes of one receiver's share."""
        return self.parameters * BYTES * self.replicas / self.receivers


def fastest(act: Callable[[], object]) -> float:
    """Processor seconds of this thread."""
    taken = []
    for _ in range(REPEATS):
        started = time.thread_time()
        act()
        taken.append(time.thread_time() - started)
    return min(taken)


def measure(mib: int) -> Costs:
    plan = plan_manifest([TensorSpec(f"tensor{number}", "BF16", (mib << 15,)) for number in range(16)])
    rng = np.random.default_rng(0)
    old = bytearray(rng.bytes(plan.nbytes))
    new = np.frombuffer(old, np.uint16).copy()
    places = rng.choice(len(new), int(CHANGED * len(new)), replace=False)
    new[places] ^= 1
    after = memoryview(new.tobytes())
    manifests = seal(plan.stamped("bench", 1, 0), memoryview(old)), seal(plan.stamped("bench", 1, 1), after)
    delta = deltas.diff(manifests[0], memoryview(old), manifests[1], after)
    if delta is None:
        raise SystemExit("expected a delta; found a whole version")
    shadow, payload = memoryview(bytearray(old)), memoryview(delta.payload)
    seconds = {
        "stream": max(asyncio.run(stream_costs(plan.nbytes, REPEATS))),
        "compare": fastest(lambda: deltas.diff(manifests[0], memoryview(old), manifests[1], after)),
        "apply": fastest(lambda: deltas.apply(delta.manifest, payload, shadow)),
        "verify": fastest(lambda: verify(manifests[1], shadow)),
    }
    rates = {name: plan.nbytes / taken for name, taken in seconds.items()}
    return Costs(**rates, delta_fraction=len(payload) / plan.nbytes)


def chain_seconds(nbytes: float, length: int, rate: float, unit: float) -> float:
    """Returns the seconds until the last of `length` receivers in a chain has everything. Each forwards `unit` bytes when they have
    arrived."""
    chunks = max(1, round(nbytes / max(unit, CHUNK_BYTES)))
    seconds = nbytes / chunks / rate
    arrived = np.arange(1, chunks + 1) * seconds  # at the first receiver
    for hop in range(1, length):
        free = np.arange(chunks) * seconds  # the link carries one chunk at a time
        ready = np.maximum.accumulate(arrived + NETWORK_SECONDS - free)
        arrived = np.maximum(ready + free, CALL_SECONDS + hop * NETWORK_SECONDS) + seconds
    return float(arrived[-1]) + CALL_SECONDS


def simulate(fleet: Fleet, costs: Costs) -> dict[str, float]:
    """Simulates the push. The senders share the first receivers of the chains, so the slower end bounds the start of a chain."""
    rate = min(fleet.link, fleet.cores * costs.stream)
    heads = fleet.receivers / fleet.replicas
    first = min(rate, rate * fleet.senders / heads)
    full = chain_seconds(fleet.received, fleet.replicas, first, LARGEST_TENSOR)
    payload = chain_seconds(fleet.received * costs.delta_fraction, fleet.replicas, first, LARGEST_TENSOR * costs.delta_fraction)
    compare = fleet.sent / (fleet.cores * costs.compare)
    lines = 1 - (1 - CHANGED) ** (CACHE_LINE // BYTES)  # share of the cache lines that a delta changes: each is read and written
    memory = fleet.received * (1 + 2 * 2 * lines) / fleet.memory
    apply = max(fleet.received / (fleet.cores * costs.two_applied), memory)
    return {
        "full_seconds": full,
        "delta_seconds": compare + payload + apply,
        "delta_compare_seconds": compare,
        "delta_chain_seconds": payload,
        "delta_apply_seconds": apply,
        "delta_memory_seconds": memory,
        "without_relay_seconds": fleet.received * fleet.receivers / fleet.senders / rate,
        "trainer_copies": fleet.received * heads / (fleet.parameters * BYTES),
        "machine_gb_s": rate / 1e9,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e12)
    parser.add_argument("--senders", type=int, default=256)
    parser.add_argument("--receivers", type=int, default=1024)
    parser.add_argument("--replicas", type=int, default=32, help="number of model copies that all receivers hold together")
    parser.add_argument("--gbit", type=float, default=400, help="of each machine's link, each way")
    parser.add_argument("--cores", type=int, default=32, help="of each machine, for streams and for deltas")
    parser.add_argument("--memory-gb", type=float, default=300, help="gigabytes per second of each machine's memory")
    parser.add_argument("--mib", type=int, default=16, help="size of each of the 16 tensors that are measured")
    options = parser.parse_args()
    costs = measure(options.mib)
    link, memory = options.gbit * 1e9 / 8, options.memory_gb * 1e9
    fleet = Fleet(options.parameters, options.senders, options.receivers, options.replicas, link, options.cores, memory)
    measured = {
        **simulate(fleet, costs),
        "stream_gb_s": costs.stream / 1e9,
        "compare_gb_s": costs.compare / 1e9,
        "apply_gb_s": costs.apply / 1e9,
        "verify_gb_s": costs.verify / 1e9,
        "delta_fraction": costs.delta_fraction,
    }
    for name, value in measured.items():
        print(f"{name:28} {value:10.3f}")
    met = all(measured[name] <= most for name, most in MOST.items())
    print(json.dumps({"bench": "scale_push", "measured": measured, "target": MOST, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
