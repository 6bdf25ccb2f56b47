"""The cost of a crash: every role of a run is killed many times, at random moments, with long-tailed answer lengths.

    python bench/recovery.py [--kills 20] [--seed 0]

Replicas and learner are simulated, everything else is real: Redis with every write on disk, gRPC, and reward server, supervisor,
orchestrator, log and recorder in separate processes. Each of Redis, orchestrator, learner, a replica, the reward server and the supervisor
gets SIGKILL `--kills` times, in all phases of an iteration equally often. Then the run is stopped. A run of as many iterations
without faults is the control. A token takes 5 ms; lengths are geometric, with a mean that varies log-normally over samples, and cut at 512
tokens.

lost_samples             samples that a plan should have and that no iteration trained (0)
trained_twice            samples that more than one iteration trained (0)
lost_generation_seconds  time per crash of sampled tokens that are in no sample, minus that of the control
length_shift             Kolmogorov-Smirnov distance between the trained lengths of both runs
length_shift_p           its p-value (>= 0.05: not significant). Both runs have the same prompts and seeds.
next_sample_seconds      median seconds from a kill to the next scored group; the control's interval is printed too

Replicas record their token counts ten times a second, so the kill of a replica may hide 0.1 s of each of its slots.
"""

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
from rich.console import Console
from rich.table import Table

from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.record_codec import decode_group
from polyreme.experience.run import RunState
from support.driver import Storm
from support.faults import PHASES, Fault, kills
from support.nursery import Nursery
from support.storms import MODULES, simulated_storm
from support.verdicts import last_trained, verdict, weights_verdict

TARGET = {"lost_samples": 0, "trained_twice": 0, "length_shift_p": 0.05}
ROLES = ("redis", "orchestrator", "learner", "rollout", "reward", "supervisor")
REPLICAS, SLOTS, GROUPS, SAMPLES = 3, 16, 6, 8
STEP_SECONDS, LONGEST = 0.005, 512
ENDLESS = 100_000  # iterations
LIMIT = 3600.0  # timeout in seconds for the rest of a run after its last fault


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        iterations: the number of trained iterations.
        trained: (group, sample) of every line of the sample files.
        lengths: tokens of each.
        waiting: tokens in the log that wait for training or for the rest of their group when the run stops. A resumed run uses them.
        sampled: tokens of all replicas.
        recoveries: seconds from a kill to the next sample, by role.
        interval: seconds per scored group of the whole run.
        problems: the findings of the fault tests' checks; empty when the log is intact.
    """

    iterations: int
    trained: list[tuple[int, int]]
    lengths: list[int]
    waiting: int
    sampled: int
    recoveries: dict[str, list[float]]
    interval: float
    problems: list[str]

    @property
    def wasted(self) -> int:
        return self.sampled - sum(self.lengths) - self.waiting


async def run(nursery: Nursery, folder: Path, seed: int, faults: Sequence[Fault] = (), iterations: int = ENDLESS) -> Outcome:
    """Runs `iterations`, or until the last of `faults`, and returns the outcome."""
    replica = ("--mean-length", "96", "--length-spread", "1", "--count", str(folder.parent / f"{folder.name}-{{name}}.txt"))
    async with simulated_storm(
        nursery,
        folder,
        seed,
        iterations=iterations,
        supervised=True,
        step_seconds=STEP_SECONDS,
        train_seconds=0.3,
        rare=0,
        replica=replica,
        groups_per_iteration=GROUPS,
        group_size=SAMPLES,
        max_staleness=1,
        rollout={
            **{"replicas": REPLICAS, "max_num_seqs": SLOTS, "max_new_tokens": LONGEST, "max_model_len": LONGEST + 32},
            **{"start_timeout": 600.0, "chunk_timeout": 30.0},
        },
    ) as storm:
        await storm.running(600.0)
        began = time.monotonic()
        if faults:
            done = await storm.rage(faults)
            print(f"{done} faults in {time.monotonic() - began:.0f} s", flush=True)
            await storm.calm()
            await one_more(storm)
            storm.stop()
        state = await storm.wait(LIMIT)
        seconds = time.monotonic() - began
        trained = await last_trained(storm.run)
        ended = RunState.DONE if faults and state is RunState.STOPPED else state
        problems = await verdict(storm, ended, trained) + await weights_verdict(storm, trained)
        planned = await planned_groups(storm, trained)
        lines = [json.loads(line) for path in sorted((folder / "run" / "samples").glob("*.jsonl")) for line in path.open()]
        if {line["group"] for line in lines} != set(planned):
            problems.append("the sample files have other groups than the plans")
        counts = [tokens_of(path) for path in folder.parent.glob(f"{folder.name}-*.txt")]
        recoveries = {role: storm.recoveries.get((role, "kill"), []) for role in ROLES}
        samples = [(line["group"], line["sample"]) for line in lines]
        lengths = [line["tokens"] for line in lines]
        waiting = await waiting_tokens(storm, set(planned))
        return Outcome(trained, samples, lengths, waiting, sum(counts), recoveries, seconds / len(planned), problems)


async def one_more(storm: Storm) -> None:
    """Waits for one more trained iteration, and for a sample after the last fault."""
    reached, appends = await last_trained(storm.run), storm.appends
    async with asyncio.timeout(LIMIT):
        while storm.appends == appends or await last_trained(storm.run) <= reached:  # noqa: ASYNC110 - Redis gives no event
            await asyncio.sleep(0.2)


async def waiting_tokens(storm: Storm, planned: set[int]) -> int:
    """Returns the tokens of the scored groups outside the plans, and of the stored partial rollouts."""
    redis, key = storm.run.redis, storm.run.key
    drafts = {name: part for name, part in (await redis.hgetall(key("drafts"))).items() if b":" in name}  # others are counters
    stored = [*(await redis.hgetall(key("payloads"))).values(), *drafts.values()]
    groups = [group for group in map(decode_group, stored) if group.index not in planned]
    return sum(len(sample.token_ids) for group in groups for sample in group.samples)


async def planned_groups(storm: Storm, iterations: int) -> list[int]:
    log = ExperienceLog(storm.run)
    plans = [await log.find_plan(iteration) for iteration in range(1, iterations + 1)]
    return [index for plan in plans if plan is not None for index in plan.indices]


def tokens_of(path: Path) -> int:
    """Returns the tokens of a replica and its successors, each of which starts counting at 0."""
    counts = [int(line.split()[1]) for line in path.read_text().splitlines() if len(line.split()) == 2]
    return sum(before for before, after in zip(counts, [*counts[1:], -1], strict=True) if after < before)


def kolmogorov_smirnov(left: Sequence[int], right: Sequence[int]) -> tuple[float, float]:
    """Returns the two-sample distance and its asymptotic p-value (Smirnov 1948).

    Ties make the p-value too large, never too small, by at most the share of a single length."""
    points = np.union1d(left, right)
    shares = [np.searchsorted(np.sort(each), points, side="right") / len(each) for each in (left, right)]
    distance = float(np.abs(shares[0] - shares[1]).max())
    scale = distance * math.sqrt(len(left) * len(right) / (len(left) + len(right)))
    if scale < 0.2:
        return distance, 1.0  # the series converges slowly below this, and its value is 1 to six digits
    return distance, min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scale) ** 2) for k in range(1, 101)))


def report(calm: Outcome, stormy: Outcome, crashes: int) -> dict[str, float]:
    expected = stormy.iterations * GROUPS * SAMPLES
    distance, p = kolmogorov_smirnov(calm.lengths, stormy.lengths)
    twice = sum(count - 1 for count in Counter(stormy.trained).values())
    table = Table(title=f"{crashes} kills over {expected} samples")
    for column in ("killed", "times", "seconds to the next sample: median", "95%", "longest"):
        table.add_column(column, justify="left" if column == "killed" else "right")
    for role, seconds in stormy.recoveries.items():
        ordered = sorted(seconds)
        if ordered:
            late = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
            table.add_row(role, str(len(ordered)), *(f"{each:.2f}" for each in (median(ordered), late, ordered[-1])))
    Console(width=120).print(table)
    for name, each in (("undisturbed", calm), ("killed", stormy)):
        print(
            f"{name}: {each.sampled} tokens sampled, {sum(each.lengths)} trained, {each.waiting} waiting, {each.interval:.2f} s per group"
        )
    for problem in (*calm.problems, *stormy.problems):
        print(f"problem: {problem}")
    return {
        "lost_samples": expected - len(set(stormy.trained)),
        "trained_twice": twice,
        "lost_generation_seconds": round((stormy.wasted - calm.wasted) * STEP_SECONDS / crashes, 3),
        "length_shift": round(distance, 4),
        "length_shift_p": round(p, 4),
        "next_sample_seconds": round(median([each for seconds in stormy.recoveries.values() for each in seconds]), 3),
        "undisturbed_interval_seconds": round(calm.interval, 3),
        "problems": len(calm.problems) + len(stormy.problems),
    }


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    faults = kills(options.seed, options.kills * len(ROLES), REPLICAS, ROLES, [*PHASES], pace=1.0)
    nursery = await Nursery.open(MODULES)
    try:
        stormy = await run(nursery, folder / "killed", options.seed, faults)
        calm = await run(nursery, folder / "calm", options.seed, iterations=stormy.iterations)
    finally:
        await nursery.close()
    return report(calm, stormy, len(faults))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each role")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure(options, Path(folder)))
    met = (
        not (measured["lost_samples"] or measured["trained_twice"] or measured["problems"])
        and measured["length_shift_p"] >= TARGET["length_shift_p"]
    )
    print(json.dumps({"bench": "recovery", "measured": measured, "target": TARGET, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
