"""An agent's episode on an environment server, whose requests are answered at the same time.

Invariant: turns begin in the order of requests. When the episode ends, so do the turns still sampled; they are no part of it.
"""

import asyncio
from collections.abc import Mapping
from functools import partial

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.process.tasks import end_all
from polyreme_trainer.orchestrator.environment.agent_turn import agent_turn
from polyreme_trainer.orchestrator.environment.episodes import Ending
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError
from polyreme_trainer.orchestrator.environment.session import EpisodeSession
from polyreme_trainer.orchestrator.environment.wire import EpisodeCall, read_calls

_LOOK_SECONDS = 5.0
"""Seconds after which the clock, which may have stood, is looked at again."""


class NoEndingError(Exception):
    """The server has not told how the episode ended; why."""


class AgentPlay:
    """One episode.

    Args:
        call: the episode's, which has been started.
        at_once: the largest number of turns that are sampled at the same time.
        grace: seconds in which the server may report the end of an agent after those of the episode.
    """

    def __init__(self, call: EpisodeCall, session: EpisodeSession, at_once: int, grace: float) -> None:
        self._call, self._session, self._at_once, self._grace = call, session, at_once, grace
        self._turns: dict[int, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[asyncio.Task[None]] = asyncio.get_running_loop().create_future()
        self._seconds, self._newest = 0.0, 0

    async def run(self) -> Ending:
        """Plays until the ending.

        Raises:
            NoEndingError, grpc.aio.AioRpcError: there was none.
            EpisodeError: the agent failed, or the server broke the protocol.
            GenerateError, UnavailableError: see `EpisodeSession.answer`.
        """
        reading = asyncio.create_task(self._read())
        try:
            while (left := min(self._session.clock.seconds_left + self._grace, _LOOK_SECONDS)) > 0:
                await asyncio.wait((reading, self._failed), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if self._failed.done():
                    self._failed.result().result()
                if reading.done():
                    return reading.result()
            raise NoEndingError("did not end an agent in time")
        finally:
            await end_all([reading, *self._turns.values()])

    async def _read(self) -> Ending:
        while (ending := self._take(await self._call.read())) is None:
            pass
        return ending

    def _take(self, response: pb.RunResponse | None) -> Ending | None:
        if response is None:
            raise NoEndingError("ended an episode without its ending")
        if response.HasField("withdrawal"):
            number = response.withdrawal.number
            if (turn := self._turns.pop(number, None)) is None or not turn.cancel():
                self._session.withdraw(number)
            return None
        if response.HasField("ask"):
            self._ask(response.ask)
            return None
        end = response.ending
        if end.error:
            raise EpisodeError(f"the environment failed: {end.error}")
        self._reward(end.rewards)
        return Ending(self._session.outcome, end.reward, dict(end.parts), self._seconds + end.seconds, read_calls(end))

    def _ask(self, ask: pb.Ask) -> None:
        number = ask.agent.number
        if not ask.HasField("agent") or number <= self._newest:
            raise EpisodeError(f"expected requests of an agent with ascending numbers; found {number} after {self._newest}")
        if len(self._turns) >= self._at_once:
            raise EpisodeError(f"expected at most environment.parallel_turns = {self._at_once} requests at once; found more")
        self._seconds += ask.seconds
        self._newest = number
        self._reward(ask.rewards)
        if ask.calls:
            self._session.reward(0.0, read_calls(ask), self._known(ask.agent.after))
        turn = self._turns[number] = asyncio.create_task(self._answer(ask.agent))
        turn.add_done_callback(partial(self._ended, number))

    def _ended(self, number: int, turn: asyncio.Task[None]) -> None:
        is_withdrawn = self._turns.pop(number, None) is None
        is_failed = turn.cancelled() or turn.exception() is not None
        if is_failed and not is_withdrawn and not self._failed.done():
            self._failed.set_result(turn)

    def _reward(self, rewards: Mapping[int, float]) -> None:
        for number, reward in rewards.items():
            self._session.reward(reward, turn=self._known(number))

    def _known(self, number: int) -> int:
        if number not in self._session:
            raise EpisodeError(f"expected the number of a complete turn; found {number}")
        return number

    async def _answer(self, request: pb.AgentRequest) -> None:
        answer = await agent_turn(request, self._session, self._tell)
        answer.number = request.number
        answer.seconds_left = max(0.0, self._session.clock.seconds_left)
        self._call.write(pb.RunRequest(answer=answer))

    def _tell(self, delta: pb.Delta) -> None:
        self._call.write(pb.RunRequest(delta=delta))
