"""The learner of the training service: executes the requests for models, one after the other; batches of several models in one pass.

Invariant: a request changes a model once. A request that ends with an error leaves the model as it was, except that a refused optimizer step
drops the gradient; both happen again in the same way after a restart, so the weights have the same bits.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import xxhash

from polyreme.config.trainer import LoraConfig
from polyreme.experience.requests import MAX_BEGUN, LogPlace, RequestLog, in_lane
from polyreme_trainer.megatron.training.optimizer import Adam
from polyreme_trainer.service.batch import BatchResult, LossCall
from polyreme_trainer.service.engine import GRADIENT, ServiceEngine, TenantState
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.folders import Facts
from polyreme_trainer.service.messages import AdamSettings, LoraOptions, SavedModel, read_path
from polyreme_trainer.service.snapshots import Snapshot, canary, canary_call, load_snapshot
from polyreme_trainer.service.states import States
from polyreme_trainer.service.turns import LaneTurn, firsts, next_request
from polyreme_trainer.service.wire import Request, batch_result, failure, json_result, parse_batch, read_batch

logger = logging.getLogger(__name__)

CREATES = frozenset({"create_model", "create_from"})
BATCHES = frozenset({"forward", "forward_backward"})
"""Requests of which those of several models may share a pass."""
CHANGES = CREATES | {"forward_backward", "optim_step", "load_weights"}
"""Requests that change a model, which a restart executes again."""
LORA_ALPHA = 32.0
"""The output of an adapter of rank r is multiplied by LORA_ALPHA / r."""
EPHEMERAL_SECONDS = 86400.0
"""Life of sampler weights without a name."""
REPLAY_SECONDS = 20.0
"""A state is saved after an optimizer step when executing the requests since the newest state took longer than this."""


class ModelLearner:
    """Executes requests until `stop` is set.

    Args:
        log, engine, states: the request log, the engine, and the saved models.
        base_model: the base model's name.
        max_models: the largest number of models, each of which takes host memory.
        longest: the largest number of tokens of prompt and answer.
    """

    def __init__(
        self, log: RequestLog, engine: ServiceEngine, states: States, base_model: str, max_models: int, longest: int
    ) -> None:
        self._log, self._engine, self._states, self._base_model, self._max_models = log, engine, states, base_model, max_models
        self._canary = canary(engine.vocabulary, min(longest, engine.longest))
        self._written: dict[LogPlace, Snapshot] = {}
        """Snapshots whose requests are not finished."""
        self._loading: dict[LogPlace, asyncio.Task[None]] = {}
        """Requests that wait until the sampler has loaded their snapshot."""
        self._replay: dict[str, float] = {}
        """Seconds that a restart would need to execute the kept requests of each model."""
        self._ops: Mapping[str, Callable[[str, int, Request], bytes]] = {
            "create_model": self._create,
            "create_from": self._create_from,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "refused": self._refuse,
        }

    async def run(self, stop: asyncio.Event) -> None:
        """Raises StoreError when Redis is lost."""
        turn, last = LaneTurn(), await self._log.last_event()
        try:
            while not stop.is_set():
                waiting = await self._waiting()
                chosen = next_request(waiting, turn)
                if chosen is None:
                    last = await self._log.wait(last)
                    continue
                place, turn = chosen
                request = Request.unpack(await self._log.payload(place))
                if request.op == "unload_model":
                    await self._log.finish(place, json_result(type="unload_model", model_id=place.lane))
                    await self._unload(place)
                else:
                    await self._finish({place: request} | await self._joining(waiting, place, request))
                await asyncio.sleep(0)  # for the signal handlers and the snapshots that load
        finally:
            for task in self._loading.values():
                task.cancel()
            await asyncio.gather(*self._loading.values(), return_exceptions=True)

    async def _waiting(self) -> list[LogPlace]:
        """The open requests, without those of models whose snapshot is loading. Raises what its loading has raised."""
        for place in [place for place, task in self._loading.items() if task.done()]:
            self._loading.pop(place).result()
        places = await self._log.open("learner")  # those that are done are not among them any more
        loading = {place.lane for place in places if place in self._loading}
        return [place for place in places if place.lane not in loading]

    async def _joining(self, waiting: Sequence[LogPlace], leader: LogPlace, request: Request) -> dict[LogPlace, Request]:
        """The batches of other models that share the pass of a request. One that may have ended the process is executed alone."""
        joining: dict[LogPlace, Request] = {}
        if request.op not in BATCHES or await self._log.begun(leader):
            return joining
        room = self._engine.pass_bytes - len(request.body)
        for place in firsts(waiting).values():
            if place.lane == leader.lane or place.lane not in self._engine.models or len(joining) + 1 >= self._engine.most:
                continue
            other = Request.unpack(await self._log.payload(place))
            if other.op == request.op and len(other.body) <= room and not await self._log.begun(place):
                joining[place] = other
                room -= len(other.body)
        return joining

    async def _finish(self, requests: Mapping[LogPlace, Request]) -> None:
        """Executes requests, of different models, and stores their results."""
        began, begun = time.monotonic(), dict[LogPlace, int]()
        for place, request in requests.items():
            if request.op not in CREATES:
                await self._recover(place.lane)
            begun[place] = await self._log.begin(place)
        results = self._execute({place: request for place, request in requests.items() if begun[place] <= MAX_BEGUN})
        seconds = (time.monotonic() - began) / len(requests)
        for place, request in requests.items():
            lost = f"the learner ended {begun[place] - 1} times while it executed this request; see its log"
            keep = request.op in CHANGES and place in results
            if (snapshot := self._written.pop(place, None)) is not None:
                self._loading[place] = asyncio.create_task(self._load(place, snapshot, results[place]))
                continue
            await self._log.finish(place, results.get(place, failure(lost, "server")), keep)
            if keep:
                self._replay[place.lane] = self._replay.get(place.lane, 0.0) + seconds
            if keep and (request.op in ("create_from", "load_weights") or self._replay[place.lane] > REPLAY_SECONDS):
                await self._save_state(place)

    def _execute(self, requests: Mapping[LogPlace, Request]) -> dict[LogPlace, bytes]:
        """The results of one request for each of several models; of several ones, all are batches of the same operation."""
        results, calls = dict[LogPlace, bytes](), dict[LogPlace, LossCall]()
        for place, request in requests.items():
            try:
                if request.op not in (*CREATES, "refused") and place.lane not in self._engine.models:
                    raise TenantError("expected a model; found one that could not be created, or that was unloaded")
                if request.op in BATCHES:
                    calls[place] = read_batch(parse_batch(request.body))
                else:
                    results[place] = self._ops[request.op](place.lane, place.seq, request)
            except TenantError as error:
                results[place] = failure(str(error), "user")
        if calls:
            compute = (
                self._engine.forward_backward if requests[next(iter(calls))].op == "forward_backward" else self._engine.forward
            )
            found = compute({place.lane: call for place, call in calls.items()})
            results |= {place: _answer(found[place.lane]) for place in calls}
        return results

    async def _load(self, place: LogPlace, snapshot: Snapshot, result: bytes) -> None:
        """Finishes a request once the sampler has loaded the snapshot that it wrote."""
        problem = await load_snapshot(self._log, place, snapshot, self._canary, self._engine.dtype)
        if problem is not None:
            logger.error("model %s: %s", place.lane, problem)
        await self._log.finish(place, result if problem is None else failure(problem, "server"))

    async def _recover(self, lane: str) -> None:
        """Makes a model what it was before a restart: its newest state, and the kept requests since."""
        if lane in self._engine.models:
            return
        saved = self._states.newest_state(lane)
        seq = -1
        if saved is not None:
            seq, state = saved
            self._engine.put(lane, state)
            await self._log.forget(lane, seq)
        kept = [place for place in await self._log.kept(lane) if place.seq > seq]
        if kept:
            logger.info("model %s: executing %d requests again", lane, len(kept))
        began = time.monotonic()
        for place in kept:
            self._execute({place: Request.unpack(await self._log.payload(place))})
        self._replay[lane] = time.monotonic() - began

    async def _save_state(self, place: LogPlace) -> None:
        """Saves the model after a request, so that a restart need not execute it again."""
        if place.lane not in self._engine.models:  # it could not be created
            return
        state = self._engine.take(place.lane)
        if state.of(GRADIENT):  # the next optimizer step's requests stay together
            return
        self._states.save_state(place.lane, state, self._base_model, place.seq)
        await self._log.forget(place.lane, place.seq)
        self._replay[place.lane] = 0.0

    async def _unload(self, place: LogPlace) -> None:
        self._engine.remove(place.lane)
        self._states.remove(place.lane)
        await self._log.forget(place.lane, place.seq)

    def _check_room(self, lora: LoraConfig | None) -> None:
        """Raises TenantError when there is no room for another model."""
        models = self._engine.models
        if len(models) >= self._max_models:
            raise TenantError(
                f"expected at most {self._max_models} models; found {len(models)}. Unload one, or raise max_models."
            )
        if models and (lora is None or None in models.values()):
            raise TenantError("a model with all parameters shares the base model with no other model; unload the others first")

    def _create(self, lane: str, seq: int, request: Request) -> bytes:
        lora, seed = lora_of(request.fields["lora"], lane)
        self._check_room(lora)
        self._engine.create(lane, lora, seed)
        return json_result(type="create_model", model_id=lane)

    def _create_from(self, lane: str, seq: int, request: Request) -> bytes:
        state = self._read_checkpoint(request)
        self._check_room(state.lora)
        self._engine.put(lane, state)
        return json_result(type="load_weights", path=request.fields["path"], model_id=lane)

    def _load_weights(self, lane: str, seq: int, request: Request) -> bytes:
        state = self._read_checkpoint(request)
        if state.lora != self._engine.models[lane]:
            raise TenantError(
                "expected a checkpoint with the model's own rank and layers; found another one. Create a model from it."
            )
        self._engine.put(lane, state)
        return json_result(type="load_weights", path=request.fields["path"], model_id=lane)

    def _read_checkpoint(self, request: Request) -> TenantState:
        """The state of a checkpoint, with or without the moments. Raises TenantError when there is none, or it is not one to continue from."""
        checkpoint = read_path(request.fields["path"])
        facts = self._states.facts(checkpoint)
        if checkpoint.kind != "weights":
            raise TenantError(f"expected a checkpoint that save_weights wrote; found {checkpoint}")
        if facts.base_model != self._base_model:
            raise TenantError(f"expected a checkpoint of {self._base_model}; found one of {facts.base_model}")
        state = self._states.load(self._states.folder(checkpoint))
        return (
            state if request.fields["optimizer"] else TenantState(state.lora, 0, state.without("exp_avg", "exp_avg_sq").tensors)
        )

    def _optim_step(self, lane: str, seq: int, request: Request) -> bytes:
        given = AdamSettings.model_validate(request.fields["adam"])
        adam = Adam(given.beta1, given.beta2, given.eps, given.weight_decay, given.grad_clip_norm)
        norm, steps = self._engine.optim_step(lane, given.learning_rate, adam)
        return json_result(type="optim_step", metrics={"grad_norm": norm, "step": float(steps)})

    def _save(self, lane: str, seq: int, request: Request) -> bytes:
        checkpoint = SavedModel(lane, "weights", request.fields["name"])
        state = self._engine.take(lane)
        facts = self._facts(lane, seq, state.steps, request.fields["ttl"])
        self._states.save(checkpoint, state, facts, request.fields["overwrite"])
        self._states.sweep(lane)
        return json_result(type="save_weights", path=str(checkpoint))

    def _save_for_sampler(self, lane: str, seq: int, request: Request) -> bytes:
        fields = request.fields
        checkpoint, session = SavedModel(lane, "sampler_weights", fields["name"]), fields["sampling_session"]
        steps = self._engine.steps(lane)
        facts = self._facts(lane, seq, steps, fields["ttl"] or (EPHEMERAL_SECONDS if session else None))
        write = partial(self._engine.write_sampler_weights, lane)
        self._states.save_for_sampler(checkpoint, write, facts, fields["overwrite"])
        measured = self._engine.forward({lane: canary_call(self._canary)})[lane]
        assert isinstance(measured, BatchResult)
        snapshot = Snapshot(self._states.folder(checkpoint).resolve(), measured.logprobs[0])
        self._written[in_lane(lane, seq)] = snapshot
        self._states.sweep(lane)
        named: dict[str, Any] = {"path": None, "sampling_session_id": session} if session else {"path": str(checkpoint)}
        return json_result(type="save_weights_for_sampler", **named)

    def _facts(self, lane: str, seq: int, steps: int, ttl: float | None) -> Facts:
        expires = None if ttl is None else time.time() + ttl
        return Facts(self._base_model, self._engine.models[lane], seq, steps, expires)

    def _refuse(self, lane: str, seq: int, request: Request) -> bytes:
        return failure(request.fields["message"], "user")


def _answer(found: BatchResult | TenantError) -> bytes:
    return failure(str(found), "user") if isinstance(found, TenantError) else batch_result(found)


def lora_of(fields: Mapping[str, Any] | None, lane: str) -> tuple[LoraConfig | None, int]:
    """The adapters that a client asks for, and their seed. Rank 0, or no adapters: all parameters. Raises TenantError for no layers."""
    if fields is None or fields["rank"] == 0:
        return None, 0
    given = LoraOptions.model_validate(fields)
    if not (given.train_attn or given.train_mlp):
        raise TenantError(
            "not supported: lora_config with train_attn = false and train_mlp = false; the output layer has no adapters"
        )
    attention, mlp = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
    targets = None if given.train_attn and given.train_mlp else attention if given.train_attn else mlp
    seed = xxhash.xxh3_64_intdigest(lane.encode()) >> 1 if given.seed is None else given.seed
    return LoraConfig(rank=given.rank, alpha=LORA_ALPHA, targets=targets), seed
