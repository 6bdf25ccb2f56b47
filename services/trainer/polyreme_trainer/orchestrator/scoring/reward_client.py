"""Gets the scores of a group's samples from the reward servers.

Invariant: a score is what a reward computed for this exact text, label and reward version. A failure is retried, then the group's
attempt fails; no number replaces it. A leaving server may answer its running calls; unanswered questions go to another.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import grpc

from polyreme.api.v1 import reward_pb2, reward_pb2_grpc
from polyreme.config.reward import RewardConfig
from polyreme.errors import UnavailableError
from polyreme.experience.leases import Lease
from polyreme.experience.metric_records import ServiceNotice
from polyreme.experience.records import RewardCall
from polyreme.experience.run import Run
from polyreme.net import rpc
from polyreme.process.backoff import Backoff
from polyreme.process.tasks import together
from polyreme_trainer.orchestrator.replicas.live_servers import LiveServers
from polyreme_trainer.orchestrator.scoring.score_call import (
    CallOutcome,
    Question,
    ScoreError,
    describe,
    item_of,
    outcome_of,
    verdict_of,
)

logger = logging.getLogger(__name__)

RETRY_BACKOFF = Backoff(first=0.5, longest=5.0)
_SERVER_REST_SECONDS = 5.0  # seconds for which a failed server is the last choice
_Calls = Sequence[list[RewardCall]] | None


@dataclass
class ScoringHealth:
    """Whether scoring as a whole is down, or only some groups fail. Pure; time is an argument.

    It is down when no server answers, or when two groups got only failures. A single such group may be a bad row.

    Attributes:
        outage_timeout: seconds that an outage may last, with admission paused, before failures count.
        proven: whether anything was ever scored in this run. Until then, an error of the rewards themselves is not an outage.
        down_since: time of the first failure since the last success.
    """

    outage_timeout: float
    proven: bool = True
    down_since: float | None = None
    announced: bool = False
    _suspects: set[Hashable] = field(default_factory=set)

    def succeeded(self) -> None:
        self.proven, self.down_since, self.announced = True, None, False
        self._suspects.clear()

    def failed(self, now: float, *who: Hashable) -> None:
        """Records that the groups `who` got only failures; without `who`, that no server answered."""
        if self.down_since is None:
            self.down_since = now
        self._suspects |= set(who or ("the servers", "themselves"))

    def waits(self, now: float) -> bool:
        return self.down_since is not None and len(self._suspects) > 1 and now - self.down_since < self.outage_timeout


@dataclass(eq=False)
class _Server:
    lease: Lease
    channel: grpc.aio.Channel
    outstanding: int = 0
    backoff_until: float = 0.0
    rewards: str = ""
    """The description of its rewards, as part of item keys; empty until the server was queried."""
    reads_tokens: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @contextmanager
    def asked(self, items: int) -> Iterator[None]:
        """Counts `items` as outstanding during the block."""
        self.outstanding += items
        self.idle.clear()
        try:
            yield
        finally:
            self.outstanding -= items
            if not self.outstanding:
                self.idle.set()

    async def close_when_idle(self, drain_timeout: float) -> None:
        """Closes the channel once no item is outstanding, after `drain_timeout` seconds at the latest."""
        try:
            async with asyncio.timeout(drain_timeout):
                await self.idle.wait()
        except TimeoutError:
            logger.warning("reward server %s left with %d unanswered items", self.lease.id, self.outstanding)
        finally:
            await self.channel.close()

    @property
    def stub(self) -> reward_pb2_grpc.RewardServiceStub:
        return reward_pb2_grpc.RewardServiceStub(self.channel)


class RewardClient:
    """A client of all reward servers with a lease.

    Args:
        run: provides the leases and receives the notices.
        config: `attempts`, `item_timeout`, `start_timeout` (also the longest outage), `security` and `rewards`' labels are used.
        token_texts: the text of each token id, for servers with a reward that reads tokens.
        proven: see `ScoringHealth`.
        backoff: the pauses between two attempts.

    Attributes:
        measure_correctness: whether the run has one reward, and its server declares that a value is 1 for a right and 0 for a
            wrong answer. False until a server has scored.
    """

    def __init__(
        self,
        run: Run,
        config: RewardConfig,
        token_texts: Callable[[Sequence[int]], list[str]],
        proven: bool = True,
        backoff: Backoff = RETRY_BACKOFF,
    ) -> None:
        self._run, self._config, self._token_texts, self._backoff = run, config, token_texts, backoff
        self._leases = LiveServers(run, "reward")
        self._servers: dict[str, _Server] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._joined = asyncio.Event()  # set, and replaced, when a server joins
        self._drain_timeout = min(config.item_timeout + 1.0, 30.0)  # as in the reward server
        self._remote = tuple(f"{spec.label}: " for spec in config.rewards if spec.urls)
        self.health = ScoringHealth(config.start_timeout, proven)
        self.measure_correctness = False

    @property
    def paused(self) -> bool:
        """Whether new groups should wait, because scoring is down and pending groups still retry."""
        return self.health.waits(time.monotonic())

    async def wait_for(self, count: int) -> None:
        """Waits for `count` servers. Raises UnavailableError after reward.start_timeout."""
        await self._leases.wait_for(count, self._config.start_timeout, "reward.start_timeout")

    async def refresh(self) -> None:
        """Updates the servers from the leases. A server that left gets no new questions; running calls may still be answered."""
        leases = await self._leases.live()
        for gone in self._servers.keys() - leases.keys():
            leaving = asyncio.create_task(
                self._servers.pop(gone).close_when_idle(self._drain_timeout), name=f"reward server {gone} leaves"
            )
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        for new in leases.keys() - self._servers.keys():
            self._servers[new] = _Server(leases[new], rpc.connect(leases[new].address, self._config.security))
            self._joined.set()
        if self._joined.is_set():
            self._joined = asyncio.Event()

    async def close(self) -> None:
        for leaving in self._leaving:
            leaving.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        for server in self._servers.values():
            await server.channel.close()
        self._servers.clear()

    async def score(self, questions: Sequence[Question], calls: _Calls = None) -> list[reward_pb2.ScoreResult]:
        """One result with a score per question, in order.

        Args:
            calls: one list per question, to which its calls are added; None: the calls are not recorded.

        While scoring as a whole is down (see ScoringHealth), it retries for `start_timeout`; then the failures count.

        Raises:
            ScoreError: items still fail after all attempts.
            UnavailableError: no reward server has answered for `start_timeout`.
        """
        scored: dict[int, reward_pb2.ScoreResult] = {}
        attempts = retries = 0
        while True:
            missing = [position for position in range(len(questions)) if position not in scored]
            outcome = await self._ask(questions, missing, calls)
            scored |= outcome.scored
            if len(scored) == len(questions):
                self.health.succeeded()
                return [scored[position] for position in range(len(questions))]
            if len(missing) < len(questions):
                outcome.verdict = ""
            outcome.outage &= not (outcome.counts and scored)  # other items of the group were scored, so these are bad
            outcome.outage &= self.health.proven or not outcome.verdict
            if outcome.scored:
                self.health.succeeded()
            elif outcome.outage:
                self.health.failed(time.monotonic(), *([questions[0].name] if outcome.counts else []))
            attempts += outcome.counts
            await self._judge(outcome, attempts, f"{len(questions) - len(scored)} of {len(questions)} samples")
            retries += 1
            seconds = outcome.retry_after or self._backoff.draw(retries)
            with suppress(TimeoutError):  # a server that joins is used at once
                async with asyncio.timeout(seconds):
                    await self._joined.wait()

    async def _judge(self, outcome: CallOutcome, attempts: int, which: str) -> None:
        """Raises when a retry is pointless; emits a notice when an outage begins."""
        if outcome.retry_after or (outcome.counts and attempts < self._config.attempts):
            return
        if not (outcome.outage and self.paused):
            if outcome.counts:
                raise ScoreError(f"{which} have no score after {attempts} attempts: {outcome.error}", outcome.verdict)
            if self.health.down_since is None:
                return  # other groups are being scored meanwhile
            raise UnavailableError(
                f"a reward server that answers within reward.start_timeout = {self._config.start_timeout:.0f} s",
                outcome.error,
                "See the reward service's log, or start one with `polyreme reward`.",
            )
        if not self.health.announced:
            self.health.announced = True
            text = f"no sample gets a score ({outcome.error}); admission is paused while scoring is retried"
            logger.warning("%s", text)
            await self._run.emit(ServiceNotice(service="orchestrator", text=text))

    def _skew(self) -> str:
        return f" but {self._leases.refused}" if self._leases.refused else ""

    async def _ask(self, questions: Sequence[Question], positions: Sequence[int], calls: _Calls) -> CallOutcome:
        """The outcome of one call, or of several where the items do not fit into one message."""
        began = time.monotonic()
        outcome = await self._call(questions, positions)
        if outcome is None:
            if len(positions) == 1:
                raise ScoreError(f"expected a sample with its row of at most {rpc.MAX_MESSAGE_BYTES} bytes; found a larger one")
            middle = len(positions) // 2
            halves = (self._ask(questions, half, calls) for half in (positions[:middle], positions[middle:]))
            first, second = await together(halves)
            return first.joined(second)
        if calls is not None:
            outcome.note(positions, time.monotonic() - began, calls)
        return outcome

    async def _call(self, questions: Sequence[Question], positions: Sequence[int]) -> CallOutcome | None:
        """The outcome of a call; None: its items do not fit into a message."""
        now = time.monotonic()
        server = min(self._servers.values(), key=lambda s: (s.backoff_until > now, s.outstanding, s.lease.id), default=None)
        if server is None:
            return CallOutcome(error=f"no reward server is registered{self._skew()}", counts=False, outage=True)
        try:
            with server.asked(len(positions)):
                if not server.rewards:
                    listed = await server.stub.ListRewards(reward_pb2.ListRewardsRequest(), timeout=10.0)
                    server.rewards = describe(listed)
                    server.reads_tokens = any(reward.reads_tokens for reward in listed.rewards)
                    self.measure_correctness = len(listed.rewards) == 1 and listed.rewards[0].correctness
                texts = self._token_texts if server.reads_tokens else None
                items = [item_of(questions[position], server.rewards, texts) for position in positions]
                request = reward_pb2.ScoreRequest(run_id=self._run.run_id, items=items)
                if request.ByteSize() > rpc.MAX_MESSAGE_BYTES:  # gRPC would refuse it with the status of a full server
                    return None
                response = await server.stub.Score(request, timeout=30.0 + self._config.item_timeout * len(items))
        except grpc.aio.AioRpcError as error:
            message = f"reward server {server.lease.id} answered {error.code().name}: {error.details()}"
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ScoreError(message) from error
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return CallOutcome(error=message, counts=False, retry_after=_retry_after(error), server=server.lease.id)
            server.backoff_until = now + _SERVER_REST_SECONDS
            return CallOutcome(error=message, counts=False, outage=True, server=server.lease.id)
        except asyncio.CancelledError:
            if not rpc.channel_closed():
                raise
            return CallOutcome(error=f"reward server {server.lease.id} left", counts=False, outage=True, server=server.lease.id)
        outcome = outcome_of(response, items, positions)
        outcome.server = server.lease.id
        outcome.verdict = verdict_of(response.results, self._remote)
        return outcome


def _retry_after(error: grpc.aio.AioRpcError) -> float:
    """The delay that a full server requests, between 0.1 and 30 seconds."""
    for key, value in error.trailing_metadata() or ():
        if key == "retry-after-ms" and str(value).isdigit():
            return min(30.0, max(0.1, int(value) / 1000))
    return 1.0
