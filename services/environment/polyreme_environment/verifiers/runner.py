"""Runs episodes of an environment of verifiers: its env server is a child process, and the session address is its model.

Invariant: an env server that ends is replaced; its running episodes cost a try.
"""

import asyncio
import hashlib
import logging
import random
import shutil
import tempfile
from typing import Any

from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError, PolyremeError, UnavailableError
from polyreme.isolation.processes import INVALID_MESSAGE
from polyreme.process.temp_root import temp_root
from polyreme_environment.agents.result import Result
from polyreme_environment.contract import ContractError
from polyreme_environment.foreign_process import ForeignProcess, run_foreign
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.pool import EpisodeLostError, PlayError
from polyreme_environment.verifiers.episode import EpisodeDeltas, UnscoredEpisodeError
from polyreme_environment.verifiers.programs import SERVE, configuration
from polyreme_environment.verifiers.wire import EnvServerClient, EnvServerLostError

logger = logging.getLogger(__name__)

_HEALTH_SECONDS = 1.0
_REPLACE_SECONDS = 30.0
"""Longest wait before an env server is started again."""
_SOCKET_ROOM = len("polyreme-verifiers-XXXXXXXX/server")


class VerifiersRunner:
    """See `Runner`."""

    ends_at_bounds = True

    def __init__(self, config: EnvironmentConfig, metrics: EnvironmentMetrics) -> None:
        self._config, self._metrics = config, metrics
        self._folder = ""
        self._process: ForeignProcess | None = None
        self._client: EnvServerClient | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def about(self) -> tuple[str, str]:
        digest = hashlib.sha256(configuration(self._config).encode()).hexdigest()[:12]
        return f"verifiers-{digest}", f"the environment {self._config.verifiers} of verifiers"

    @property
    def available(self) -> bool:
        return self._client is not None

    async def start(self) -> None:
        """See `Runner`."""
        self._folder = tempfile.mkdtemp(prefix="polyreme-verifiers-", dir=temp_root(_SOCKET_ROOM))
        try:
            process = await self._serve()
        except BaseException:
            await self.close()
            raise
        self._keeping = asyncio.create_task(self._keep(process))

    async def close(self) -> None:
        """Ends the env server."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def run(self, task: dict[str, Any], base_url: str, api_key: str) -> Result:
        """See `Runner`. `task` has a column `task`: the data of a task of verifiers."""
        if not isinstance(data := task.get("task"), dict):
            do = "Write data.train by `polyreme environment tasks run.yaml`"
            raise PlayError(f"expected a column `task` with the data of a task of verifiers; found {data!r:.100}. {do}")
        if (client := self._client) is None:
            raise EpisodeLostError("there is no env server")
        model = {"type": "eval", "base_url": base_url, "api_key_var": "POLYREME_NONE", "headers": {"x-api-key": api_key}}
        episode = EpisodeDeltas()
        body = {"task_data": data, "client": model, "model": "policy", "sampling": {}}
        try:
            return episode.result(await client.run(body, episode.add))
        except EnvServerLostError as lost:
            raise EpisodeLostError(f"the env server {lost}") from None
        except (UnscoredEpisodeError, ContractError, *INVALID_MESSAGE) as error:
            raise PlayError(f"verifiers: {error or type(error).__name__}") from None

    async def _serve(self) -> ForeignProcess:
        """Starts an env server, and waits until it answers. Raises ConfigError or UnavailableError."""
        config = self._config
        assert config.venv is not None
        address = f"ipc://{self._folder}/server"
        arguments = [configuration(config), address, str(config.workers)]
        self._process = process = await run_foreign("verifiers", config.venv, SERVE, arguments, config.worker_environment)
        client = EnvServerClient(address)
        ended = asyncio.ensure_future(process.wait())
        try:
            async with asyncio.timeout(config.start_timeout):
                while not await client.is_healthy(_HEALTH_SECONDS):
                    if ended.done():
                        raise ConfigError(f"an env server of {config.verifiers}", f"it {ended.result()}", "See its message.")
        except TimeoutError:
            await client.close()
            seconds = f"environment.start_timeout = {config.start_timeout:g} s"
            raise UnavailableError(f"an env server of {config.verifiers} within {seconds}", "no answer", "Raise it.") from None
        except BaseException:
            await client.close()
            raise
        finally:
            ended.cancel()
        self._client = client
        return process

    async def _keep(self, process: ForeignProcess) -> None:
        """Replaces the env server whenever it ends, after longer and longer waits while that fails."""
        wait = 1.0
        while True:
            how = await process.wait()
            logger.warning("the env server %s", how)
            self._metrics.workers_replaced.labels("exit").inc()
            await self._end(how)
            while self._client is None:
                await asyncio.sleep(wait * (0.5 + random.random()))
                wait = min(2 * wait, _REPLACE_SECONDS)
                try:
                    process = await self._serve()
                    wait = 1.0
                except PolyremeError as error:
                    logger.warning("%s", error)
                    await self._end()

    async def _end(self, how: str = "ends") -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.lose(how)
            await client.close()
        if self._process is not None:
            await self._process.close()
            self._process = None
