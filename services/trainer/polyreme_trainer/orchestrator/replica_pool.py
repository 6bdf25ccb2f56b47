"""The rollout replicas that are there, the versions they serve, and who may use which.

Invariant: the targets are the live leases whose API number is ours; every claim on one gives its promised tokens back when it ends.
Work waits here and not in a replica: it is handed out where there is room, for the oldest policy version first, then to the first come.
So replicas end at the same time however long their answers, one that joins gets work at once, one that stalls holds only what it runs.
"""

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from polyreme.api.v1 import rollout_pb2, rollout_pb2_grpc
from polyreme.config.security import SecurityConfig
from polyreme.errors import UnavailableError
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run
from polyreme.net import rpc
from polyreme_trainer.orchestrator.idle_time import Idleness
from polyreme_trainer.orchestrator.live_servers import Servers
from polyreme_trainer.orchestrator.router import Target, choose, quarantine_for, rest_after
from polyreme_trainer.orchestrator.straggler_detection import Pace, laggards

_log = logging.getLogger(__name__)

WATCH_SECONDS = 0.5
LOOKS = 10
"""How often, while somebody waits, it is looked in the time of the patience whether there is hope."""


@dataclass(eq=False)
class Claim:
    """The right to call one replica, and the tokens promised to it by that.

    Attributes:
        slots: samples that have not ended there.
        pace: of the replica.
        since: when it was made, monotonic seconds.
        on_room: called when the replica has room for others.
        is_cut: whether the replica must not be called any more.
        deadline: of the running call; it is brought forward when the replica's lease ends, or it falls behind.
    """

    target: Target
    stub: rollout_pb2_grpc.RolloutServiceStub
    tokens: int
    slots: int
    pace: Pace
    since: float
    on_room: Callable[[], None]
    deadline: asyncio.Timeout | None = None
    is_cut: bool = False
    _chunk_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.target.outstanding += self.tokens
        self.target.slots += self.slots
        self.pace.change(self.slots, self.since)

    def arrived(self, tokens: int, missing: int, response: rollout_pb2.GenerateResponse, now: float) -> None:
        """A response came, with so many tokens; so many at most are still missing."""
        self.target.outstanding -= self.tokens - missing
        self.tokens = missing
        self.target.failures = 0
        self.pace.came(tokens, now)
        if not self._chunk_at:
            self.pace.first_after(now - self.since)
        for chunk in response.chunks:
            if (before := self._chunk_at.get(chunk.slot)) is not None:
                self.pace.chunk_after(now - before)
            self._chunk_at[chunk.slot] = now
        if response.ends:
            self._ended(len(response.ends), now)

    def end(self, now: float) -> None:
        """Gives back what is left of the promise."""
        self.target.outstanding -= self.tokens
        self._ended(self.slots, now)

    def cut(self) -> None:
        """Ends the running call, or one that has not begun yet."""
        self.is_cut = True
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule(asyncio.get_running_loop().time())

    def failed(self) -> None:
        """Leaves the replica alone for a while."""
        self.target.failures += 1
        rest = rest_after(self.target.failures, random.random())
        self.target.resting_until = time.monotonic() + rest
        _later(rest, self.on_room)

    def _ended(self, slots: int, now: float) -> None:
        self.slots -= slots
        self.target.slots -= slots
        self.pace.change(-slots, now)
        self.on_room()


@dataclass(eq=False)
class _Waiting:
    """Somebody who wants a claim; `claim` has it when it is there."""

    tokens: int
    slots: int
    avoid: Set[str]
    claim: asyncio.Future[Claim]


class Fleet:
    """Replicas by lease and commit.

    Args:
        patience: seconds without a usable replica after which the run cannot go on.
        security: of the replicas' ports.
        room: samples that a replica decodes at once.

    Attributes:
        held: the version that replicas are kept at for its evaluation; None: they follow the newest.
        idleness: of the replicas.
    """

    def __init__(self, run: Run, log: ExperienceLog, patience: float, room: int, security: SecurityConfig | None = None) -> None:
        self._security = security
        self._run, self._log, self._patience, self._room = run, log, patience, room
        self._servers = Servers(run, "rollout")
        self._targets: dict[str, Target] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, rollout_pb2_grpc.RolloutServiceStub] = {}
        self._paces: dict[str, Pace] = {}
        self._claims: set[Claim] = set()
        self._served: dict[str, tuple[int, int]] = {}
        self._stalls: dict[str, float] = {}
        self._term, self._published = 0, -1
        self._last_commit = "0"
        self._waiting: dict[int, deque[_Waiting]] = {}  # by min_version
        self.held: int | None = None
        self.idleness = Idleness(time.monotonic())

    def __len__(self) -> int:
        return len(self._targets)

    async def wait_for(self, count: int) -> None:
        """Waits for `count` replicas. Raises UnavailableError: they did not come within the fleet's patience."""
        await self._servers.wait_for(count, self._patience, "rollout.start_timeout")

    async def refresh(self) -> None:
        """Brings the targets in line with the leases and the commits. Calls on a replica whose lease has ended are ended."""
        leases = await self._servers.live()
        self._published = await self._log.version()
        for gone in self._targets.keys() - leases.keys():
            _log.warning("replica %s left", gone)
            await self._remove(gone)
        for new in leases.keys() - self._targets.keys():
            self._targets[new], self._paces[new] = Target(new), Pace()
            self.idleness.joined(new, time.monotonic())
            self._channels[new] = rpc.connect(leases[new].address, self._security)
            self._stubs[new] = rollout_pb2_grpc.RolloutServiceStub(self._channels[new])
            _log.info("replica %s at %s joined", new, leases[new].address)
        await self.take_commits()

    async def take_commits(self) -> None:
        """Brings the targets' versions in line with the commits."""
        while commits := await self._log.commits(self._last_commit, 0):
            for entry, commit in commits:
                self._last_commit = entry
                self._served[commit["replica"]] = (commit["version"], commit["term"])
                self._term = max(self._term, commit["term"])
                self._stalls[commit["replica"]] = commit["stall_seconds"]
        for target in self._targets.values():
            self._paces[target.id].stall = self._stalls.get(target.id, 0.0)
            served = self._served.get(target.id, (target.version, target.term))
            if served != (target.version, target.term):
                target.version, target.term = served
                target.resting_until, target.failures = 0.0, 0
        self._hand_out()

    @asynccontextmanager
    async def claim(self, tokens: int, slots: int, min_version: int, avoid: Set[str] = frozenset()) -> AsyncIterator[Claim]:
        """Waits for a replica with room that serves `min_version` or a newer one, for `slots` samples of `tokens` together.

        Of several, it is the least loaded one.

        Raises:
            UnavailableError: there was none for as long as the fleet's patience; says which there are.
        """
        waiting = _Waiting(tokens, slots, avoid, asyncio.get_running_loop().create_future())
        queue = self._waiting.setdefault(min_version, deque())
        queue.append(waiting)
        try:
            self._hand_out()
            await self._wait_for_room(waiting, min_version)
            yield waiting.claim.result()
        finally:
            if waiting.claim.done():
                self._end(waiting.claim.result())
            else:
                queue.remove(waiting)

    async def watch(self) -> None:
        """Quarantines replicas that do not keep pace with their peers (see pace.py), for ever. Their calls end, and go on elsewhere."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            if now - looked > 3 * WATCH_SECONDS:  # this process stood still: that nothing was heard meanwhile says nothing
                for pace in self._paces.values():
                    pace.forgive(now)
            looked = now
            free = {name: pace for name, pace in self._paces.items() if self._targets[name].quarantined_until <= now}
            for name, reason in laggards(free, now).items():
                if target := self._targets.get(name):  # it may have left while another's quarantine was told
                    await self._quarantine(target, reason, now)

    def passed(self, version: int) -> bool:
        """Whether a replica that may be used serves a newer version than this one."""
        there = [target for target in self._targets.values() if target.version is not None and target.term >= self._term]
        return any(target.version is not None and target.version > version for target in there)

    async def close(self) -> None:
        for replica in list(self._targets):
            await self._remove(replica)

    def _hand_out(self) -> None:
        """Gives what has room to those who wait."""
        now = time.monotonic()
        for version in sorted(self._waiting):
            queue = self._waiting[version]
            while queue:
                target = choose(
                    self._targets.values(), min_version=version, term=self._term, now=now, room=self._room, avoid=queue[0].avoid
                )
                if target is None:
                    return  # nor is there one for a newer version
                waiting = queue.popleft()
                waiting.claim.set_result(self._begin(target, waiting, now))
            del self._waiting[version]

    def _begin(self, target: Target, waiting: _Waiting, now: float) -> Claim:
        stub, pace = self._stubs[target.id], self._paces[target.id]
        claim = Claim(target, stub, waiting.tokens, waiting.slots, pace, now, self._hand_out)
        self._claims.add(claim)
        self.idleness.began(target.id, now)
        return claim

    def _end(self, claim: Claim) -> None:
        now = time.monotonic()
        self._claims.discard(claim)
        self.idleness.ended(claim.target.id, now)
        claim.end(now)

    async def _wait_for_room(self, waiting: _Waiting, min_version: int) -> None:
        """Raises UnavailableError when no replica that could serve it, busy or not, has been there for as long as the patience."""
        end = time.monotonic() + self._patience
        while not (await asyncio.wait((waiting.claim,), timeout=self._patience / LOOKS))[0]:
            now = time.monotonic()
            # No replica can have it yet: a restarted learner is on its way back to it, or an evaluation keeps an older version.
            coming = self._published < min_version or (self.held is not None and self.held < min_version)
            if coming or choose(self._targets.values(), min_version=min_version, term=self._term, now=now, room=math.inf):
                end = now + self._patience
            elif now >= end:
                raise UnavailableError(
                    f"a rollout replica that serves version {min_version} within rollout.start_timeout = {self._patience:.0f} s",
                    self._describe(now),
                    "See the replicas' logs, start one with `polyreme rollout`, or raise the timeout.",
                )

    async def _remove(self, replica: str) -> None:
        target = self._targets.pop(replica)
        self.idleness.left(replica, time.monotonic())
        self._cut_calls(target)
        del self._stubs[replica], self._paces[replica]
        # Calls end by their deadline, at once: a channel closed under them would look like their task's own cancellation.
        await self._channels.pop(replica).close(grace=1.0)

    def _cut_calls(self, target: Target) -> None:
        for claim in self._claims:
            if claim.target is target:
                claim.cut()

    async def _quarantine(self, target: Target, reason: str, now: float) -> None:
        target.quarantines += 1
        seconds = quarantine_for(target.quarantines)
        target.quarantined_until = now + seconds
        _later(seconds, self._hand_out)
        self._cut_calls(target)
        text = f"replica {target.id} is quarantined for {seconds:.0f} s: {reason}"
        _log.warning("%s", text)
        await self._run.emit({"kind": "notice", "service": "orchestrator", "text": text})

    def _describe(self, now: float) -> str:
        there = [
            f"{t.id} ({'no version yet' if t.version is None else f'version {t.version}'}"
            + (f", failing or too slow, asked again in {t.free_at() - now:.0f} s" if t.free_at() > now else "")
            + ")"
            for t in self._targets.values()
        ]
        return ", ".join(filter(None, [*there, self._servers.refused])) or "no replica"


def _later(seconds: float, call: Callable[[], None]) -> None:
    """A timer may be early by its clock's resolution."""
    asyncio.get_running_loop().call_later(seconds + 0.01, call)
