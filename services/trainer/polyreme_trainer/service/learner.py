"""The learner of the training service: executes requests for models, one after the other; batches of several models in one pass.

Invariant: a request changes a model once. A request that ends in error leaves the model as it was, except that an optimizer step
with a gradient that is not finite drops it; both happen again in the same way after a restart, so the weights have the same bits.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from polyreme.experience.metric_records import StageDone
from polyreme.experience.open_requests import OpenRequests
from polyreme.experience.requests import MAX_BEGUN, LogPlace, RequestLog, in_lane
from polyreme.process.tasks import end_all
from polyreme_trainer.service.batch import BatchResult, LossCall
from polyreme_trainer.service.errors import ModelLostError, TenantError
from polyreme_trainer.service.folders import Facts
from polyreme_trainer.service.live_models import LiveModels, Replay
from polyreme_trainer.service.losses import SPECS
from polyreme_trainer.service.messages import AdamSettings, Kind, SavedModel, name_of, read_path
from polyreme_trainer.service.observer.meters import StepMeters
from polyreme_trainer.service.snapshots import Snapshot, SnapshotProbe, finish_compared
from polyreme_trainer.service.states import States
from polyreme_trainer.service.tenant_engine import TenantEngine, lora_of
from polyreme_trainer.service.turns import LaneTurn, firsts, next_request
from polyreme_trainer.service.wire import Request, batch_result, failure, json_result, parse_batch, read_batch

CREATES = frozenset({"create_model", "create_from"})
BATCHES = frozenset({"forward", "forward_backward"})
"""Requests of which those of several models may share a pass."""
CHANGES = CREATES | {"forward_backward", "optim_step", "load_weights"}
"""Requests that change a model, which a restart executes again."""
EPHEMERAL_SECONDS = 86400.0
"""Life of sampler weights without a name."""
SWEEP_SECONDS = 60.0
"""How often what has expired is deleted."""


class ModelLearner:
    """Executes requests until `stop` is set.

    Args:
        log, engine, states: the request log, the engine, and the saved models.
        base_model: the base model's name.
        max_models: the largest number of models in memory. The others are on disk, and come back with their next request.
        canary: what is compared before a client hears of weights for a sampler; None: these are not loaded before.
        replay_seconds, replay_bytes: a state is saved when the requests since the newest took longer, or they have more bytes.
    """

    def __init__(
        self,
        log: RequestLog,
        engine: TenantEngine,
        states: States,
        base_model: str,
        max_models: int,
        canary: SnapshotProbe | None = None,
        replay_seconds: float = 20.0,
        replay_bytes: int = 256 << 20,
    ) -> None:
        self._log, self._engine, self._states, self._base_model = log, engine, states, base_model
        self._critic = name_of(base_model, critic=True)
        self._meters = StepMeters()
        limit, again = Replay(replay_seconds, replay_bytes), partial(self._execute, again=True)
        self._models = LiveModels(log, engine, states, base_model, max_models, limit, self._meters, again)
        self._canary = canary
        self._written: dict[LogPlace, Snapshot] = {}
        """Snapshots whose requests are not finished."""
        self._loading: dict[LogPlace, asyncio.Task[None]] = {}
        """Requests that wait until the sampler has loaded their snapshot."""
        self._ops: Mapping[str, Callable[[str, int, Request], bytes]] = {
            "create_model": self._create,
            "create_from": self._load_weights,
            "optim_step": self._optim_step,
            "save_weights": partial(self._save, "weights"),
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": partial(self._save, "external_weights"),
            "load_weights": self._load_weights,
            "refused": self._refuse,
        }

    async def run(self, stop: asyncio.Event) -> None:
        """Raises StoreError when Redis is lost."""
        turn, swept = LaneTurn(), -math.inf
        try:
            async with OpenRequests.of(self._log, "learner") as requests:
                while not stop.is_set():
                    if time.monotonic() - swept > SWEEP_SECONDS:
                        await self._models.sweep()
                        swept = time.monotonic()
                    waiting = await self._waiting(requests)
                    chosen = next_request(waiting, turn)
                    if chosen is None:
                        await requests.news(self._loading.values())
                        continue
                    place, turn = chosen
                    await self._finish(await self._joined(requests, waiting, place))
                    await asyncio.sleep(0)  # for the signal handlers and the snapshots that load
        finally:
            await end_all(self._loading.values())

    async def _waiting(self, requests: OpenRequests) -> list[LogPlace]:
        """The open requests, without those of models whose snapshot is loading. Raises what its loading has raised."""
        for place in [place for place, task in self._loading.items() if task.done()]:
            self._loading.pop(place).result()
        await requests.look()  # those that are done are not among them any more
        loading = {place.lane for place in requests.places if place in self._loading}
        return [place for place in requests.places if place.lane not in loading]

    async def _joined(self, requests: OpenRequests, waiting: Sequence[LogPlace], leader: LogPlace) -> dict[LogPlace, bytes]:
        """The payloads of a request and, if it is a batch, of the batches of other models that share its pass. A request that may
        have ended the process is executed alone."""
        joined = dict(zip([leader], await requests.take([leader]), strict=True))
        op = Request.unpack(joined[leader]).op
        alone = op not in BATCHES or requests.has_begun(leader)
        if alone or await self._models.recover(leader.lane) is not None:  # which may move another model to disk
            return joined
        room = self._engine.pass_bytes - len(joined[leader])
        for place in firsts(waiting).values():
            has_model = place.lane != leader.lane and place.lane in self._engine.models
            if not has_model or requests.has_begun(place) or len(joined) >= self._engine.most:
                continue
            [payload] = await requests.take([place])
            if len(payload) <= room and Request.unpack(payload).op == op:
                joined[place] = payload
                room -= len(payload)
        return joined

    async def _finish(self, payloads: Mapping[LogPlace, bytes]) -> None:
        """Executes requests, of different models, and stores their results."""
        requests = {place: Request.unpack(payload) for place, payload in payloads.items()}
        began, at = time.monotonic(), time.time()
        results = dict[LogPlace, bytes]()
        for place, request in requests.items():
            if request.op == "unload_model":
                await self._models.unload(place.lane)  # before its answer, after which nothing would repeat it
                result = json_result(type="unload_model", model_id=place.lane)
                await self._log.finish(place, result, record=StageDone(step=0, hf_path=""))
                return
            if request.op in CREATES:
                await self._models.make_room()
            elif (problem := await self._models.recover(place.lane)) is not None:
                results[place] = failure(problem, "server")
        for place, begun in zip(requests, await self._log.begin(list(requests)), strict=True):
            if begun > MAX_BEGUN:
                lost = f"the learner ended {begun - 1} times while it executed this request; see its log"
                results.setdefault(place, failure(lost, "server"))
        executed = {place: request for place, request in requests.items() if place not in results}
        results |= await self._execute(executed)
        seconds = (time.monotonic() - began) / len(requests)
        records, counts = self._meters.report(requests, at, time.time())
        counting = asyncio.create_task(self._log.records.count(counts))  # for which the answers need not wait
        try:
            for place, request in requests.items():
                self._models.mark_used(place, request.op in CHANGES)
                if (snapshot := self._written.pop(place, None)) is not None and self._canary is not None:
                    compared = finish_compared(self._log, self._states, place, results[place], snapshot, self._canary)
                    self._loading[place] = asyncio.create_task(compared)
                    continue
                keep = request.op in CHANGES and place in executed and place.lane in self._engine.models
                if keep and request.op in ("create_from", "load_weights"):
                    # Before its answer, after which its checkpoint may be deleted. To load twice is to load once.
                    self._models.save_state(place)
                if request.op in CREATES and place.lane not in self._engine.models:
                    await self._models.end_uncreated(place.lane)
                await self._log.finish(place, results[place], keep, records.get(place))
                if keep:
                    await self._models.keep(place, seconds, len(payloads[place]))
        finally:
            await counting

    async def _execute(self, requests: Mapping[LogPlace, Request], again: bool = False) -> dict[LogPlace, bytes]:
        """Results of one request for each of several models; several are batches of one operation. `again`: they had results."""
        results, calls = dict[LogPlace, bytes](), dict[LogPlace, LossCall]()
        for place, request in requests.items():
            try:
                if request.op not in (*CREATES, "refused") and place.lane not in self._engine.models:
                    raise TenantError("expected a model; found one that could not be created, or that was unloaded")
                if request.op in CREATES and not again:
                    self._states.check_room()
                    created = request.op == "create_model"
                    lora = lora_of(request.fields, place.lane)[0] if created else self._read_checkpoint(request)[1].lora
                    await self._models.check_alone(place.lane, lora)
                if request.op in BATCHES:
                    calls[place] = self._read_batch(place.lane, request)
                else:
                    results[place] = self._ops[request.op](place.lane, place.seq, request)
            except ModelLostError as error:
                results[place] = failure(str(error), "user")
                self._models.forget(place.lane)  # its next request recovers it
            except TenantError as error:
                results[place] = failure(str(error), "user")
        if calls:
            results |= self._compute(calls, backward=requests[next(iter(calls))].op == "forward_backward")
        return results

    def _read_batch(self, lane: str, request: Request) -> LossCall:
        """The batch of a request whose loss the model has. Raises TenantError."""
        call, critic = read_batch(parse_batch(request.body)), lane in self._engine.critics
        if (SPECS[call.loss].output == "values") != critic:
            wanted = "loss_fn = value for a critic" if critic else f"a critic, {self._critic}, for loss_fn = value"
            raise TenantError(f"expected {wanted}; found {call.loss if critic else self._base_model}")
        return call

    def _compute(self, calls: Mapping[LogPlace, LossCall], backward: bool) -> dict[LogPlace, bytes]:
        """The results of batches."""
        compute = self._engine.forward_backward if backward else self._engine.forward
        found = compute({place.lane: call for place, call in calls.items()})
        results = dict[LogPlace, bytes]()
        for place, call in calls.items():
            result = found[place.lane]
            if isinstance(result, TenantError):
                results[place] = failure(str(result), "user")
                continue
            if backward:
                self._meters.add_batch(place.lane, call.batch, result.loss)
            results[place] = batch_result(result, SPECS[call.loss].output)
        return results

    def _create(self, lane: str, seq: int, request: Request) -> bytes:
        lora, seed = lora_of(request.fields, lane)
        self._engine.create(lane, lora, seed, request.fields.get("critic", False))
        return json_result(type="create_model", model_id=lane)

    def _load_weights(self, lane: str, seq: int, request: Request) -> bytes:
        """Into a model, or as a new one. Raises ModelLostError when a client deletes the checkpoint meanwhile."""
        folder, facts = self._read_checkpoint(request)
        if request.op == "load_weights" and facts.base_model != self._models.name(lane):
            raise TenantError(f"expected a checkpoint of {self._models.name(lane)}; found one of {facts.base_model}")
        if request.op == "load_weights" and facts.lora != self._engine.models[lane]:
            raise TenantError(
                "expected a checkpoint with the model's own rank and layers; found another one. Create a model from it."
            )
        self._models.load(lane, folder, facts)
        return json_result(type="load_weights", path=request.fields["path"], model_id=lane)

    def _read_checkpoint(self, request: Request) -> tuple[Path, Facts]:
        """A checkpoint's directory and facts (steps only with moments). Raises TenantError without one to continue from."""
        checkpoint = read_path(request.fields["path"])
        facts = self._states.facts(checkpoint, request.fields["tenant"])
        if checkpoint.kind != "weights":
            raise TenantError(f"expected a checkpoint that save_weights wrote; found {checkpoint}")
        if facts.base_model not in (self._base_model, self._critic):
            raise TenantError(f"expected a checkpoint of {self._base_model}; found one of {facts.base_model}")
        return self._states.folder(checkpoint), facts if request.fields["optimizer"] else replace(facts, steps=0)

    def _optim_step(self, lane: str, seq: int, request: Request) -> bytes:
        given = AdamSettings.model_validate(request.fields["adam"])
        try:
            norm, steps = self._engine.optim_step(lane, given)
        except TenantError as error:
            if not isinstance(error, ModelLostError):
                self._meters.drop_gradient(lane)
            raise
        self._meters.add_step(lane, norm, given.learning_rate, steps)
        return json_result(type="optim_step", metrics={"grad_norm": norm, "step": float(steps)})

    def _save(self, kind: Kind, lane: str, seq: int, request: Request) -> bytes:
        return json_result(type=request.op, path=str(self._save_files(lane, seq, request, kind)))

    def _save_for_sampler(self, lane: str, seq: int, request: Request) -> bytes:
        if lane in self._engine.critics:
            raise TenantError("not supported: weights for a sampler of a critic, which has values and no tokens")
        checkpoint = self._save_files(lane, seq, request, "sampler_weights")
        if self._canary is not None:
            measured = self._engine.forward({lane: self._canary.call})[lane]
            assert isinstance(measured, BatchResult)
            self._written[in_lane(lane, seq)] = Snapshot(checkpoint, measured.outputs[0])
        session = request.fields["sampling_session"]
        named: dict[str, object] = {"path": None, "sampling_session_id": session} if session else {"path": str(checkpoint)}
        return json_result(type="save_weights_for_sampler", **named)

    def _save_files(self, lane: str, seq: int, request: Request, kind: Kind) -> SavedModel:
        """Saves a model to continue from, of the kind `weights`, or the installed one: PEFT's files, or all weights."""
        resumable = partial(self._engine.save, lane, gradient=False)
        write = resumable if kind == "weights" else partial(self._engine.write_sampler_weights, lane)
        fields, now = request.fields, time.time()
        is_named = not fields.get("sampling_session")
        life = fields["ttl"] or (None if is_named else EPHEMERAL_SECONDS)
        whose = {"tenant": fields["tenant"], "metadata": fields["metadata"], "is_named": is_named, "created": now}
        of_model = self._models.name(lane), self._engine.models[lane], seq, self._engine.steps(lane)
        checkpoint, facts = (
            SavedModel(lane, kind, fields["name"]),
            Facts(*of_model, None if life is None else now + life, **whose),
        )
        self._states.save(checkpoint, write, facts, fields["overwrite"])
        if kind != "sampler_weights" or self._canary is None:  # others are compared first
            self._states.settle(checkpoint, seq)
        return checkpoint

    def _refuse(self, lane: str, seq: int, request: Request) -> bytes:
        return failure(request.fields["message"], "user")
