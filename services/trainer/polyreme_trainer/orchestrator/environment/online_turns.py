"""The turns of a running product's sessions: this client offers calls to every environment server, each for one turn.

Invariant: a call that breaks costs its turn a try at the server, which keeps the session; nothing of a session is kept here.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import grpc

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import DataError, UnavailableError
from polyreme.experience.leases import Lease
from polyreme.experience.run import Run
from polyreme.net import rpc
from polyreme.process.backoff import Backoff
from polyreme.process.tasks import end_all
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError
from polyreme_trainer.orchestrator.environment.wire import EpisodeCalls, episode_calls
from polyreme_trainer.orchestrator.generation.generate import GenerateError
from polyreme_trainer.orchestrator.replicas.live_servers import LiveServers

logger = logging.getLogger(__name__)

_BACKOFF = Backoff(0.2, 5.0)

Sampled = Callable[[pb.AgentRequest, Callable[[pb.Delta], None]], Coroutine[None, None, pb.Answer]]


@dataclass(eq=False)
class _Server:
    lease: Lease
    calls: EpisodeCalls
    offers: "list[asyncio.Task[None]]" = field(default_factory=list)
    gone: bool = False


class OnlineTurns:
    """Answers what the environment servers with a lease ask for, as many turns at once as each of them plays.

    Args:
        sampled: samples a turn, and streams it if asked. Raises DataError, EpisodeError, GenerateError or UnavailableError.
    """

    def __init__(self, run: Run, config: EnvironmentConfig, sampled: Sampled) -> None:
        self._config, self._sampled = config, sampled
        self._leases = LiveServers(run, "environment")
        self._servers: dict[str, _Server] = {}
        self._failure: UnavailableError | None = None

    async def wait_ready(self) -> None:
        """Waits for a server. Raises UnavailableError after environment.start_timeout."""
        await self._leases.wait_for(1, self._config.start_timeout, "environment.start_timeout")

    async def refresh(self) -> None:
        """Updates the servers from the leases. Raises UnavailableError when a turn found no replica."""
        if self._failure is not None:
            raise self._failure
        leases = await self._leases.live()
        for name, server in list(self._servers.items()):
            server.gone = name not in leases
            if server.gone and all(offer.done() for offer in server.offers):
                del self._servers[name]
                await server.calls.close()
        for name in leases.keys() - self._servers.keys():
            calls = episode_calls(rpc.connect(leases[name].address, self._config.security))
            server = self._servers[name] = _Server(leases[name], calls)
            logger.info("environment server %s at %s joined", name, server.lease.address)
        for server in self._servers.values():
            if not server.gone:
                self._offer(server)

    async def close(self) -> None:
        offers = [offer for server in self._servers.values() for offer in server.offers]
        for offer in offers:
            offer.cancel()
        await asyncio.gather(*offers, return_exceptions=True)
        for server in self._servers.values():
            await server.calls.close()
        self._servers.clear()

    def _offer(self, server: _Server) -> None:
        """Keeps as many offers as the server plays turns: some ended if its lease had lapsed for a while."""
        server.offers = [offer for offer in server.offers if not offer.done()]
        missing = int(server.lease.facts["episodes"][""]) - len(server.offers)
        server.offers += [asyncio.create_task(self._serve(server)) for _ in range(missing)]

    async def _serve(self, server: _Server) -> None:
        """Offers one call after the other, until the server has left."""
        failures = 0
        while not server.gone:
            try:
                await self._one(server)
                failures = 0
                continue
            except grpc.aio.AioRpcError as error:
                logger.debug("environment server %s answered %s", server.lease.id, error.code().name)
            except (GenerateError, EpisodeError, DataError) as error:
                logger.warning("a turn of a session failed: %s", error)
            except UnavailableError as error:
                self._failure = error
                return
            failures += 1
            await asyncio.sleep(_BACKOFF.draw(failures))

    async def _one(self, server: _Server) -> None:
        """One turn. The call waits without a deadline: the product asks when it likes. A turn that nobody wants any more ends."""
        call = server.calls.begin(pb.RunRequest(start=pb.Start()))
        tasks: list[asyncio.Task[object]] = []

        def tell(delta: pb.Delta) -> None:
            call.write(pb.RunRequest(delta=delta))

        try:
            if (response := await call.read()) is None:
                raise EpisodeError("expected a request for a turn; found the end of the call")
            sampling = asyncio.create_task(self._sampled(response.ask.agent, tell))
            reading = asyncio.create_task(call.read())
            tasks += [sampling, reading]
            await asyncio.wait({sampling, reading}, return_when=asyncio.FIRST_COMPLETED)
            if sampling.done():
                call.write(pb.RunRequest(answer=sampling.result()))
            await reading
        finally:
            await end_all(tasks)
            call.cancel()
