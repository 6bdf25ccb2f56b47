"""The device lease on a real server, compared with a plain model. Holders are late or die between any commands, and any answer is lost."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from polyreme.errors import UnavailableError
from polyreme.experience.device_lease import DeviceLease, Use, trains
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import Run
from polyreme.experience.scripts import Scripts, StaleGrantError
from polyreme.experience.store import connect
from support.configs import run_config
from support.waiting import until

LONG, SHORT = 1000.0, 0.001


async def test_the_devices_change_hands(run: Run) -> None:
    replica, learner = DeviceLease(run, "generate", "r", LONG), DeviceLease(run, "train", "l", LONG)
    first = await replica.acquire()
    assert replica.usable and not first.wanted and first.version == -1
    assert await learner.ask() is None and await trains(run)
    holding = asyncio.create_task(replica.hold())
    await asyncio.wait_for(holding, 300)  # the claim ends it
    assert replica.usable  # until it releases the devices
    taking = asyncio.create_task(learner.acquire())
    await replica.give_up()
    trained = await asyncio.wait_for(taking, 300)
    assert trained.counter > first.counter and not replica.usable and await replica.ask() is None
    await learner.give_up()
    again = await asyncio.wait_for(replica.acquire(), 300)
    assert again.counter > trained.counter and not await trains(run)


async def test_a_grant_names_the_learners_version(run: Run) -> None:
    log = ExperienceLog(run)
    await log.take(Writer.LEARNER)
    await log.begin(3)
    assert (await DeviceLease(run, "generate", "r").acquire()).version == 3


async def test_a_claim_ends_the_wait_of_a_holder_at_once_however_long_its_ttl(run: Run) -> None:
    replica = DeviceLease(run, "generate", "r", LONG)
    await replica.acquire()
    holding = asyncio.create_task(replica.hold())
    assert await DeviceLease(run, "train", "l", LONG).ask() is None
    await asyncio.wait_for(holding, 300)


async def test_a_dead_holders_grant_ends_and_its_counter_is_refused(run: Run) -> None:
    dead, learner = DeviceLease(run, "generate", "dead", SHORT), DeviceLease(run, "train", "l", LONG)
    await dead.acquire()
    await asyncio.wait_for(learner.acquire(), 300)
    with pytest.raises(StaleGrantError):
        await dead.ask()
    assert not dead.usable
    await dead.give_up()  # does not end another holder's grant
    assert await learner.ask() is not None


async def test_a_grant_outlives_its_deadline_while_nobody_needs_the_devices(run: Run) -> None:
    late = DeviceLease(run, "generate", "late", SHORT)
    first = await late.acquire()
    await asyncio.sleep(5 * SHORT)
    assert not late.usable
    assert (await late.ask() or first).counter == first.counter


async def test_an_inherited_grant_is_usable_after_its_first_renewal(run: Run) -> None:
    first = await DeviceLease(run, "generate", "r", LONG).acquire()
    heir = DeviceLease(run, "generate", "r", LONG, first.counter)
    assert not heir.usable  # the age of the grant is unknown
    assert (await heir.acquire()).counter == first.counter and heir.usable


async def test_work_between_two_turns_keeps_the_grant(run: Run) -> None:
    replica, learner = DeviceLease(run, "generate", "r", 0.6), DeviceLease(run, "train", "l", LONG)
    await replica.acquire()
    assert await learner.ask() is None
    ended = asyncio.Event()
    leaving = asyncio.create_task(replica.renew_during(ended.wait()))
    before = (await run.redis.hget(run.key("device"), "generate:r")).split()[1]

    async def renewed() -> bool:
        return bool((await run.redis.hget(run.key("device"), "generate:r")).split()[1] > before)

    await until(renewed)
    ended.set()
    await leaving


async def test_work_that_has_ended_does_not_wait_for_a_renewal(run: Run) -> None:
    class Unanswered(Scripts):
        async def call(self, *args: Any, **keys: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

    asked = asyncio.Event()
    replica = DeviceLease(run, "generate", "r", 0.03)
    await replica.acquire()
    run.scripts = Unanswered(run.redis, run.run_id)
    await asyncio.wait_for(replica.renew_during(asked.wait()), 300)


async def test_a_wait_ends_and_names_who_holds_the_devices(run: Run) -> None:
    await DeviceLease(run, "generate", "the-replica", LONG).acquire()
    with pytest.raises(UnavailableError) as raised:
        await DeviceLease(run, "train", "l", LONG).acquire(within=0.01)
    assert "the-replica" in raised.value.found
    assert not await trains(run)  # the claim is removed


async def test_a_holder_stops_at_its_deadline_when_redis_is_gone(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "redis") as server:
        redis = await connect(server.url)
        run = await Run.create(redis, "r", run_config(tmp_path), {})
        replica = DeviceLease(run, "generate", "r", ttl=1.0)
        await replica.acquire()
        server.stop()
        await asyncio.wait_for(replica.hold(), 300)  # the client itself would wait a minute for Redis
        assert not replica.usable
        await redis.aclose()


class Stale(Exception):
    """StaleGrantError in the real lease."""


@dataclass
class Entry:
    counter: int  # 0: a claim
    alive: bool = True


class Model:
    """The lease as plain Python."""

    def __init__(self) -> None:
        self.counter, self.entries = 0, dict[tuple[Use, str], Entry]()

    def ask(self, use: Use, name: str, counter: int, alive: bool) -> int:
        me = (use, name)
        mine = self.check(me, counter)
        rivals = [key for key in self.entries if key != me and (use == "train" or key[0] == "train")]
        for key in rivals:
            if not self.entries[key].alive:
                del self.entries[key]
        rivals = [key for key in rivals if key in self.entries]
        if mine is None or not mine.counter:
            if rivals and (use == "generate" or any(key[0] == "train" for key in rivals)):
                return 0
            if not rivals:
                self.counter += 1
            self.entries[me] = Entry(0 if rivals else self.counter)
        self.entries[me].alive = alive
        return self.entries[me].counter

    def give(self, use: Use, name: str, counter: int) -> None:
        self.check((use, name), counter)
        self.entries.pop((use, name), None)

    def check(self, me: tuple[Use, str], counter: int) -> Entry | None:
        mine = self.entries.get(me)
        if counter and (mine is None or mine.counter != counter):
            raise Stale
        return mine


class LosingAnswers(Scripts):
    """Loses every answer once, so that the client sends the same command again."""

    async def call(self, name: str, *args: Any, **keys: Any) -> Any:
        if args[0] == "ask":
            await super().call(name, *args, **keys)
        return await super().call(name, *args, **keys)


HOLDERS: list[tuple[Use, str]] = [("train", "l1"), ("train", "l2"), ("generate", "r1"), ("generate", "r2")]


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self, redis_url: str, folder: Path) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis, self.folder = self.do(connect(redis_url)), folder

    def do(self, work: Awaitable[Any]) -> Any:
        async def main() -> Any:
            return await work

        return self.runner.run(main())

    @initialize()
    def begin(self) -> None:
        self.run = self.do(Run.create(self.redis, f"model-{uuid4().hex[:12]}", run_config(self.folder), {}))
        self.run.scripts = LosingAnswers(self.redis, self.run.run_id)
        self.model = Model()
        self.leases = {holder: DeviceLease(self.run, *holder, ttl=LONG) for holder in HOLDERS}

    @rule(holder=st.sampled_from(HOLDERS), alive=st.booleans())
    def ask(self, holder: tuple[Use, str], alive: bool) -> None:
        """Renews a grant. `alive`: whether the deadline is not reached before the renewal is checked."""
        lease = self.leases[holder]
        counter = lease.grant.counter if lease.grant else 0
        lease._ttl = LONG if alive else 0.0
        try:
            expected = self.model.ask(*holder, counter, alive)
        except Stale:
            with pytest.raises(StaleGrantError):
                self.do(lease.ask())
            return
        found = self.do(lease.ask())
        assert (found.counter if found else 0) == expected

    @rule(holder=st.sampled_from(HOLDERS))
    def give_up(self, holder: tuple[Use, str]) -> None:
        lease = self.leases[holder]
        with suppress(Stale):
            self.model.give(*holder, lease.grant.counter if lease.grant else 0)
        self.do(lease.give_up())

    @rule(holder=st.sampled_from(HOLDERS))
    def restart(self, holder: tuple[Use, str]) -> None:
        """Kills the process. Its successor has another name."""
        use, _ = holder
        if (entry := self.model.entries.pop(holder, None)) is not None:
            self.do(self.redis.hset(self.run.key("device"), f"{use}:dead-{uuid4().hex}", f"{entry.counter} 0"))
            self.do(self.redis.hdel(self.run.key("device"), ":".join(holder)))
        self.leases[holder] = DeviceLease(self.run, *holder, ttl=LONG)

    @invariant()
    def training_excludes_all_else(self) -> None:
        if not hasattr(self, "model"):
            return
        stored = self.do(self.redis.hgetall(self.run.key("device")))
        stored.pop(b"counter", None)
        granted = [name for name, entry in stored.items() if not entry.startswith(b"0 ") and not entry.endswith(b" 0")]
        granted = [name for name in granted if self.alive(name.decode())]
        assert len(granted) <= 1 or all(name.startswith(b"generate:") for name in granted)

    def alive(self, name: str) -> bool:
        use, _, holder = name.partition(":")
        return any(key == (use, holder) and entry.alive for key, entry in self.model.entries.items())

    def teardown(self) -> None:
        self.do(self.redis.aclose())
        self.runner.close()


def test_the_lease_is_its_model(redis_url: str, tmp_path: Path) -> None:
    chosen = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(lambda: LeaseMachine(redis_url, tmp_path), settings=chosen)  # type: ignore[arg-type]
