"""The turns of agents' sessions: rendered with the model's chat template, sampled through the request log.

Invariant: a turn is a request of the log that is named by all that determines its tokens. So a turn that is asked for again,
since a process was killed, has the same tokens.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import xxhash

from polyreme.api.v1 import environment_pb2, rollout_pb2, tinker_pb2
from polyreme.api.v1.experience_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, VersionSpan
from polyreme.config.run import RunConfig
from polyreme.config.serve import ServeAgents, ServeConfig
from polyreme.errors import DataError, StoreError
from polyreme.experience.ledger import Admission
from polyreme.experience.requests import LogPlace, RequestLog
from polyreme.experience.run import Run
from polyreme_trainer.data.prompt_store import Prompt
from polyreme_trainer.data.tail import Tail
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.environment.agent_turn import kept_turn
from polyreme_trainer.orchestrator.environment.online_turns import OnlineTurns
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError, Task
from polyreme_trainer.orchestrator.environment.session import Bounds, EpisodeSession
from polyreme_trainer.orchestrator.generation.generate import PLAIN, GenerateError, GenerateOptions, Generation
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollout
from polyreme_trainer.orchestrator.generation.sampler import Sampler
from polyreme_trainer.service.accounts import Accounts
from polyreme_trainer.service.agents.run import KIND, AgentPolicy, run_config
from polyreme_trainer.service.wire import Request

_LOOK_SECONDS = 1.0
_REASONS = {tinker_pb2.STOP_REASON_STOP: FINISH_REASON_STOP, tinker_pb2.STOP_REASON_LENGTH: FINISH_REASON_LENGTH}


@dataclass(frozen=True)
class LogSampler(Sampler):
    """A session's policy, as the service's sampler serves it. `most`: open requests of its tenant; `seconds`: of one answer."""

    log: RequestLog
    policy: AgentPolicy
    most: int
    seconds: float

    async def sample(self, wanted: Generation, options: GenerateOptions = PLAIN) -> list[PartialRollout]:
        """`wanted`'s only sample, whose tokens come together. Raises GenerateError, or DataError for an unanswerable request."""
        rollouts = options.partial or wanted.blank()
        rollouts.start_call()
        result = await self._result(_request(wanted, self.policy))
        if result[:1] == b"J":  # it stands: the turn has the same result when it is asked for again
            do = "Change the request, or open another session."
            raise DataError("a turn that the sampler can answer", json.loads(result[1:])["error"], do)
        [sequence] = tinker_pb2.SampleResponse.FromString(result[1:]).sequences
        span = VersionSpan(version=0, start=0, end=len(sequence.tokens) // 4)
        chunk = rollout_pb2.Chunk(slot=0, token_ids=sequence.tokens, logprobs=sequence.logprobs, oldest_version=0)
        end = rollout_pb2.SlotEnd(slot=0, finish_reason=_REASONS[sequence.stop_reason], spans=[span])
        rollouts.add(rollout_pb2.GenerateResponse(chunks=[chunk], ends=[end]))
        if options.arrived is not None:
            options.arrived(rollouts)
        return rollouts.samples

    async def _result(self, request: Request) -> bytes:
        """What the log answers to a request. Raises GenerateError."""
        payload = request.pack()
        name = f"{self.policy.tenant}-{self.run_id}:{xxhash.xxh3_128_hexdigest(payload)}"
        try:
            became = await self.log.submit(LogPlace(name, "sampler"), payload, self.most)
            if became not in ("new", "known"):
                raise GenerateError(f"expected room in the request log for a turn; found that it is {became}")
            result = await self.log.result(name, self.seconds)
        except StoreError as error:
            raise GenerateError(str(error)) from error
        if result is None:
            raise GenerateError(f"expected an answer of the sampler within {self.seconds:g} s; found none")
        return result


def _request(wanted: Generation, policy: AgentPolicy) -> Request:
    """A turn as a request to the sampler."""
    fields = {
        "weights": policy.weights or None,
        "prompt": wanted.prompt_ids.tolist(),
        "max_tokens": wanted.max_new,
        "seed": wanted.seed(0, 0),
        "temperature": wanted.temperature,
        "stop_ids": list(wanted.stop_ids),
    }
    return Request("sample", fields)


class AgentTurns:
    """Answers what the environment server of the service's sessions asks for."""

    def __init__(self, log: RequestLog, run: Run, config: RunConfig, template: Template, accounts: Accounts) -> None:
        assert config.environment is not None
        self._log, self._config, self._settings = log, config, config.environment
        self._template, self._tail, self._accounts = template, Tail(template), accounts
        self._turns = OnlineTurns(run, config.environment, self._sampled)

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop`. Raises StoreError."""
        try:
            while not stop.is_set():
                await self._turns.refresh()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await stop.wait()
        finally:
            await self._turns.close()

    async def _sampled(
        self, request: environment_pb2.AgentRequest, tell: Callable[[environment_pb2.Delta], None]
    ) -> environment_pb2.Answer:
        """The turn that a request asks for. Raises as `OnlineTurns` says."""
        try:
            record = await self._log.record(KIND, request.session)
        except StoreError as error:
            raise GenerateError(str(error)) from error
        if record is None:
            raise EpisodeError(f"expected a session of this service; found {request.session!r:.80}")
        return await kept_turn(request, self._session(request.session, AgentPolicy.of(record)), tell)

    def _session(self, id: str, policy: AgentPolicy) -> EpisodeSession:
        rollout = self._config.rollout
        most = min(policy.max_tokens or rollout.max_new_tokens, rollout.max_new_tokens)
        own = rollout.model_copy(update={"temperature": policy.temperature, "max_new_tokens": most})
        config = self._config.model_copy(update={"rollout": own, "seed": policy.seed})
        requests, seconds = self._accounts.quota_of(policy.tenant).requests, self._settings.max_seconds
        sampler = LogSampler(id, config, self._template, self._log, policy, requests, seconds)
        task = Task(Admission(int(id, 16), 1, 0), Prompt(np.zeros(0, np.int32), "", "", "{}", ""))
        bounds = Bounds(self._settings.max_turns, rollout.max_model_len, seconds)
        return EpisodeSession(sampler, self._tail, task, 0, bounds)


async def serve_turns(log: RequestLog, run: Run, config: ServeConfig, settings: ServeAgents, stop: asyncio.Event) -> None:
    """Samples sessions' turns until `stop`. Raises ConfigError when the model's chat template cannot continue a conversation."""
    made = run_config(config, settings)
    template = Template(await run.model_files(), made.data)
    await AgentTurns(log, run, made, template, Accounts.read(config)).run(stop)
