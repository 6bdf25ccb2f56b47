"""Scores of a group's samples from the reward servers.

Invariant: a score is what a reward computed for exactly this text, label and reward version. A failure stays a failure: it is retried,
then the group's attempt fails; no number is ever put in its place. A server that leaves takes no question with it: it may still answer
those that it has, and what it does not is asked elsewhere.
"""

import asyncio
import json
import logging
import random
import re
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import grpc
import xxhash

from polyreme.api.v1 import reward_pb2, reward_pb2_grpc
from polyreme.config.reward import RewardConfig
from polyreme.errors import UnavailableError
from polyreme.experience.leases import Lease
from polyreme.experience.run import Run
from polyreme.net import rpc
from polyreme_trainer.orchestrator.live_servers import Servers

_log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 5.0  # seconds between two tries of a group, doubling
_OK = reward_pb2.SCORE_STATUS_OK
_VARIABLE = re.compile(r"""'[^']*'|"[^"]*"|\d+(\.\d+)?""")  # parts of a message that differ between items with one problem


class ScoreError(Exception):
    """Some samples of this attempt have no score after all tries.

    Attributes:
        verdict: why, when the rewards themselves failed every sample of the group for one reason; "" otherwise. Texts in quotes and
            numbers, which differ from sample to sample, are masked.
    """

    def __init__(self, message: str, verdict: str = "") -> None:
        super().__init__(message)
        self.verdict = verdict


@dataclass(frozen=True)
class Question:
    """One sample to be scored. `name` distinguishes it from other samples with the same text; `templated_prompt` is what the model saw."""

    name: tuple[str | int, ...]
    prompt: str
    response: str
    response_raw: str
    label: str
    metadata_json: str
    templated_prompt: str = ""


@dataclass
class Health:
    """Whether scoring as a whole is down. Pure; time is an argument.

    It is when no server answers, or when two groups in a row got nothing but failures: one alone may be a bad row.

    Attributes:
        grace: seconds that this is waited out for, with admission paused, before failures count.
        proven: whether anything has ever been scored in this run. Until then, an error of the rewards themselves is no outage.
        down_since: the first failure after which nothing has succeeded.
    """

    grace: float
    proven: bool = True
    down_since: float | None = None
    announced: bool = False
    _suspects: set[Hashable] = field(default_factory=set)

    def succeeded(self) -> None:
        self.proven, self.down_since, self.announced = True, None, False
        self._suspects.clear()

    def failed(self, now: float, *who: Hashable) -> None:
        """`who` got nothing but failures; without it, no server answered."""
        if self.down_since is None:
            self.down_since = now
        self._suspects |= set(who or ("the servers", "themselves"))

    def waits(self, now: float) -> bool:
        return self.down_since is not None and len(self._suspects) > 1 and now - self.down_since < self.grace


@dataclass(eq=False)
class _Server:
    lease: Lease
    channel: grpc.aio.Channel
    outstanding: int = 0
    resting_until: float = 0.0
    rewards: str = ""
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @contextmanager
    def asked(self, items: int) -> Iterator[None]:
        """While it has so many more items."""
        self.outstanding += items
        self.idle.clear()
        try:
            yield
        finally:
            self.outstanding -= items
            if not self.outstanding:
                self.idle.set()

    async def let_go(self, grace: float) -> None:
        """Closes the channel once nothing is asked of it any more, after `grace` seconds at the latest."""
        try:
            async with asyncio.timeout(grace):
                await self.idle.wait()
        except TimeoutError:
            _log.warning("reward server %s left with %d items", self.lease.id, self.outstanding)
        finally:
            await self.channel.close()

    @property
    def stub(self) -> reward_pb2_grpc.RewardServiceStub:
        return reward_pb2_grpc.RewardServiceStub(self.channel)


@dataclass
class _Try:
    """What one call brought: results by position, and what was wrong with the others.

    Attributes:
        counts: whether it was an answer about the items, and so one of their attempts.
        outage: whether it looks like the reward being down, and not like the items being bad.
        verdict: as ScoreError's.
    """

    scored: dict[int, reward_pb2.ScoreResult] = field(default_factory=dict)
    trouble: str = ""
    counts: bool = True
    outage: bool = False
    verdict: str = ""
    retry_after: float = 0.0


class Rewards:
    """The reward servers with a lease.

    Args:
        run: for leases and notices.
        config: `attempts`, `item_timeout`, `start_timeout` (the grace of an outage), `security` and the labels of `rewards` are used.
        proven: as Health's.
    """

    def __init__(self, run: Run, config: RewardConfig, proven: bool = True) -> None:
        self._run, self._config = run, config
        self._leases = Servers(run, "reward")
        self._servers: dict[str, _Server] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._joined = asyncio.Event()  # set, and another put in its place, when a server is new
        self._grace = min(config.item_timeout + 1.0, 30.0)  # as long as a server drains
        self._remote = tuple(f"{spec.label}: " for spec in config.rewards if spec.urls)
        self.health = Health(config.start_timeout, proven)

    @property
    def paused(self) -> bool:
        """Whether new groups should wait: nothing is being scored, and those that need scores keep asking."""
        return self.health.waits(time.monotonic())

    async def wait_for(self, count: int) -> None:
        """Waits for `count` servers. Raises UnavailableError: they did not come within reward.start_timeout."""
        await self._leases.wait_for(count, self._config.start_timeout, "reward.start_timeout")

    async def refresh(self) -> None:
        """Brings the servers in line with the leases. One that left is asked no more; what it still scores may yet arrive."""
        leases = await self._leases.live()
        for gone in self._servers.keys() - leases.keys():
            leaving = asyncio.create_task(self._servers.pop(gone).let_go(self._grace), name=f"reward server {gone} leaves")
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

    async def score(self, questions: Sequence[Question]) -> list[reward_pb2.ScoreResult]:
        """One result with a score per question, in order.

        While scoring as a whole is down (see Health), it goes on asking for the configured grace; then the failures count.

        Raises:
            ScoreError: items still fail after all attempts.
            UnavailableError: no reward server has answered for the whole grace.
        """
        scored: dict[int, reward_pb2.ScoreResult] = {}
        attempts = pauses = 0
        while True:
            missing = [position for position in range(len(questions)) if position not in scored]
            outcome = await self._ask(questions, missing)
            scored |= outcome.scored
            if len(scored) == len(questions):
                self.health.succeeded()
                return [scored[position] for position in range(len(questions))]
            if len(missing) < len(questions):
                outcome.verdict = ""
            outcome.outage &= not (outcome.counts and scored)  # these items are bad: others of the group have their scores
            outcome.outage &= self.health.proven or not outcome.verdict
            if outcome.scored:
                self.health.succeeded()
            elif outcome.outage:
                self.health.failed(time.monotonic(), *([questions[0].name] if outcome.counts else []))
            attempts += outcome.counts
            await self._judge(outcome, attempts, f"{len(questions) - len(scored)} of {len(questions)} samples")
            pauses += 1
            backoff = outcome.retry_after or min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(pauses - 1, 5))
            with suppress(TimeoutError):  # a new server is asked at once
                await asyncio.wait_for(self._joined.wait(), backoff * random.uniform(0.5, 1.5))

    async def _judge(self, outcome: _Try, attempts: int, which: str) -> None:
        """Raises when asking again has no point; says so when it takes an outage to be the reason."""
        if outcome.retry_after or (outcome.counts and attempts < self._config.attempts):
            return
        if not (outcome.outage and self.paused):
            if outcome.counts:
                raise ScoreError(f"{which} have no score after {attempts} tries: {outcome.trouble}", outcome.verdict)
            if self.health.down_since is None:
                return  # others are being scored meanwhile
            raise UnavailableError(
                f"a reward server that answers within reward.start_timeout = {self._config.start_timeout:.0f} s",
                outcome.trouble,
                "See the reward service's log, or start one with `polyreme reward`.",
            )
        if not self.health.announced:
            self.health.announced = True
            text = f"no sample gets a score ({outcome.trouble}); admission waits, and scores are asked for again"
            _log.warning("%s", text)
            await self._run.emit({"kind": "notice", "service": "orchestrator", "text": text})

    def _skew(self) -> str:
        return f" but {self._leases.refused}" if self._leases.refused else ""

    async def _ask(self, questions: Sequence[Question], positions: Sequence[int]) -> _Try:
        now = time.monotonic()
        server = min(self._servers.values(), key=lambda s: (s.resting_until > now, s.outstanding, s.lease.id), default=None)
        if server is None:
            return _Try(trouble=f"no reward server is registered{self._skew()}", counts=False, outage=True)
        try:
            with server.asked(len(positions)):
                server.rewards = server.rewards or await _describe(server)
                items = [_item(questions[position], server.rewards) for position in positions]
                request = reward_pb2.ScoreRequest(run_id=self._run.run_id, items=items)
                response = await server.stub.Score(request, timeout=30.0 + self._config.item_timeout * len(items))
        except grpc.aio.AioRpcError as error:
            trouble = f"reward server {server.lease.id} answered {error.code().name}: {error.details()}"
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ScoreError(trouble) from error
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return _Try(trouble=trouble, counts=False, retry_after=_retry_after(error))
            server.resting_until = now + 5.0
            return _Try(trouble=trouble, counts=False, outage=True)
        except asyncio.CancelledError:
            if not rpc.channel_closed():
                raise
            return _Try(trouble=f"reward server {server.lease.id} left", counts=False, outage=True)
        outcome = _sort(response, items, positions)
        outcome.verdict = _verdict(response.results, self._remote)
        return outcome


def _verdict(results: Sequence[reward_pb2.ScoreResult], remote: tuple[str, ...]) -> str:
    """The one reason for which rewards that run in the service failed all items; "" when there is none, or it may pass: a deadline,
    or a failure of a reward whose messages begin with one of `remote`."""
    reasons = {_VARIABLE.sub("_", result.message) for result in results}
    passing = any(
        result.status in (_OK, reward_pb2.SCORE_STATUS_TIMEOUT) or result.message.startswith(remote) for result in results
    )
    return "" if passing or len(reasons) != 1 else reasons.pop()


def _sort(response: reward_pb2.ScoreResponse, items: Sequence[reward_pb2.ScoreItem], positions: Sequence[int]) -> _Try:
    if [result.key for result in response.results] != [item.key for item in items]:
        raise ScoreError(
            f"expected {len(items)} results with the items' keys in their order, found {len(response.results)} others"
        )
    outcome = _Try()
    for position, result in zip(positions, response.results, strict=True):
        if result.status == _OK:
            outcome.scored[position] = result
        else:
            outcome.outage |= result.status != reward_pb2.SCORE_STATUS_INVALID
            status = reward_pb2.ScoreStatus.Name(result.status).removeprefix("SCORE_STATUS_").lower()
            outcome.trouble = outcome.trouble or f"{status}: {result.message}"
    return outcome


async def _describe(server: _Server) -> str:
    """Names and versions of a server's rewards, as they go into item keys."""
    listed = await server.stub.ListRewards(reward_pb2.ListRewardsRequest(), timeout=10.0)
    return json.dumps([[reward.name, reward.version, reward.weight] for reward in listed.rewards])


def _item(question: Question, rewards: str) -> reward_pb2.ScoreItem:
    identity = [*question.name, question.prompt, question.templated_prompt, question.response_raw, question.label, rewards]
    return reward_pb2.ScoreItem(
        key=xxhash.xxh3_128_hexdigest(json.dumps(identity).encode()),
        prompt=question.prompt,
        response=question.response,
        response_raw=question.response_raw,
        label=question.label,
        metadata_json=question.metadata_json,
        templated_prompt=question.templated_prompt,
    )


def _retry_after(error: grpc.aio.AioRpcError) -> float:
    """Seconds that a full server asks for, between 0.1 and 30."""
    for key, value in error.trailing_metadata() or ():
        if key == "retry-after-ms" and str(value).isdigit():
            return min(30.0, max(0.1, int(value) / 1000))
    return 1.0
