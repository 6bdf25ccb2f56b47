"""Runs episodes of an environment of NeMo Gym: its servers are child processes, and the session address is their model server.

Invariant: an episode has a reward only if the environment says of no failure and does not mask it.
"""

import asyncio
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from urllib.parse import urlsplit

import httpx
import yaml

from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError
from polyreme.isolation.processes import INVALID_MESSAGE
from polyreme.net.ports import free_port
from polyreme_environment.agents.result import Result
from polyreme_environment.agents.runners import posted
from polyreme_environment.contract import ContractError, finite, numbers
from polyreme_environment.foreign_process import ForeignProcess, KeptProcesses, run_foreign, until_answers
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.nemo_gym.servers import GymPlan, plan, program, read_file, site_packages
from polyreme_environment.pool import EpisodeLostError, PlayError

_SERVE = """
import runpy, sys
if __name__ == "__main__":
    runpy.run_path(sys.argv[1], run_name="__main__")
"""
_ANSWER_SECONDS = 2.0
_POLL_SECONDS = 0.2
_SHOWN = 300
_REPLY_BYTES = 64 << 20
"""Of a reply to /run, which has the row and the whole conversation."""


class NeMoGymRunner:
    """See `Runner`."""

    ends_at_bounds = True

    def __init__(self, config: EnvironmentConfig, metrics: EnvironmentMetrics) -> None:
        self._config, self._metrics = config, metrics
        self._scratch, self._server = "", ""
        self._plan: GymPlan | None = None
        self._http = httpx.AsyncClient(timeout=_ANSWER_SECONDS, trust_env=False)
        self._kept = KeptProcesses(self._serve, self._lost)

    @property
    def about(self) -> tuple[str, str]:
        text = json.dumps([self._config.nemo_gym, self._config.options], sort_keys=True)
        return f"nemo-gym-{hashlib.sha256(text.encode()).hexdigest()[:12]}", f"{self._config.nemo_gym} of NeMo Gym"

    @property
    def available(self) -> bool:
        return self._kept.are_serving

    async def start(self, server: str) -> None:
        """See `Runner`."""
        if server.startswith("https:"):
            raise ConfigError(
                "a session address without TLS for NeMo Gym", "a certificate", "Remove environment.security.certificate."
            )
        self._server = server
        self._scratch = tempfile.mkdtemp(prefix="polyreme-nemo-gym-")
        await self._kept.start()

    async def close(self) -> None:
        """Ends the servers."""
        await self._kept.close()
        await self._http.aclose()
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def run(self, task: dict[str, object], base_url: str, api_key: str) -> Result:
        """See `Runner`. `task` has a column `task`: a row of NeMo Gym's data."""
        if not isinstance(row := task.get("task"), dict):
            do = "Write data.train by `polyreme environment tasks run.yaml`"
            raise PlayError(f"expected a column `task` with a row of NeMo Gym's data; found {row!r:.100}. {do}")
        text = await self.answer(row, api_key)  # the package knows a session by its key alone
        try:
            return scored(json.loads(text), row)
        except (ContractError, RecursionError, *INVALID_MESSAGE) as error:
            raise PlayError(f"the agent of NeMo Gym: {error or type(error).__name__}") from None

    async def answer(self, row: dict[str, object], rollout: str) -> bytes:
        """The agent's answer to /run. Raises PlayError or EpisodeLostError."""
        if not self._kept.are_serving or self._plan is None:
            raise EpisodeLostError("the servers of NeMo Gym are not there")
        url, body = f"http://127.0.0.1:{self._plan.agent_port}/run", {**row, "_ng_rollout_id": rollout}
        try:
            # Without cookies of other episodes, which are the package's sessions.
            reply, text = await posted(url, body, _REPLY_BYTES)
        except httpx.TransportError as error:
            raise EpisodeLostError(f"the agent of NeMo Gym broke off: {error or type(error).__name__}") from None
        if not reply.is_success:
            raise PlayError(f"the agent of NeMo Gym answered {reply.status_code}: {text.decode(errors='replace'):.{_SHOWN}}")
        return text

    async def _serve(self) -> list[ForeignProcess]:
        """Starts the servers, and waits until all answer. Raises ConfigError or UnavailableError."""
        config, address = self._config, urlsplit(self._server)
        assert config.venv is not None and config.nemo_gym is not None and address.hostname and address.port
        site = await asyncio.to_thread(site_packages, config.venv)
        tree = await asyncio.to_thread(read_file, site, config.nemo_gym)
        found = plan(tree, config.options, (address.hostname, address.port), self._scratch, free_port)
        processes: list[ForeignProcess] = []
        try:
            for server in found.servers:
                path = await asyncio.to_thread(program, site, config.nemo_gym, server)
                variables = {
                    "NEMO_GYM_CONFIG_DICT": yaml.safe_dump(found.told),
                    "NEMO_GYM_CONFIG_PATH": server.name,
                    "PYTHONPATH": f"{site}:{path.parent}",
                }
                arguments = [str(path)]
                processes.append(
                    await run_foreign(
                        server.name, config.venv, _SERVE, arguments, config.worker_environment, self._scratch, **variables
                    )
                )
            ports = [server.port for server in found.servers]
            await until_answers(f"servers of {config.nemo_gym}", processes, lambda: self._answer(ports), config.start_timeout)
        except BaseException:
            await asyncio.gather(*(process.close() for process in processes))
            raise
        self._plan = found
        return processes

    async def _answer(self, ports: list[int]) -> bool:
        """Whether all servers answer."""
        try:
            for port in ports:
                await self._http.get(f"http://127.0.0.1:{port}/openapi.json")
        except httpx.TransportError:
            await asyncio.sleep(_POLL_SECONDS)
            return False
        return True

    async def _lost(self, how: str) -> None:
        self._metrics.workers_replaced.labels("exit").inc()


def scored(reply: Mapping[str, object], row: Mapping[str, object]) -> Result:
    """The reward of an answer to /run, and the numbers beside it that the row did not have.

    Raises:
        ContractError: the environment has failed. And one of INVALID_MESSAGE.
    """
    if reply.get("failure_kind") or reply.get("mask_sample"):
        why = f"failed: {reply.get('failure_kind') or 'mask_sample'}: {reply.get('failure_reason')}"
        raise ContractError(why[:_SHOWN])
    told = {
        name: value
        for name, value in reply.items()
        if name not in row and name not in ("reward", "mask_sample") and isinstance(value, bool | int | float)
    }
    return Result(finite(reply["reward"], "reward"), numbers(told, "the agent"))
