"""The live rollout replicas, the versions that they serve, and the claims on them.

Invariant: targets are live leases with our API version, and every claim returns its promised tokens at its end. Work waits here,
not in a replica, except during the swap to its version: it goes to a replica with capacity, oldest policy version first, then in
order of arrival. Thus long answers leave no replica idle, a new replica gets work at once, and a stalled one delays only its
running samples. For a short time after the first replica staged a version, those yet to stage it keep their share.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Set
from contextlib import asynccontextmanager

from polyreme.config.security import SecurityConfig
from polyreme.errors import UnavailableError
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.log_reader import COMMITS_BOUND
from polyreme.experience.metric_records import Line, ServiceNotice
from polyreme.experience.run import Run
from polyreme.net import rpc
from polyreme_trainer.orchestrator.replicas.claim import Claim, ReplicaCalls, call_after, replica_calls
from polyreme_trainer.orchestrator.replicas.claim_queue import ClaimQueue, Waiter
from polyreme_trainer.orchestrator.replicas.idle_time import IdleTime
from polyreme_trainer.orchestrator.replicas.live_servers import LiveServers
from polyreme_trainer.orchestrator.replicas.router import SUSPENSION, Candidates, Target, fair_share
from polyreme_trainer.orchestrator.replicas.straggler_detection import Pace, stragglers

logger = logging.getLogger(__name__)

STRAGGLER_CHECK_INTERVAL = 0.5
SHARE_SECONDS = 10.0
GRANT_SECONDS_PER_REPLICA = 50e-6
"""Seconds between two looks at all replicas for waiting claims, per replica: such looks cost a bounded share of the processor."""
CHECKS_PER_TIMEOUT = 10
"""Availability checks per timeout while a claim waits."""


class ReplicaPool:
    """Replicas by lease and commit.

    Args:
        experience: the log, with the orchestrator's shard.
        start_timeout: seconds without a usable replica after which the run fails.
        capacity: number of samples that a replica decodes at once, of all orchestrators.
        security: security settings of the replicas' ports.
        share_seconds: seconds after a version is first staged in which samples are kept for replicas that have yet to stage it.

    Attributes:
        targets: the replicas by id.
        held: the version at which replicas are held for its evaluation; None: they follow the newest.
        is_shared: whether other orchestrators use the replicas too. Each takes its share of their capacity, so work waits here.
        idle_time: idle time of the replicas.
    """

    def __init__(
        self,
        run: Run,
        experience: ExperienceLog,
        start_timeout: float,
        capacity: int,
        security: SecurityConfig | None = None,
        share_seconds: float = SHARE_SECONDS,
    ) -> None:
        self._security, self._share_seconds = security, share_seconds
        self._run, self._experience, self._start_timeout = run, experience, start_timeout
        self._capacity, self._shard = capacity, experience.shard
        self._servers = LiveServers(run, "rollout")
        self.targets: dict[str, Target] = {}
        self._connections: dict[str, ReplicaCalls] = {}
        self._paces: dict[str, Pace] = {}
        self._claims: set[Claim] = set()
        self._commits: dict[str, Line] = {}  # the newest of each replica, of as many as the log keeps
        self._term, self._published = 0, -1
        self._last_commit = "0"
        self._newest, self._shared_until = (0, -1), 0.0  # term and version; monotonic seconds
        self._queue = ClaimQueue()
        self._next_grant = 0.0  # monotonic seconds
        self._granting: asyncio.TimerHandle | None = None
        self.held: int | None = None
        self.is_shared = True
        self._asleep = False
        self.idle_time = IdleTime(time.monotonic())

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def waiting(self) -> int:
        """The number of claims that wait for a replica."""
        return len(self._queue)

    @property
    def calls(self) -> int:
        """The number of claims that callers hold."""
        return len(self._claims)

    async def wait_for(self, count: int) -> None:
        """Waits for `count` replicas. Raises UnavailableError after `start_timeout`."""
        await self._servers.wait_for(count, self._start_timeout, "rollout.start_timeout")

    async def refresh(self) -> None:
        """Updates the targets from the leases and the commits. Ends calls on replicas without a lease."""
        leases = await self._servers.live()
        self._published = await self._experience.version()
        gone, joined = self.targets.keys() - leases.keys(), leases.keys() - self.targets.keys()
        for replica in gone:
            logger.warning("replica %s left", replica)
        await self._remove(*gone)
        for new in joined:
            self.targets[new], self._paces[new] = Target(new), Pace()
            self.idle_time.joined(new, time.monotonic())
            self._connections[new] = replica_calls(rpc.connect(leases[new].address, self._security))
            logger.info("replica %s at %s joined", new, leases[new].address)
        await self.take_commits(joined)

    async def take_commits(self, joined: Iterable[str] = ()) -> None:
        """Updates the targets' versions from what is staged and committed. A new version ends the backoff of its replica.
        `joined` have become targets since the last call, which may have seen their commits."""
        changed = set(joined)
        for entry, commit in await self._experience.commits(self._last_commit):
            self._last_commit = entry
            self._take_commit(commit)
            changed.add(commit["replica"])
        for replica in changed & self.targets.keys() & self._commits.keys():
            target, commit = self.targets[replica], self._commits[replica]
            self._paces[replica].stall = commit["stall_seconds"]
            if (served := (commit["version"], commit["term"])) != (target.version, target.term):
                target.version, target.term = served
                target.backoff_until, target.failures = 0.0, 0
            newest = target.version if target.staged is None else target.staged
            if newest is not None and (target.term, newest) > self._newest:
                self._newest = target.term, newest
                self._shared_until = time.monotonic() + self._share_seconds
                call_after(self._share_seconds, self._grant_claims)
        self._grant_claims()

    def _take_commit(self, commit: Line) -> None:
        """Takes one entry of the commits: a replica has staged or committed a version."""
        replica, term, target = commit["replica"], commit["term"], self.targets.get(commit["replica"])
        if commit["state"] == "staged":
            served = self._commits.get(replica)
            if target is not None and served and served["term"] == term and served["version"] < commit["version"]:
                target.staged = commit["version"]
            return
        self._commits.pop(replica, None)  # the newest is the last
        self._commits[replica] = commit
        if len(self._commits) > COMMITS_BOUND:
            del self._commits[next(iter(self._commits))]
        self._term = max(self._term, term)
        if target is not None:
            target.staged = None

    @asynccontextmanager
    async def claim(
        self, tokens: int, sequences: int, min_version: int, avoid: Set[str] = frozenset(), prefer: str | None = None
    ) -> AsyncIterator[Claim]:
        """Waits for a replica with capacity that serves `min_version` or newer, for `sequences` samples of `tokens` in total.

        Of several, it takes `prefer`, else the least loaded one, and one of `avoid` only when there is no other.

        Raises:
            UnavailableError: no usable replica was present for `start_timeout`; the message lists the replicas.
        """
        waiter = Waiter(tokens, sequences, min_version, avoid, prefer, asyncio.get_running_loop().create_future())
        self._queue.add(waiter)
        try:
            self._grant_claims()
            await self._wait_for_capacity(waiter)
            yield waiter.claim.result()
        finally:
            if waiter.claim.done():
                self._end(waiter.claim.result())
            else:
                self._queue.remove(waiter)

    async def watch_stragglers(self) -> None:
        """Suspends replicas that do not keep pace with their peers. Their calls end and continue elsewhere. Never returns."""
        checked = time.monotonic()
        while True:
            await asyncio.sleep(STRAGGLER_CHECK_INTERVAL)
            now = time.monotonic()
            if self._asleep or now - checked > 3 * STRAGGLER_CHECK_INTERVAL:  # this process stalled itself
                for pace in self._paces.values():
                    pace.reset(now)
            checked = now
            active = {name: pace for name, pace in self._paces.items() if self.targets[name].suspended_until <= now}
            for name, reason in stragglers(active, now).items():
                if target := self.targets.get(name):  # it may have left while a notice about another one was sent
                    await self._suspend(target, reason, now)

    def set_asleep(self, asleep: bool) -> None:
        """Records whether colocated replicas have left their devices: then running calls wait, and no claim is granted."""
        if asleep == self._asleep:
            return
        self._asleep = asleep
        for claim in self._claims:
            claim.suspend(asleep)
        for pace in self._paces.values():
            pace.reset(time.monotonic())
        self._grant_claims()

    def serves_newer(self, version: int) -> bool:
        """Whether a replica of the current term serves a newer version than this one."""
        current = [target for target in self.targets.values() if target.term >= self._term]
        return any(target.version is not None and target.version > version for target in current)

    async def close(self) -> None:
        if self._granting is not None:
            self._granting.cancel()
        await self._remove(*self.targets)

    def _grant_claims(self) -> None:
        """Gives free capacity to the waiting callers: now, or when it is time to look at all replicas again."""
        if self._granting is None and self._queue:
            if (seconds := self._next_grant - time.monotonic()) > 0:
                self._granting = asyncio.get_running_loop().call_later(seconds, self._grant_now)
            else:
                self._grant_now()

    def _grant_now(self) -> None:
        self._granting = None
        if not self._asleep:
            self._next_grant = time.monotonic() + GRANT_SECONDS_PER_REPLICA * len(self.targets)
            self._queue.grant(self._candidates, self._begin)

    def _candidates(self, min_version: int) -> Candidates:
        now, targets = time.monotonic(), self.targets.values()
        capacity: float = self._shard.share(self._capacity) if self.is_shared else self._capacity
        if now < self._shared_until:
            waiting = self._queue.sequences(min_version)
            capacity = min(capacity, fair_share(targets, min_version=min_version, term=self._term, now=now, waiting=waiting))
        return Candidates(targets, min_version=min_version, term=self._term, now=now, capacity=capacity)

    def _begin(self, target: Target, waiter: Waiter) -> Claim:
        now = time.monotonic()
        calls, pace = self._connections[target.id], self._paces[target.id]
        claim = Claim(target, calls, waiter.tokens, waiter.sequences, pace, now, self._grant_claims)
        self._claims.add(claim)
        self.idle_time.began(target.id, now)
        return claim

    def _end(self, claim: Claim) -> None:
        now = time.monotonic()
        self._claims.discard(claim)
        self.idle_time.ended(claim.target.id, now)
        claim.end(now)

    async def _wait_for_capacity(self, waiter: Waiter) -> None:
        """Raises UnavailableError when no replica that could serve the claim, busy or not, was present for `start_timeout`."""
        if waiter.claim.done():
            return
        deadline = time.monotonic() + self._start_timeout
        while not (await asyncio.wait((waiter.claim,), timeout=self._start_timeout / CHECKS_PER_TIMEOUT))[0]:
            now = time.monotonic()
            # No replica can serve it yet: a resumed learner trains up to it again, or an evaluation holds an older version.
            min_version = waiter.min_version
            is_coming = self._asleep or self._published < min_version or (self.held is not None and self.held < min_version)
            if is_coming or any(t.reaches(min_version, self._term) and t.available_at() <= now for t in self.targets.values()):
                deadline = now + self._start_timeout
            elif now >= deadline:
                raise UnavailableError(
                    f"a replica that serves version {min_version} within rollout.start_timeout = {self._start_timeout:.0f} s",
                    self._describe(now),
                    "See the replicas' logs, start one with `polyreme rollout`, or raise the timeout.",
                )

    async def _remove(self, *replicas: str) -> None:
        now, ending = time.monotonic(), []
        self._cut_calls(frozenset(replicas))
        for replica in replicas:
            self.idle_time.left(replica, now)
            del self.targets[replica], self._paces[replica]
            ending.append(self._connections.pop(replica))
        await asyncio.gather(*(calls.close() for calls in ending))

    def _cut_calls(self, replicas: Set[str]) -> None:
        """Ends the calls on these targets."""
        for claim in self._claims:
            if claim.target.id in replicas:
                claim.cut()

    async def _suspend(self, target: Target, reason: str, now: float) -> None:
        target.suspensions += 1
        seconds = SUSPENSION.delay(target.suspensions)
        target.suspended_until = now + seconds
        call_after(seconds, self._grant_claims)
        self._cut_calls({target.id})
        text = f"replica {target.id} is suspended for {seconds:.0f} s: {reason}"
        logger.warning("%s", text)
        await self._run.emit(ServiceNotice(service="orchestrator", text=text))

    def _describe(self, now: float) -> str:
        present = [
            f"{t.id} ({'no version yet' if t.version is None else f'version {t.version}'}"
            + (f", failing or too slow, next call in {t.available_at() - now:.0f} s" if t.available_at() > now else "")
            + ")"
            for t in self.targets.values()
        ]
        return ", ".join(filter(None, [*present, self._servers.refused])) or "no replica"
