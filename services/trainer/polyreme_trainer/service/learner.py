"""The learner of the training service: executes the requests for models, one after the other.

Invariant: a request changes a model once. A request that ends with an error leaves the model as it was, except that a refused optimizer step
drops the gradient; both happen again in the same way after a restart, so the weights have the same bits.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polyreme.config.trainer import LoraConfig
from polyreme.experience.requests import MAX_BEGUN, LogPlace, RequestLog
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.folders import Facts
from polyreme_trainer.service.messages import AdamSettings, Kind, SavedModel, read_path
from polyreme_trainer.service.observer.report import LearnerReport
from polyreme_trainer.service.states import States
from polyreme_trainer.service.tenant_engine import TenantEngine, TenantState, lora_of
from polyreme_trainer.service.turns import LaneTurn, next_request
from polyreme_trainer.service.wire import Request, batch_result, failure, json_result, parse_batch, read_batch

logger = logging.getLogger(__name__)

CHANGES = frozenset({"create_model", "create_from", "forward_backward", "optim_step", "load_weights"})
"""Requests that change a model, which a restart executes again."""
EPHEMERAL_SECONDS = 86400.0
"""Life of sampler weights without a name."""
SWEEP_SECONDS = 60.0
"""How often what has expired is deleted."""
REPLAY_SECONDS = 20.0
"""A state is saved when executing the requests since the newest one took longer than this,"""
REPLAY_BYTES = 256 << 20
"""or when they have more bytes than this."""


@dataclass(frozen=True)
class Replay:
    """What a restart would need to execute the kept requests of a model: seconds, and bytes of requests."""

    seconds: float = 0.0
    nbytes: int = 0

    def and_then(self, seconds: float, nbytes: int) -> "Replay":
        return Replay(self.seconds + seconds, self.nbytes + nbytes)


class ModelLearner:
    """Executes requests until `stop` is set.

    Args:
        log, engine, states: the request log, the engine, and the saved models.
        base_model: the base model's name.
        max_models: the largest number of models, each of which takes host memory.
    """

    def __init__(self, log: RequestLog, engine: TenantEngine, states: States, base_model: str, max_models: int) -> None:
        self._log, self._engine, self._states, self._base_model, self._max_models = log, engine, states, base_model, max_models
        self._report = LearnerReport(log.records)
        self._waiting: dict[str, TenantState] = {}
        self._installed = ""
        self._replay: dict[str, Replay] = {}
        self._saved: dict[str, int] = {}
        """The request after which each model's newest state was saved."""
        self._ops: Mapping[str, Callable[[str, int, Request], bytes]] = {
            "create_model": self._create,
            "create_from": self._create_from,
            "forward": self._forward,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "load_weights": self._load,
            "refused": self._refuse,
        }

    async def run(self, stop: asyncio.Event) -> None:
        """Raises StoreError when Redis is lost."""
        turn, last, swept = LaneTurn(), await self._log.last_event(), -math.inf
        while not stop.is_set():
            if time.monotonic() - swept > SWEEP_SECONDS:
                await self._sweep()
                swept = time.monotonic()
            chosen = next_request(await self._log.open("learner"), turn)
            if chosen is None:
                last = await self._log.wait(last)
                continue
            place, turn = chosen
            await self._finish(place, await self._log.payload(place))
            await asyncio.sleep(0)  # for the signal handlers

    async def _finish(self, place: LogPlace, payload: bytes) -> None:
        """Executes a request and stores its result."""
        lane, began, at, request = place.lane, time.monotonic(), time.time(), Request.unpack(payload)
        if request.op == "unload_model":
            await self._report.unloaded(lane, place.seq)
            await self._log.finish(place, json_result(type="unload_model", model_id=lane))
            await self._unload(lane)
            return
        if request.op not in ("create_model", "create_from"):
            await self._recover(lane)
        begun = await self._log.begin(place)
        lost = f"the learner ended {begun - 1} times while it executed this request; see its log"
        result = failure(lost, "server") if begun > MAX_BEGUN else self._execute(place, request)
        await self._report.executed(place, request, at)
        keep = request.op in CHANGES and begun <= MAX_BEGUN
        if keep and request.op in ("create_from", "load_weights"):
            self._save_state(
                place
            )  # before its answer, after which its checkpoint may be deleted. To load twice is to load once.
        await self._log.finish(place, result, keep)
        if keep:
            replay = self._replay.get(lane, Replay()).and_then(time.monotonic() - began, len(payload))
            self._replay[lane] = replay
            if replay.seconds > REPLAY_SECONDS or replay.nbytes > REPLAY_BYTES:
                self._save_state(place)
        if self._saved.get(lane) == place.seq:
            await self._log.forget(lane, place.seq)
            self._replay[lane] = Replay()

    def _execute(self, place: LogPlace, request: Request) -> bytes:
        """The result of a request, on the installed model."""
        try:
            if request.op not in ("create_model", "create_from", "refused"):
                self._install(place.lane)
            return self._ops[request.op](place.lane, place.seq, request)
        except TenantError as error:
            return failure(str(error), "user")

    async def _recover(self, lane: str) -> None:
        """Makes a model what it was before a restart: its newest state, and the kept requests since."""
        if lane in self._waiting or lane == self._installed:
            return
        saved = self._states.newest_state(lane)
        seq = -1
        if saved is not None:
            seq, self._waiting[lane] = saved
            await self._log.forget(lane, seq)
        kept = [place for place in await self._log.kept(lane) if place.seq > seq]
        if kept:
            logger.info("model %s: executing %d requests again", lane, len(kept))
        replay = Replay()
        for place in kept:
            began, payload = time.monotonic(), await self._log.payload(place)
            self._execute(place, Request.unpack(payload))
            replay = replay.and_then(time.monotonic() - began, len(payload))
        self._report.meters.replayed(lane)
        self._replay[lane] = replay

    def _save_state(self, place: LogPlace) -> None:
        """Saves the model after a request, so that a restart need not execute it again."""
        if place.lane != self._installed:  # it could not be created
            return
        self._states.save_state(place.lane, self._engine.take(), self._base_model, place.seq)
        self._saved[place.lane] = place.seq

    async def _unload(self, lane: str) -> None:
        self._waiting.pop(lane, None)
        self._saved.pop(lane, None)
        self._replay.pop(lane, None)
        self._installed = "" if self._installed == lane else self._installed
        self._states.remove(lane)
        await self._log.end(lane)

    async def _sweep(self) -> None:
        """Deletes expired checkpoints, and what is left of models whose records have expired."""
        for lane in {*self._waiting, self._installed, *self._states.unfinished(), *await self._log.lanes()} - {""}:
            if await self._log.record("model", lane) is None:
                logger.info("model %s has expired", lane)
                await self._unload(lane)
        self._states.sweep()

    def _install(self, lane: str) -> None:
        """Installs a model that waits. Raises TenantError for one that could not be created or is unloaded."""
        if lane == self._installed:
            return
        if lane not in self._waiting:
            raise TenantError("expected a model; found one that could not be created, or that was unloaded")
        self._move_out()
        self._engine.put(self._waiting.pop(lane))
        self._installed = lane

    def _move_out(self) -> None:
        if self._installed:
            self._waiting[self._installed] = self._engine.take()
            self._installed = ""

    def _check_room(self, lora: LoraConfig | None) -> None:
        """Raises TenantError when there is no room for another model."""
        count = len(self._waiting) + bool(self._installed)
        if count >= self._max_models:
            raise TenantError(f"expected at most {self._max_models} models; found {count}. Unload one, or raise max_models.")
        if count and (lora is None or any(self._lora_of(name) is None for name in (*self._waiting, self._installed) if name)):
            raise TenantError("a model with all parameters shares the base model with no other model; unload the others first")

    def _lora_of(self, name: str) -> LoraConfig | None:
        return self._engine.lora if name == self._installed else self._waiting[name].lora

    def _create(self, lane: str, seq: int, request: Request) -> bytes:
        lora, seed = lora_of(request.fields["lora"], lane)
        self._check_room(lora)
        self._move_out()
        self._engine.create(lora, seed)
        self._installed = lane
        return json_result(type="create_model", model_id=lane)

    def _create_from(self, lane: str, seq: int, request: Request) -> bytes:
        state = self._read_checkpoint(request)
        self._check_room(state.lora)
        self._move_out()
        self._engine.put(state)
        self._installed = lane
        return json_result(type="load_weights", path=request.fields["path"], model_id=lane)

    def _load(self, lane: str, seq: int, request: Request) -> bytes:
        state = self._read_checkpoint(request)
        if state.lora != self._engine.lora:
            raise TenantError(
                "expected a checkpoint with the model's own rank and layers; found another one. Create a model from it."
            )
        self._engine.put(state)
        return json_result(type="load_weights", path=request.fields["path"], model_id=lane)

    def _read_checkpoint(self, request: Request) -> TenantState:
        """The state of a checkpoint, with or without the moments. Raises TenantError when there is none, or it is not one to continue from."""
        checkpoint = read_path(request.fields["path"])
        facts = self._states.facts(checkpoint, request.fields["tenant"])
        if checkpoint.kind != "weights":
            raise TenantError(f"expected a checkpoint that save_weights wrote; found {checkpoint}")
        if facts.base_model != self._base_model:
            raise TenantError(f"expected a checkpoint of {self._base_model}; found one of {facts.base_model}")
        state = self._states.load(self._states.folder(checkpoint))
        return (
            state if request.fields["optimizer"] else TenantState(state.lora, 0, state.without("exp_avg", "exp_avg_sq").tensors)
        )

    def _forward(self, lane: str, seq: int, request: Request) -> bytes:
        call = read_batch(parse_batch(request.body))
        return batch_result(*self._engine.forward(call.batch, call.loss, call.options))

    def _forward_backward(self, lane: str, seq: int, request: Request) -> bytes:
        call = read_batch(parse_batch(request.body))
        logprobs, loss = self._engine.forward_backward(call.batch, call.loss, call.options)
        self._report.meters.add_batch(lane, call.batch, loss)
        return batch_result(logprobs, loss)

    def _optim_step(self, lane: str, seq: int, request: Request) -> bytes:
        given = AdamSettings.model_validate(request.fields["adam"])
        norm, steps = self._engine.optim_step(given)
        self._report.meters.add_step(lane, norm, given.learning_rate, steps)
        return json_result(type="optim_step", metrics={"grad_norm": norm, "step": float(steps)})

    def _save(self, lane: str, seq: int, request: Request) -> bytes:
        checkpoint = SavedModel(lane, "weights", request.fields["name"])
        state = self._engine.take()
        self._states.save(checkpoint, state, self._facts(seq, request), request.fields["overwrite"])
        return json_result(type="save_weights", path=str(checkpoint))

    def _save_for_sampler(self, lane: str, seq: int, request: Request) -> bytes:
        checkpoint = self._save_files(lane, seq, request, "sampler_weights")
        session = request.fields["sampling_session"]
        named: dict[str, Any] = {"path": None, "sampling_session_id": session} if session else {"path": str(checkpoint)}
        return json_result(type="save_weights_for_sampler", **named)

    def _save_external(self, lane: str, seq: int, request: Request) -> bytes:
        return json_result(type="save_weights_external", path=str(self._save_files(lane, seq, request, "external_weights")))

    def _save_files(self, lane: str, seq: int, request: Request, kind: Kind) -> SavedModel:
        """Saves the files of the installed model: PEFT's, or all weights."""
        checkpoint = SavedModel(lane, kind, request.fields["name"])
        write = self._engine.write_sampler_weights
        self._states.save_files(checkpoint, write, self._facts(seq, request), request.fields["overwrite"])
        return checkpoint

    def _facts(self, seq: int, request: Request) -> Facts:
        fields, now = request.fields, time.time()
        is_named = not fields.get("sampling_session")
        life = fields["ttl"] or (None if is_named else EPHEMERAL_SECONDS)
        expires = None if life is None else now + life
        whose = {"tenant": fields["tenant"], "metadata": fields["metadata"], "is_named": is_named, "created": now}
        return Facts(self._base_model, self._engine.lora, seq, self._engine.steps, expires, **whose)

    def _refuse(self, lane: str, seq: int, request: Request) -> bytes:
        return failure(request.fields["message"], "user")
