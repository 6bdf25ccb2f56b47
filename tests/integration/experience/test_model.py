"""The log on a real server, compared with its reference model. Any process dies between any two commands, and any answer is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from polyreme.errors import StaleTermError
from polyreme.experience.audit import LogSnapshot
from polyreme.experience.ledger import (
    Admission,
    ExperienceLog,
    PartialRolloutPart,
    Plan,
    StaleAttemptError,
    TransitionError,
    Writer,
)
from polyreme.experience.pass_rates import PassRate, Tally
from polyreme.experience.run import Run
from polyreme.experience.scripts import Scripts
from polyreme.experience.shard import Shard
from polyreme.experience.store import connect
from support.configs import run_config, trainer
from support.log_model import Illegal, LogModel, Stale

FOREVER, AT_ONCE = 1e6, 0.0


class LosingAnswers(Scripts):
    """Scripts whose answers are lost while the network is bad, so that the client sends the same command again."""

    bad_network = False

    async def call(self, name: str, *args: Any, **keys: Any) -> Any:
        if self.bad_network:
            await super().call(name, *args, **keys)
        return await super().call(name, *args, **keys)


class LogMachine(RuleBasedStateMachine):
    def __init__(self, redis_url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis = self.do(connect(redis_url))
        self.zombies: dict[Writer, list[ExperienceLog]] = {writer: [] for writer in Writer}

    def do(self, work: Awaitable[Any]) -> Any:
        async def main() -> Any:
            return await work

        return self.runner.run(main())

    def both(self, real: Callable[[], Awaitable[Any]], model: Callable[[], Any]) -> Any:
        """Makes one step in the log and in the model, which must return or refuse the same."""
        try:
            expected = model()
        except (Stale, Illegal) as refusal:
            with pytest.raises(StaleAttemptError if isinstance(refusal, Stale) else TransitionError):
                self.do(real())
            return None
        found = self.do(real())
        assert found == expected
        return found

    @initialize(
        size=st.integers(1, 3),
        staleness=st.integers(0, 3),
        attempts=st.integers(1, 3),
        base=st.sampled_from([0, 0, 7]),
        shards=st.sampled_from([1, 1, 3]),
        bad_network=st.booleans(),
    )
    def start(self, size: int, staleness: int, attempts: int, base: int, shards: int, bad_network: bool) -> None:
        limits = {"groups_per_iteration": size, "max_staleness": staleness, "max_attempts": attempts, "iterations": base + 12}
        config = run_config(Path("/nowhere"), **limits, trainer=trainer(orchestrators=shards))
        self.run = self.do(Run.create(self.redis, f"model-{uuid4().hex}", config, {}))
        self.run.scripts = self.scripts = LosingAnswers(self.redis, self.run.run_id)
        self.scripts.bad_network = bad_network
        self.model = LogModel(size, staleness, attempts, base + 12)
        self.checkpoint = base
        self.inherited = {"p0": PassRate(9, 3, -2), "parent": PassRate(4, 4, 4)} if base else {}
        self.learner = None
        self.orchestrators: dict[int, ExperienceLog] = {}
        self.shards = shards
        for number in range(shards):
            self.an_orchestrator_dies(number)
        self.learner_dies()

    @rule(bad=st.booleans())
    def the_network_changes(self, bad: bool) -> None:
        self.scripts.bad_network = bad

    # -- the orchestrators

    @property
    def leader(self) -> ExperienceLog:
        return self.orchestrators[0]

    def maker(self, index: int) -> ExperienceLog:
        """The orchestrator that makes a group."""
        return self.orchestrators[index % self.shards]

    @rule(number=st.integers(0, 2))
    def an_orchestrator_dies(self, number: int) -> None:
        shard = Shard(number % self.shards, self.shards)
        if shard.number in self.orchestrators:
            self.zombies[Writer.ORCHESTRATOR].append(self.orchestrators[shard.number])
        log = self.orchestrators[shard.number] = ExperienceLog(self.run, shard=shard)
        self.do(log.take(Writer.ORCHESTRATOR))
        self.model.set_paused(set(), shard)
        flying = {(a.index, a.attempt, a.version) for a in self.do(log.in_flight(shard))}
        groups = [(index, self.model.groups[index]) for index in self.model.those("admitted") if shard.owns(index)]
        assert flying == {(index, group.attempt, group.version) for index, group in groups}
        drafts = {index: parts for index, parts in self.model.drafts.items() if shard.owns(index)}
        assert self.do(log.partial_rollouts([Admission(*words) for words in flying])) == drafts
        assert self.do(log.next_index()) == len(self.model.groups)

    @rule(most=st.integers(1, 12))
    def admit(self, most: int) -> None:
        async def real() -> list[tuple[int, int, int]]:
            return [(a.index, a.attempt, a.version) for a in await self.leader.admit(most)]

        self.both(real, lambda: self.model.admit(most))

    def pick(self, data: st.DataObject) -> tuple[int, int]:
        """Draws a group and an attempt, mostly one in flight."""
        likely = self.model.those("admitted")
        if likely and data.draw(st.integers(0, 5)):
            index = data.draw(st.one_of(st.just(likely[-1]), st.sampled_from(likely)))  # the newest group often overtakes
        else:
            index = data.draw(st.integers(0, len(self.model.groups)))
        current = self.model.groups[index].attempt if index < len(self.model.groups) else 1
        return index, data.draw(st.sampled_from([current] * 5 + [max(1, current - 1), current + 1]))

    def tally(self, index: int) -> Tally | None:
        """A tally of one of a few prompts, with solved, unsolved and mixed groups; some are not judged."""
        return (
            None if index % 7 == 6 else Tally(f"p{index % 2}", 2 + index % 2, (0, 0, 1, 9, 9)[index // 2 % 5] and 1 + index % 2)
        )

    def append_one(self, index: int, attempt: int, oldest: int) -> None:
        tally = self.tally(index)

        def model() -> bool:
            added = self.model.append(index, attempt, oldest, tally and astuple(tally))
            return added and not self.scripts.bad_network  # a repeated append finds an existing group

        self.both(lambda: self.maker(index).append(index, attempt, b"group %d" % index, oldest, 0.5, tally), model)

    def drop_one(self, index: int, attempt: int, scored: bool) -> None:
        tally = self.tally(index) if scored else None

        def model() -> bool:
            dropped = self.model.drop(index, attempt, tally and astuple(tally))
            return dropped and not self.scripts.bad_network

        if scored:
            self.both(lambda: self.maker(index).drop(index, attempt, "all scores are equal", 1.0, tally), model)
        else:
            self.both(lambda: self.maker(index).skip(index, attempt, "never solved"), model)

    def fail_one(self, index: int, attempt: int) -> None:
        async def real() -> tuple[int, int, int] | None:
            admission = await self.maker(index).readmit(index, attempt, "the replica died", self.model.max_attempts)
            return admission and (admission.index, admission.attempt, admission.version)

        self.both(real, lambda: self.model.readmit(index, attempt))

    @rule(data=st.data(), outcome=st.sampled_from(["append", "append", "append", "drop", "skip", "fail", "fail"]))
    def a_group_ends(self, data: st.DataObject, outcome: str) -> None:
        index, attempt = self.pick(data)
        if outcome == "append":
            admitted = self.model.groups[index].version if index < len(self.model.groups) else 0
            self.append_one(index, attempt, data.draw(st.integers(max(0, admitted - 1), max(admitted, self.model.version))))
        elif outcome in ("drop", "skip"):
            self.drop_one(index, attempt, scored=outcome == "drop")
        else:
            self.fail_one(index, attempt)

    @rule(data=st.data(), ahead=st.sampled_from([0, 0, 0, 1, -1, -2]), size=st.integers(1, 3))
    def groups_get_longer(self, data: st.DataObject, ahead: int, size: int) -> None:
        index, attempt = self.pick(data)
        number = max(0, len(self.model.drafts.get(index, [])) + ahead)
        part = b"%d" % size
        self.both(
            lambda: self.maker(index).save_partial_rollouts([PartialRolloutPart(index, attempt, number, part)]),
            lambda: self.model.draft(index, attempt, number, part),
        )

    @rule(data=st.data(), number=st.integers(0, 2))
    def groups_pause(self, data: st.DataObject, number: int) -> None:
        paused = data.draw(st.sets(st.integers(0, len(self.model.groups))))
        log = self.orchestrators[number % self.shards]
        self.both(lambda: log.set_paused(paused), lambda: self.model.set_paused(paused, log.shard))
        assert self.do(log.unplanned()).paused == (self.model.paused if self.shards > 1 else set())

    @rule(newest_first=st.booleans(), leave=st.integers(0, 2))
    def most_groups_end(self, newest_first: bool, leave: int) -> None:
        """Appends all groups in flight except `leave`, which become stragglers."""
        flying = self.model.those("admitted")
        for index in (flying[::-1] if newest_first else flying)[: max(0, len(flying) - leave)]:
            self.append_one(index, self.model.groups[index].attempt, self.model.groups[index].version)

    # -- the learner

    @rule()
    def learner_dies(self) -> None:
        if self.learner is not None:
            self.zombies[Writer.LEARNER].append(self.learner)
        self.learner = ExperienceLog(self.run)
        self.do(self.learner.take(Writer.LEARNER))
        self.both(lambda: self.learner.begin(self.checkpoint, self.inherited), lambda: self.model.begin(self.checkpoint))

    def plan(self, iteration: int, expire: bool) -> list[int] | None:
        async def real() -> list[int] | None:
            found = await self.learner.plan(iteration, AT_ONCE if expire else FOREVER)
            return found and list(found.indices)

        if expire:
            self.scripts.bad_network = False  # with a timeout of 0, a repeated check would also expire the next attempt
        return self.both(real, lambda: self.model.plan(iteration, expire))

    @rule(expire=st.sampled_from([False, False, True]), crash=st.sampled_from([False, False, True]))
    def train(self, expire: bool, crash: bool) -> None:
        """Trains one iteration, unless its plan must wait. The learner may die before it records the version."""
        iteration = self.model.version + 1
        indices = self.plan(iteration, expire)
        if indices is None:
            return
        assert self.do(self.learner.read(Plan(iteration, tuple(indices)))) == [b"group %d" % index for index in indices]
        for index in indices:
            assert iteration - 1 - self.model.groups[index].version <= self.model.staleness
        if not crash:
            self.both(lambda: self.learner.set_version(iteration), lambda: self.model.set_version(iteration))

    @rule(release=st.booleans())
    def save(self, release: bool) -> None:
        self.checkpoint = self.model.version
        if release:
            self.both(lambda: self.learner.release(self.checkpoint), lambda: self.model.release(self.checkpoint))

    @rule(stragglers=st.integers(0, 2), newest_first=st.booleans())
    def an_iteration_passes(self, stragglers: int, newest_first: bool) -> None:
        self.admit(self.model.size * (self.model.staleness + 1))
        self.most_groups_end(newest_first, stragglers)
        self.train(expire=False, crash=False)

    @rule(kind=st.sampled_from(["plan", "version", "begin", "release"]), by=st.sampled_from([-3, -2, -1, 1, 2, 3]))
    def the_learner_is_confused(self, kind: str, by: int) -> None:
        model = self.model
        if kind == "plan":
            self.plan(model.planned + 1 + abs(by), False)
        elif kind == "version" and by != 1:
            self.both(lambda: self.learner.set_version(model.version + by), lambda: model.set_version(model.version + by))
        elif kind == "release" and by > 0:
            self.both(lambda: self.learner.release(model.version + by), lambda: model.release(model.version + by))
        elif kind == "begin" and model.plans:
            version = model.released + by if by < 0 else model.planned + by
            self.both(lambda: self.learner.begin(version), lambda: model.begin(version))

    # -- processes that must not write

    @precondition(lambda self: any(self.zombies.values()))
    @rule(data=st.data())
    def a_zombie_acts(self, data: st.DataObject) -> None:
        orchestrator = data.draw(st.sampled_from(self.zombies[Writer.ORCHESTRATOR] or [None]))
        learner = data.draw(st.sampled_from(self.zombies[Writer.LEARNER] or [None]))
        index = data.draw(st.sampled_from(self.model.those("admitted") or [0]))
        attempt = self.model.groups[index].attempt if self.model.groups else 1
        version = self.model.version
        acts: list[Callable[[], Awaitable[Any]]] = []
        if orchestrator:
            acts += [
                orchestrator.admit,
                lambda: orchestrator.append(index, attempt, b"zombie", version, 0.0),
                lambda: orchestrator.drop(index, attempt, "zombie", 0.0),
                lambda: orchestrator.save_partial_rollouts([PartialRolloutPart(index, attempt, 0, b"zombie")]),
                lambda: orchestrator.readmit(index, attempt, "zombie", 1),
                lambda: orchestrator.set_paused({index}),
            ]
        if learner:
            acts += [
                lambda: learner.begin(version),
                lambda: learner.plan(version + 1, AT_ONCE),
                lambda: learner.set_version(version + 1),
                lambda: learner.release(version),
                lambda: learner.ack_commit("replica", version, 1, 0.0, 0.0),
            ]
        with pytest.raises(StaleTermError):
            self.do(data.draw(st.sampled_from(acts))())

    # -- invariants

    @invariant()
    def the_log_is_the_model(self) -> None:
        model, log = self.model, self.do(LogSnapshot.take(self.run))
        third = {"admitted": "version", "appended": "version", "planned": "version"}
        assert len(log.rows) == len(model.groups)
        for index, group in enumerate(model.groups):
            row = log.rows[index]
            assert (row[0], int(row[1])) == (group.state, group.attempt)
            if group.state in third:
                assert int(row[2]) == group.version
            if group.state == "admitted":
                assert (row[3] == "paused") == (index in model.paused)
        assert log.plans == model.plans
        assert log.payloads == model.payloads()
        assert {name: int(head.split()[1]) for name, head in log.partial_rollouts.items() if ":" not in name} == {
            str(index): len(parts) for index, parts in model.drafts.items()
        }
        assert log.number("version", -1) == model.version
        assert log.number("low_water", 0) == model.low_water
        self.pass_rates_are_the_models()
        audit = log.audit()
        assert audit.clean, audit

    def pass_rates_are_the_models(self) -> None:
        expected = {prompt: PassRate(*numbers) for prompt, numbers in self.model.pass_rates().items()}
        for prompt, before in self.inherited.items():
            own = expected.get(prompt, PassRate())
            groups = self.model.judged.get(prompt, [])
            unbroken = own.streak and abs(own.streak) == own.samples and (own.streak < 0) == (before.streak < 0)
            streak = own.streak + before.streak if unbroken or not groups else own.streak
            expected[prompt] = PassRate(before.samples + own.samples, before.solved + own.solved, streak)
        assert self.do(self.leader.pass_rates()) == expected

    def teardown(self) -> None:
        """A healthy orchestrator and learner continue to the end of the run: no wait lasts forever, and every group is settled."""
        try:
            if hasattr(self, "model"):
                self.scripts.bad_network = False
                while self.model.version < self.model.iterations:
                    self.admit(self.model.size * (self.model.staleness + 1))
                    for index in self.model.those("admitted"):
                        group = self.model.groups[index]
                        self.append_one(index, group.attempt, group.version)
                        assert group.state == "appended"
                    before = self.model.version
                    self.train(expire=False, crash=False)
                    assert self.model.version == before + 1
                assert not self.model.those("admitted") and not self.model.those("appended")
                self.save(release=True)
                self.the_log_is_the_model()
                assert self.model.low_water == len(self.model.groups)
        finally:
            self.do(self.redis.aclose())
            self.runner.close()


@pytest.mark.parametrize("examples", [12, pytest.param(1500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_the_log_does_what_its_reference_does(redis_url: str, examples: int) -> None:
    run_state_machine_as_test(
        lambda: LogMachine(redis_url),
        settings=settings(
            max_examples=examples, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
        ),
    )
