"""Checks of a run after a storm of faults."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run, RunState
from polyreme.rundir.run_records import read_records
from polyreme_trainer.testing.simulated_engine import after_plan, newest
from support.driver import Storm
from support.faults import PHASES

SAME_IN_A_REPLAY = ("weights", "actor/pg_loss", "grad_norm", "reward/mean", "mismatch_kl", "tokens/generated")


async def verdict(storm: Storm, state: RunState, iterations: int) -> list[str]:
    """The problems of a run that has ended. Must be empty."""
    wrong, log = list(storm.problems), ExperienceLog(storm.run)
    if state is not RunState.DONE:
        wrong.append(f"the run is {state}")
    audit = await log.audit()
    if not audit.clean:
        wrong.append(f"the log is not whole: {audit}")
    if audit.counts["failed"]:
        wrong.append(f"{audit.counts['failed']} groups failed")
    if missing := [i for i in range(1, iterations + 1) if await log.find_plan(i) is None]:
        wrong.append(f"there are no plans {missing}")
    trained: dict[int, set[tuple[Any, ...]]] = defaultdict(set)
    for record in await records(storm.run, "iteration"):
        trained[record["iteration"]].add(tuple(record.get(name) for name in SAME_IN_A_REPLAY))
    wrong += [f"iteration {i} was not trained alike every time: {found}" for i, found in trained.items() if len(found) > 1]
    if sorted(trained) != list(range(1, iterations + 1)):
        wrong.append(f"iterations {sorted(trained)} are on record")
    return wrong


async def weights_verdict(storm: Storm, iterations: int) -> list[str]:
    """The problems of a simulated learner's final weights, which prove what it was trained on. Must be empty."""
    log, chain = ExperienceLog(storm.run), bytes(32)
    for iteration in range(1, iterations + 1):
        plan = await log.find_plan(iteration)
        chain = after_plan(chain, iteration, plan.indices) if plan else b""
    last = newest(storm.folder / "run" / "checkpoints")
    if last is None or (last.version, last.plans) != (iterations, chain):
        return [f"the last checkpoint was not trained on plans 1 to {iterations}, each once and in order: {last}"]
    told = {record["weights"] for record in await records(storm.run, "iteration") if record["iteration"] == iterations}
    return (
        [] if told == {(last.plans + last.payloads).hex()} else ["the last checkpoint does not hold the last iteration's weights"]
    )


async def records(run: Run, kind: str) -> list[dict[str, Any]]:
    """The run's records of a kind: first those on disk, which Redis may have trimmed, then those in Redis."""
    found, last = [record for record in read_records((await run.config()).run_dir, run.run_id) if record["kind"] == kind], "0"
    while batch := await run.records(last, 0):
        last = batch[-1][0]
        found += [record for _, record in batch if record["kind"] == kind]
    return found


async def last_trained(run: Run) -> int:
    """The newest iteration on record; 0 if there is none."""
    return max((record["iteration"] for record in await records(run, "iteration")), default=0)


def table(storms: Sequence[Storm]) -> str:
    """Faults by process and phase, and the seconds to the next sample by process and action."""
    done: Counter[tuple[str, str]] = Counter()
    recoveries: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in storms:
        done += each.done
        for key, values in each.recoveries.items():
            recoveries[key] += values
    victims, phases = sorted({victim for victim, _ in done}), [*PHASES, "(none seen)"]
    lines = [f"{sum(done.values())} faults", f"{'':14}" + "".join(f"{victim:>13}" for victim in victims)]
    lines += [f"{phase:14}" + "".join(f"{done[victim, phase]:13}" for victim in victims) for phase in phases]
    lines += ["", f"{'to the next sample, s':28}{'n':>6}{'median':>9}{'95%':>9}{'max':>9}"]
    for (victim, action), values in sorted(recoveries.items()):
        ordered = sorted(values)
        median, late = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        lines.append(f"{victim + ' ' + action:28}{len(ordered):6}{median:9.2f}{late:9.2f}{ordered[-1]:9.2f}")
    return "\n".join(lines)
