"""The driver of a storm: applies the faults of a schedule to a run, one after another, and repairs their damage.

It observes phases through proxies between the processes and Redis, which let it act before a command arrives, after its answer is lost,
or a little later. The caller checks the run at the end.
"""

import asyncio
import os
import random
import re
import signal
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from polyreme.errors import PolyremeError, StaleTermError
from polyreme.experience.audit import LogSnapshot
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.run import Run, RunState
from polyreme.process.lifecycle import Child
from polyreme.process.supervisor import last_error
from support.faults import PHASES, Fault, script_digest
from support.finished import Finished, finished_episodes
from support.nursery import Born, Nursery
from support.processes import command_line, runs
from support.proxy import Proxy, at_port, bad_network, port_of

STALL = 300.0
"""Seconds without a new sample after which the run counts as stuck."""
DEFERRALS = 100
"""Number of faults that may find their victim down."""


@dataclass
class Part:
    """One process of the run with its own connection to Redis. It is restarted when it ends.

    `forked`: forked from the nursery; otherwise a new interpreter, which is required for processes that fork or import torch.
    `drained`: the process that was asked to end.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    proxy: Proxy
    log: Path
    born: Born | None = None
    forked: bool = True
    pause: float = 0.0
    drained: Born | None = None
    ends: Counter[str] = field(default_factory=Counter)


class Storm:
    """A run under faults. Create one with `simulated_storm` or `real_storm`.

    Args:
        patience: timeout in seconds for a phase, or for a process that is down.

    Attributes:
        done: faults by (victim, phase), with victims without their numbers.
        recoveries: by (victim, action), seconds from the fault to the next append.
        finished: episodes that were in the log when an orchestrator was killed, by group, attempt and number.
        problems: descriptions of violations.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        nursery: Nursery,
        server: EmbeddedServer,
        rng: random.Random,
        proxies: AsyncExitStack,
        patience: float,
    ) -> None:
        self.run, self.folder, self.nursery, self._server, self._rng = run, folder, nursery, server, rng
        self._proxies, self._patience = proxies, patience
        self.parts: dict[str, Part] = {}
        self._links: dict[str, Proxy] = {}
        self.done: Counter[tuple[str, str]] = Counter()
        self.unseen = 0
        self.recoveries: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.problems: list[str] = []
        self.finished: dict[tuple[int, int, int], Finished] = {}
        self.notes: list[str] = []
        self._waiting: list[tuple[str, str, float]] = []
        self._armed: tuple[Fault, asyncio.Event] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._mending: set[asyncio.Task[None]] = set()
        self._reapers: list[asyncio.Task[None]] = []
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._append = re.compile(re.escape(script_digest("append")))
        self.appends = 0
        self.last_append = time.monotonic()
        self._redis_is_away = self._stopped = False
        self._began = time.monotonic()
        self.later(self.watch())

    # -- processes

    async def start(self, name: str, module: str, *arguments: str, forked: bool = True) -> None:
        """Starts `python -m module arguments`, and restarts it whenever it fails."""
        proxy = await self._proxies.enter_async_context(bad_network("127.0.0.1", port_of(self._server.url)))

        async def listen(data: bytes) -> None:
            try:
                await self._heard(name, data)
            except Exception as error:  # noqa: BLE001 - else it would only break a connection
                self.problems.append(f"the driver failed: {error!r}")

        proxy.listener = listen
        part = self.parts[name] = Part(name, module, arguments, proxy, self.folder / f"{name}.log", forked=forked)
        part.born = await self._spawn(part)
        self._keepers[name] = asyncio.create_task(self._keep(part))

    async def link(self, name: str, port: int) -> int:
        """A proxy port through which others reach `port` of a process. The link can be cut."""
        self._links[name] = await self._proxies.enter_async_context(bad_network("127.0.0.1", port))
        return self._links[name].port

    async def end(self, name: str) -> None:
        """Kills a process permanently, with SIGKILL."""
        keeper = self._keepers.pop(name)
        keeper.cancel()
        with suppress(asyncio.CancelledError):
            await keeper
        part = self.parts.pop(name)
        assert part.born is not None
        part.born.signal(signal.SIGKILL)
        await part.born.over.wait()

    async def _spawn(self, part: Part) -> Born:
        url = at_port(self._server.url, part.proxy.port)
        environment = {"POLYREME_REDIS": url, "POLYREME_RUN": self.run.run_id}
        if part.forked:
            return await self.nursery.spawn(part.module, part.arguments, environment, part.log)
        child = Child.spawn(part.name, (sys.executable, "-m", part.module, *part.arguments), environment, part.log)
        born = Born(child.pid)

        async def reap() -> None:
            born.status = await child.wait()
            born.over.set()

        self._reapers.append(asyncio.create_task(reap()))
        return born

    async def _keep(self, part: Part) -> None:
        while True:
            born = part.born
            assert born is not None
            await born.over.wait()
            if part.born is not born:
                continue
            if born.status == 0 and part.drained is not born:
                return
            if not part.forked:
                born.end_group()
            if born.status not in (0, -signal.SIGKILL):
                self._note(f"{part.name} ended with {born.status}: {self._last_words(part)}")
                part.ends[f"{born.status}"] += 1
            await asyncio.sleep(part.pause or 0.05)
            part.pause = 0.0
            part.born = await self._spawn(part)

    def _last_words(self, part: Part) -> str:
        with open(part.log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            return last_error(log.read().decode(errors="replace"))[:300]

    def _note(self, text: str) -> None:
        self.notes.append(f"{time.monotonic() - self._began:7.2f} {text}")

    # -- observations

    async def _heard(self, sender: str, data: bytes) -> None:
        if self._append.search(data):
            now = time.monotonic()
            if now - self.last_append > 4.0:
                self._note(f"there was no new sample for {now - self.last_append:.1f} s")
            self.appends, self.last_append = self.appends + 1, now
            for victim, action, since in self._waiting:
                self.recoveries[victim, action].append(now - since)
            self._waiting.clear()
        armed = self._armed
        if armed is None:
            return
        fault, fired = armed
        phase = PHASES[fault.phase]
        if sender not in (phase.sender, "supervisor") or not phase.pattern.search(data):
            return
        self._armed = None
        if fault.moment == "before":
            await self._strike(fault)
        elif fault.moment == "lost":
            self.parts[sender].proxy.lose += 1
            self._later(0.002, fault)
        else:
            self._later(fault.delay, fault)
        fired.set()

    def scored(self) -> None:
        armed = self._armed
        if armed and PHASES[armed[0].phase].sender == "reward":
            self._armed = None
            self._later(armed[0].delay, armed[0])
            armed[1].set()

    def _later(self, delay: float, fault: Fault) -> None:
        async def strike() -> None:
            await asyncio.sleep(delay)
            await self._strike(fault)

        self._mend(strike())

    def later(self, work: Any) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _mend(self, work: Any) -> None:
        self._mending.add(self.later(work))

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        self._mending.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.problems.append(f"the driver failed: {error!r}")

    # -- actions

    async def rage(self, faults: Sequence[Fault]) -> int:
        """Applies the faults, one after the other, until all are done or the run has ended. Returns their number."""
        left, number, deferred = deque(faults), 0, Counter[str]()
        while left:
            fault = left.popleft()
            await asyncio.sleep(fault.gap)
            if not await self._victim_is_up(fault.victim):
                if self._run_is_over():
                    return number
                self._note(f"{fault.victim} is down: its {fault.action} comes later")
                deferred[fault.victim] += 1
                if deferred[fault.victim] > DEFERRALS:
                    self.problems.append(f"{fault.victim} does not come up")
                    return number
                left.append(fault)
                continue
            number += 1
            self._armed = fault, asyncio.Event()
            fired = self._armed[1]
            try:
                await asyncio.wait_for(fired.wait(), self._patience)
            except TimeoutError:
                if self._run_is_over():
                    return number
                self._armed = None
                self.unseen += 1
                await self._strike(fault, phase="(none seen)")
            if time.monotonic() - self.last_append > STALL:
                self.problems.append(f"no new sample in {STALL:.0f} s")
                return number
        return number

    async def watch(self) -> None:
        """Records what the run waits for while there are no samples."""
        while True:
            await asyncio.sleep(1.0)
            if time.monotonic() - self.last_append > 3.0:
                with suppress(PolyremeError):
                    snapshot = await LogSnapshot.take(self.run)
                    flying, appended = len(snapshot.in_flight), len(snapshot.appended)
                    where = f"version {snapshot.number('version', -1)}, plans {len(snapshot.plans)}"
                    self._note(f"stalled at {where}, in flight {flying}, appended {appended}, {snapshot.meta['state']}")

    def _run_is_over(self) -> bool:
        names = ("supervisor",) if "supervisor" in self.parts else ("learner", "orchestrator")
        return all(self.parts[name].born.status == 0 for name in names)  # type: ignore[union-attr]

    async def _victim_is_up(self, victim: str) -> bool:
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            if not self._redis_is_away if victim == "redis" else self.pid(victim) is not None:
                return True
            await asyncio.sleep(0.02)
        return False

    def pid(self, victim: str) -> int | None:
        """The pid of a running process, for `address` that of its server; None while it is down."""
        victim = "environment" if victim == "address" else victim
        if victim == "worker":  # of the environment server, or the process that starts them
            server = self.pid("environment")
            with suppress(psutil.Error):
                workers = (
                    [child.pid for child in psutil.Process(server).children(recursive=True) if runs(child)] if server else []
                )
                return self._rng.choice(workers) if workers else None
            return None
        if victim in self.parts:
            born = self.parts[victim].born
            return born.pid if born is not None and born.status is None else None
        supervisor = self.parts["supervisor"].born
        if supervisor is None or supervisor.status is not None:
            return None
        with suppress(psutil.Error):
            running = [child for child in psutil.Process(supervisor.pid).children() if runs(child)]
            ours = [
                child.pid for child in running if any(word.endswith((f".{victim}", f"_{victim}")) for word in command_line(child))
            ]
            return self._rng.choice(ours) if ours else None  # a learner has several ranks
        return None

    async def _strike(self, fault: Fault, phase: str = "") -> None:
        kind = fault.victim.rstrip("-0123456789")
        if fault.victim == "redis" and self._redis_is_away:
            self._note("redis is away: it is not hit twice")
            return
        self._note(str(fault))
        self.done[kind, phase or fault.phase] += 1
        self._waiting.append((kind, fault.action, time.monotonic()))
        if fault.victim == "redis":
            self._redis_is_away = True
            os.kill(self._server.pid, signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
            self._mend(self._bring_redis_back(fault))
            return
        if fault.victim == "address":  # at the environment server, which goes on without it
            self._links["address"].refuse()
            self._mend(self._heal(self._links["address"], fault.seconds))
            return
        if fault.victim == "orchestrator" and not self._redis_is_away:
            with suppress(PolyremeError):
                self.finished |= await finished_episodes(self.run)
        pid, owner = self.pid(fault.victim), "environment" if fault.victim == "worker" else fault.victim
        part = self.parts.get(owner) or self.parts["supervisor"]
        if pid is None:
            self._note(f"{fault.victim} has just ended by itself")
            return
        match fault.action:
            case "kill":
                part.pause = fault.seconds
                with suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(pid, signal.SIGKILL)
            case "term":
                part.pause, part.drained = fault.seconds, part.born
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            case "stop":
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                self._mend(self._continue(pid, fault.seconds))
            case "cut":
                ways = [part.proxy, *filter(None, [self._links.get(part.name)])]  # links to Redis, and from its clients
                way = self._rng.choice(ways)
                way.hold() if self._rng.random() < 0.5 else way.refuse()
                self._mend(self._heal(way, fault.seconds))
            case "usurp":
                self._mend(self._usurp(part, fault.seconds))

    async def _bring_redis_back(self, fault: Fault) -> None:
        await asyncio.sleep(fault.seconds)
        if fault.action == "stop":
            os.kill(self._server.pid, signal.SIGCONT)
        else:
            while self._server.alive:  # noqa: ASYNC110 (a process gives no event)
                await asyncio.sleep(0.005)
            await self._server.restart()
        self._redis_is_away = False

    async def _continue(self, pid: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def _heal(self, way: Proxy, seconds: float) -> None:
        await asyncio.sleep(seconds)
        way.heal()

    async def _usurp(self, part: Part, seconds: float) -> None:
        """Starts a second process that takes over the role of a stopped one, which must then end by itself."""
        old = part.born
        assert old is not None
        old.signal(signal.SIGSTOP)
        part.born = await self._spawn(part)
        # It waits for the end of the old one, and the new one may be killed before it takes over.
        self._keepers[part.name].cancel()
        self._keepers[part.name] = asyncio.create_task(self._keep(part))
        await asyncio.sleep(seconds)
        old.signal(signal.SIGCONT)
        try:
            await asyncio.wait_for(old.over.wait(), 300.0)
        except TimeoutError:
            old.signal(signal.SIGKILL)
            self.problems.append(f"{part.name} went on for 300 s after it was taken over")
        else:
            part.ends[f"usurped: {old.status}"] += 1
            if old.status not in (StaleTermError.exit_code, -signal.SIGKILL, 0):
                self._note(f"{part.name}, taken over, ended with {old.status}: {self._last_words(part)}")

    async def running(self, seconds: float) -> None:
        """Waits until samples arrive."""
        async with asyncio.timeout(seconds):
            while not self.appends:  # noqa: ASYNC110 (it is seen on the wire)
                await asyncio.sleep(0.1)

    async def calm(self) -> None:
        """Restores all links. Killed processes are restarted."""
        while tasks := set(self._mending):
            await asyncio.wait(tasks)
        self._armed = None
        for way in (*(part.proxy for part in self.parts.values()), *self._links.values()):
            way.heal()

    async def wait(self, seconds: float) -> RunState:
        """Waits until the supervisor has ended the run. Returns its state."""
        keeper = self._keepers["supervisor"]
        done, _ = await asyncio.wait({keeper}, timeout=seconds)
        state, reason = await self.run.state()
        if not done:
            self.problems.append(f"the run is {state} after {seconds:.0f} s of calm")
        if reason and not (self._stopped and state is RunState.STOPPED):
            self.problems.append(f"the run is {state}: {reason}")
        return state

    def stop(self) -> None:
        """Asks the supervisor to end the run early: it saves and drains."""
        born = self.parts["supervisor"].born
        assert born is not None
        self._stopped = True
        born.signal(signal.SIGTERM)

    async def close(self) -> None:
        for task in (*self._background, *self._keepers.values()):
            task.cancel()
        await asyncio.gather(*self._background, *self._keepers.values(), return_exceptions=True)
        for part in self.parts.values():
            if part.born is not None:
                part.born.end_group()
        await asyncio.gather(*self._reapers)
