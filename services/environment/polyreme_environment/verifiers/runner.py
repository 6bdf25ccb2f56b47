"""Runs episodes of an environment of verifiers: its env server is a child process, and the session address is its model.

Invariant: an ended env server is replaced; its running episodes cost a try. All episodes share a model client: an env server
keeps a client with connections for each address and headers told, and closes none. So a session's key is the model's name.
"""

import hashlib
import shutil
import tempfile
from functools import partial

from polyreme.config.environment import EnvironmentConfig
from polyreme.isolation.processes import INVALID_MESSAGE
from polyreme.process.temp_root import temp_root
from polyreme_environment.agents.address import BY_MODEL
from polyreme_environment.agents.result import Result
from polyreme_environment.contract import ContractError
from polyreme_environment.foreign_process import ForeignProcess, KeptProcesses, run_foreign, until_answers
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.pool import EpisodeLostError, PlayError
from polyreme_environment.verifiers.episode import EpisodeDeltas, UnscoredEpisodeError
from polyreme_environment.verifiers.programs import SERVE, configuration
from polyreme_environment.verifiers.wire import EnvServerClient, EnvServerLostError

_HEALTH_SECONDS = 1.0
_SOCKET_ROOM = len("polyreme-verifiers-XXXXXXXX/server")


class VerifiersRunner:
    """See `Runner`."""

    ends_at_bounds = True

    def __init__(self, config: EnvironmentConfig, metrics: EnvironmentMetrics) -> None:
        self._config, self._metrics = config, metrics
        self._folder, self._server = "", ""
        self._client: EnvServerClient | None = None
        self._kept = KeptProcesses(self._serve, self._lost)

    @property
    def about(self) -> tuple[str, str]:
        digest = hashlib.sha256(configuration(self._config).encode()).hexdigest()[:12]
        return f"verifiers-{digest}", f"the environment {self._config.verifiers} of verifiers"

    @property
    def available(self) -> bool:
        return self._client is not None

    async def start(self, server: str) -> None:
        """See `Runner`."""
        self._server = server
        self._folder = tempfile.mkdtemp(prefix="polyreme-verifiers-", dir=temp_root(_SOCKET_ROOM))
        await self._kept.start()

    async def close(self) -> None:
        """Ends the env server."""
        await self._disconnect("ends")
        await self._kept.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def run(self, task: dict[str, object], base_url: str, api_key: str) -> Result:
        """See `Runner`. `task` has a column `task`: the data of a task of verifiers."""
        if not isinstance(data := task.get("task"), dict):
            do = "Write data.train by `polyreme environment tasks run.yaml`"
            raise PlayError(f"expected a column `task` with the data of a task of verifiers; found {data!r:.100}. {do}")
        if (client := self._client) is None:
            raise EpisodeLostError("there is no env server")
        model = {
            "type": "eval",
            "base_url": f"{self._server}{BY_MODEL}",
            "api_key_var": "POLYREME_NONE",
            "headers": {},
            # An env server whose environment computes notices its connections late: its own bound of 30 s fails episodes.
            "timeout": {"connect": self._config.max_seconds},
        }
        episode = EpisodeDeltas()
        body: dict[str, object] = {"task_data": data, "client": model, "model": api_key, "sampling": {}}
        try:
            return episode.result(await client.run(body, episode.add))
        except EnvServerLostError as lost:
            raise EpisodeLostError(f"the env server {lost}") from None
        except (UnscoredEpisodeError, ContractError, *INVALID_MESSAGE) as error:
            raise PlayError(f"verifiers: {error or type(error).__name__}") from None

    async def _serve(self) -> list[ForeignProcess]:
        """Starts an env server, and waits until it answers. Raises ConfigError or UnavailableError."""
        config, address = self._config, f"ipc://{self._folder}/server"
        assert config.venv is not None
        arguments = [configuration(config), address, str(config.workers)]
        process = await run_foreign("verifiers", config.venv, SERVE, arguments, config.worker_environment)
        client = EnvServerClient(address)
        try:
            answers = partial(client.is_healthy, _HEALTH_SECONDS)
            await until_answers(f"an env server of {config.verifiers}", [process], answers, config.start_timeout)
        except BaseException:
            await client.close()
            await process.close()
            raise
        self._client = client
        return [process]

    async def _lost(self, how: str) -> None:
        self._metrics.workers_replaced.labels("exit").inc()
        await self._disconnect(how)

    async def _disconnect(self, how: str) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.lose(how)
            await client.close()
