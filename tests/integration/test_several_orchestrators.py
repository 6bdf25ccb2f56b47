"""A run whose groups several orchestrators make: the same groups and samples as with one, whatever becomes of one of them."""

import json
from pathlib import Path
from typing import Any

import psutil

from polyreme.experience.ledger import ExperienceLog
from support.processes import command_line
from support.simulated_run import SimulatedRun, simulated_run
from support.waiting import until

ITERATIONS, GROUPS = 6, 7
SECTIONS = {"iterations": ITERATIONS, "groups_per_iteration": GROUPS, "max_staleness": 1, "trainer": {"orchestrators": 3}}


def samples_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of the samples of all iterations, in order."""
    paths = sorted((run_dir / "samples").glob("iteration_*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def what(lines: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [
        tuple(line[name] for name in ("iteration", "group", "sample", "attempt", "prompt", "label", *names)) for line in lines
    ]


async def trained_groups(started: SimulatedRun) -> list[int]:
    """The groups of all plans."""
    plans = [await ExperienceLog(started.run).find_plan(number) for number in range(1, ITERATIONS + 1)]
    return [index for plan in plans if plan for index in plan.indices]


async def test_groups_and_samples_are_those_of_one_orchestrator(redis_url: str, run_id: str, tmp_path: Path) -> None:
    found: dict[int, list[dict[str, Any]]] = {}
    for count in (1, 3):
        folder = tmp_path / str(count)
        folder.mkdir()
        sections = {"iterations": ITERATIONS, "groups_per_iteration": GROUPS, "trainer": {"orchestrators": count}}
        async with simulated_run(redis_url, f"{run_id}-{count}", folder, **sections) as started:
            assert await started.ended(300) == ("done", ""), started.logs()
            assert (await ExperienceLog(started.run).audit()).clean
            assert sorted(await trained_groups(started)) == list(range(ITERATIONS * GROUPS))
            planned = await started.records("rollout")
            assert [record["iteration"] for record in planned] == list(range(1, ITERATIONS + 1))
            assert ("groups" in planned[0]) == (count > 1)
            assert not await started.records("restart")
        found[count] = samples_of(folder / "run")
        assert len(list(folder.glob("orchestrator*.log"))) == count
    assert len(found[1]) == ITERATIONS * GROUPS * 3
    assert what(found[3]) == what(found[1])
    # Versions after the first one differ in two runs, since those of the simulated learner are digests of all that a group holds, times too.
    first = [[line for line in found[count] if line["iteration"] == 1] for count in (1, 3)]
    assert what(first[0], "token_ids", "logprobs", "score") == what(first[1], "token_ids", "logprobs", "score")


async def test_a_killed_orchestrator_loses_and_doubles_no_sample(redis_url: str, run_id: str, tmp_path: Path) -> None:
    slow = ("--step-seconds", "0.02")
    async with simulated_run(redis_url, run_id, tmp_path, replicas=slow, train_seconds=0.3, **SECTIONS) as started:
        log = ExperienceLog(started.run)
        for number, version in ((2, 1), (0, 2)):  # one that follows, then the leading one
            await until(lambda least=version: reached(log, least))  # type: ignore[misc]
            kill(started, number)
        assert await started.ended(300) == ("done", ""), started.logs()
        assert (await log.audit()).clean
        assert sorted(await trained_groups(started)) == list(range(ITERATIONS * GROUPS))
        assert {record["process"] for record in await started.records("restart")} == {"orchestrator", "orchestrator-2"}
    lines = samples_of(tmp_path / "run")
    assert len({(line["group"], line["sample"]) for line in lines}) == len(lines) == ITERATIONS * GROUPS * 3


def kill(started: SimulatedRun, number: int) -> None:
    children = psutil.Process(started.children["train"].pid).children()
    [killed] = [child for child in children if command_line(child)[-2:] == ["polyreme_trainer.orchestrator", str(number)]]
    killed.kill()


async def reached(log: ExperienceLog, version: int) -> bool:
    return await log.version() >= version and bool(await log.in_flight())


COUNT = """
class Count:
    def __init__(self): self.seen = 0
    def reset(self, row): return None
    def step(self, message):
        self.seen += 1
        return "more", 0.25, self.seen == 3
"""


async def test_orchestrators_share_the_episodes_of_a_server(redis_url: str, run_id: str, tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text(COUNT)
    played = {"reward": None, "environment": {"file": str(tmp_path / "count.py"), "start_timeout": 300.0, "episodes": 5}}
    sections = {**SECTIONS, **played, "rollout": {"max_new_tokens": 24}}  # three turns fit the context
    async with simulated_run(redis_url, run_id, tmp_path, train_seconds=0.3, **sections) as started:
        await until(lambda: reached(ExperienceLog(started.run), 1))
        kill(started, 1)
        assert await started.ended(300) == ("done", ""), started.logs()
        assert (await ExperienceLog(started.run).audit()).clean
        assert sorted(await trained_groups(started)) == list(range(ITERATIONS * GROUPS))
    assert {len(line["turns"]) for line in samples_of(tmp_path / "run")} == {3}
