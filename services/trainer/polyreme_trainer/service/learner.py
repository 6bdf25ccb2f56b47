"""The learner of the training service: executes requests for models, one after the other; batches of several models in one pass.

Invariant: a request changes a model once. A request that ends in error leaves the model as it was, except that an optimizer step
with a gradient that is not finite drops it; both happen again in the same way after a restart, so the weights have the same bits.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from polyreme.config.trainer import LoraConfig
from polyreme.experience.open_requests import OpenRequests
from polyreme.experience.requests import MAX_BEGUN, LogPlace, RequestLog, in_lane
from polyreme.experience.store_errors import RefusedError
from polyreme.process.tasks import end_all
from polyreme_trainer.service.batch import BatchResult, LossCall
from polyreme_trainer.service.errors import ModelLostError, TenantError
from polyreme_trainer.service.folders import Facts, remove
from polyreme_trainer.service.losses import SPECS
from polyreme_trainer.service.messages import AdamSettings, Kind, SavedModel, name_of, read_path
from polyreme_trainer.service.observer.report import LearnerReport
from polyreme_trainer.service.snapshots import Snapshot, SnapshotProbe, load_snapshot
from polyreme_trainer.service.states import States
from polyreme_trainer.service.tenant_engine import TenantEngine, lora_of
from polyreme_trainer.service.turns import LaneTurn, firsts, next_request
from polyreme_trainer.service.wire import ENDED, Request, batch_result, failure, json_result, parse_batch, read_batch

logger = logging.getLogger(__name__)

CREATES = frozenset({"create_model", "create_from"})
BATCHES = frozenset({"forward", "forward_backward"})
"""Requests of which those of several models may share a pass."""
CHANGES = CREATES | {"forward_backward", "optim_step", "load_weights"}
"""Requests that change a model, which a restart executes again."""
EPHEMERAL_SECONDS = 86400.0
"""Life of sampler weights without a name."""
SWEEP_SECONDS = 60.0
"""How often what has expired is deleted."""


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
        self._log, self._engine, self._states, self._base_model, self._max_models = log, engine, states, base_model, max_models
        self._critic = name_of(base_model, critic=True)
        self._report = LearnerReport(log.records)
        self._canary, self._replay_seconds, self._replay_bytes = canary, replay_seconds, replay_bytes
        self._written: dict[LogPlace, Snapshot] = {}
        """Snapshots whose requests are not finished."""
        self._loading: dict[LogPlace, asyncio.Task[None]] = {}
        """Requests that wait until the sampler has loaded their snapshot."""
        self._replay: dict[str, Replay] = {}
        self._saved: dict[str, int] = {}
        """The request after which each model's newest state was saved."""
        self._newest: dict[str, int] = {}
        """The newest request that the engine's state of each model includes; the model that was used last is the last one."""
        self._ops: Mapping[str, Callable[[str, int, Request], bytes]] = {
            "create_model": self._create,
            "create_from": self._load_weights,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
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
                        await self._sweep()
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
        if op not in BATCHES or requests.has_begun(leader):
            return joined
        await self._recover(leader.lane)  # which may move another model to disk
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
        for place, request in requests.items():
            if request.op == "unload_model":
                await self._unload(place.lane)  # before its answer, after which nothing would repeat it
                result = json_result(type="unload_model", model_id=place.lane)
                await self._log.finish(place, result, record=self._report.unloaded(place.lane))
                return
            await (self._make_room() if request.op in CREATES else self._recover(place.lane))
        begun = dict(zip(requests, await self._log.begin(list(requests)), strict=True))
        results = await self._execute({place: request for place, request in requests.items() if begun[place] <= MAX_BEGUN})
        seconds = (time.monotonic() - began) / len(requests)
        records, count = self._report.executed(requests, at, time.time())
        counting = asyncio.create_task(count)
        try:
            for place, request in requests.items():
                self._mark_used(place, request.op in CHANGES)
                lost = f"the learner ended {begun[place] - 1} times while it executed this request; see its log"
                if (snapshot := self._written.pop(place, None)) is not None:
                    self._loading[place] = asyncio.create_task(self._load(place, snapshot, results[place]))
                    continue
                keep = request.op in CHANGES and place in results and place.lane in self._engine.models
                if keep and request.op in ("create_from", "load_weights"):
                    # Before its answer, after which its checkpoint may be deleted. To load twice is to load once.
                    self._save_state(place)
                if request.op in CREATES and place.lane not in self._engine.models:
                    await self._end_uncreated(place.lane)
                await self._log.finish(place, results.get(place, failure(lost, "server")), keep, records.get(place))
                if keep:
                    await self._kept(place, seconds, len(payloads[place]))
        finally:
            await counting

    async def _kept(self, place: LogPlace, seconds: float, nbytes: int) -> None:
        """Counts what a restart would have to execute again, and saves the model when that is too much."""
        replay = self._replay.get(place.lane, Replay()).and_then(seconds, nbytes)
        self._replay[place.lane] = replay
        if replay.seconds > self._replay_seconds or replay.nbytes > self._replay_bytes:
            self._save_state(place)
        if self._saved.get(place.lane) == place.seq:
            await self._log.forget(place.lane, place.seq)
            self._replay[place.lane] = Replay()

    async def _execute(self, requests: Mapping[LogPlace, Request], again: bool = False) -> dict[LogPlace, bytes]:
        """Results of one request for each of several models; several are batches of one operation. `again`: they had results."""
        results, calls = dict[LogPlace, bytes](), dict[LogPlace, LossCall]()
        for place, request in requests.items():
            try:
                if request.op not in (*CREATES, "refused") and place.lane not in self._engine.models:
                    raise TenantError("expected a model; found one that could not be created, or that was unloaded")
                if request.op in CREATES and not again:
                    self._states.check_room()
                    await self._check_alone(place.lane, request)
                if request.op in BATCHES:
                    calls[place] = self._read_batch(place.lane, request)
                else:
                    results[place] = self._ops[request.op](place.lane, place.seq, request)
            except ModelLostError as error:
                results[place] = failure(str(error), "user")
                self._forget(place.lane)  # its next request recovers it
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
                self._report.meters.add_batch(place.lane, call.batch, result.loss)
            results[place] = batch_result(result, SPECS[call.loss].output)
        return results

    async def _load(self, place: LogPlace, snapshot: Snapshot, result: bytes) -> None:
        """Finishes a request once the sampler has loaded the snapshot that it wrote, or deletes the snapshot."""
        assert self._canary is not None
        problem = await load_snapshot(self._log, place, snapshot, self._canary)
        if problem is not None:
            logger.error("model %s: %s", place.lane, problem)
            remove(snapshot.folder)
        await self._log.finish(place, result if problem is None else failure(problem, "server"))

    async def _recover(self, lane: str) -> None:
        """Makes a model what it was before a restart: its newest state, and the kept requests since."""
        if lane in self._engine.models:
            return
        await self._make_room()
        saved = self._states.newest_state(lane)
        seq = -1
        if saved is not None:
            folder, facts = saved
            seq = self._saved[lane] = facts.seq
            self._load_state(lane, folder, facts)
            await self._log.forget(lane, seq)
        kept = [place for place in await self._log.kept(lane) if place.seq > seq]
        if kept:
            logger.info("model %s: executing %d requests again", lane, len(kept))
        replay = Replay()
        with self._report.meters.replaying(lane):
            for place in kept:
                began, payload = time.monotonic(), await self._log.payload(place)
                await self._execute({place: Request.unpack(payload)}, again=True)
                replay = replay.and_then(time.monotonic() - began, len(payload))
        self._replay[lane] = replay
        if lane in self._engine.models:
            self._newest[lane] = max(seq, *(place.seq for place in kept)) if kept else seq

    def _save_state(self, place: LogPlace) -> None:
        """Saves the model after a request, so that a restart need not execute it again."""
        if place.lane not in self._engine.models:  # it could not be created
            return
        facts = Facts(self._name(place.lane), self._engine.models[place.lane], place.seq, self._engine.steps(place.lane))
        self._states.save_state(place.lane, partial(self._engine.save, place.lane, gradient=True), facts)
        self._saved[place.lane] = place.seq

    def _mark_used(self, place: LogPlace, changed: bool) -> None:
        if place.lane in self._engine.models:
            before = self._newest.pop(place.lane, place.seq)
            self._newest[place.lane] = place.seq if changed else before

    async def _make_room(self) -> None:
        """Moves the models that were not used for longest to disk, until there is memory for another one."""
        while len(self._engine.models) >= self._max_models and self._newest:
            lane, seq = next(iter(self._newest.items()))
            if self._saved.get(lane) != seq:
                self._save_state(in_lane(lane, seq))
                await self._log.forget(lane, seq)
            self._forget(lane)

    def _forget(self, lane: str) -> None:
        """Frees a model's memory."""
        self._engine.remove(lane)
        self._newest.pop(lane, None)
        self._replay.pop(lane, None)

    async def _unload(self, lane: str) -> None:
        self._forget(lane)
        self._saved.pop(lane, None)
        self._states.remove(lane)
        await self._log.end(lane)

    async def _end_uncreated(self, lane: str) -> None:
        """Frees the quota of a model that could not be created."""
        with suppress(RefusedError):  # for want of memory in Redis; the record expires later
            await self._log.set_record("model", lane, {ENDED: "not created"})
        await self._log.end(lane)

    async def _sweep(self) -> None:
        """Deletes expired checkpoints, and what is left of models whose records have expired."""
        for lane in {*self._engine.models, *self._states.unfinished(), *await self._log.lanes()}:
            if await self._log.record("model", lane) is None:
                logger.info("model %s has expired", lane)
                await self._unload(lane)
        self._states.sweep()

    async def _check_alone(self, lane: str, request: Request) -> None:
        """Raises TenantError when a new model and another cannot coexist. Some are only in a state, or in their kept requests."""
        created = request.op == "create_model"
        lora = _adapters(lane, request)[0] if created else self._read_checkpoint(request)[1].lora
        whole = {name: each is None for name, each in {**self._states.adapters(), **self._engine.models}.items()}
        for name in await self._log.lanes() - whole.keys():
            if (record := await self._log.record("model", name)) is not None:
                whole[name] = record.get("rank") == "0"
        whole.pop(lane, None)
        if whole and (lora is None or any(whole.values())):
            raise TenantError("a model with all parameters shares the base model with no other model; unload the others first")

    def _create(self, lane: str, seq: int, request: Request) -> bytes:
        lora, seed = _adapters(lane, request)
        self._engine.create(lane, lora, seed, request.fields.get("critic", False))
        return json_result(type="create_model", model_id=lane)

    def _load_weights(self, lane: str, seq: int, request: Request) -> bytes:
        """Into a model, or as a new one. Raises ModelLostError when a client deletes the checkpoint meanwhile."""
        folder, facts = self._read_checkpoint(request)
        if request.op == "load_weights" and facts.base_model != self._name(lane):
            raise TenantError(f"expected a checkpoint of {self._name(lane)}; found one of {facts.base_model}")
        if request.op == "load_weights" and facts.lora != self._engine.models[lane]:
            raise TenantError(
                "expected a checkpoint with the model's own rank and layers; found another one. Create a model from it."
            )
        self._load_state(lane, folder, facts)
        return json_result(type="load_weights", path=request.fields["path"], model_id=lane)

    def _load_state(self, lane: str, folder: Path, facts: Facts) -> None:
        """Gives a model what was saved in a directory, and creates the model if there is none."""
        self._engine.load(lane, folder, facts.lora, facts.steps, facts.base_model == self._critic)

    def _name(self, lane: str) -> str:
        """The name of a model's base model for clients."""
        return name_of(self._base_model, lane in self._engine.critics)

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
        norm, steps = self._engine.optim_step(lane, given)
        self._report.meters.add_step(lane, norm, given.learning_rate, steps)
        return json_result(type="optim_step", metrics={"grad_norm": norm, "step": float(steps)})

    def _save(self, lane: str, seq: int, request: Request) -> bytes:
        return json_result(type="save_weights", path=str(self._save_files(lane, seq, request, "weights")))

    def _save_for_sampler(self, lane: str, seq: int, request: Request) -> bytes:
        if lane in self._engine.critics:
            raise TenantError("not supported: weights for a sampler of a critic, which has values and no tokens")
        checkpoint = self._save_files(lane, seq, request, "sampler_weights")
        if self._canary is not None:
            measured = self._engine.forward({lane: self._canary.call})[lane]
            assert isinstance(measured, BatchResult)
            self._written[in_lane(lane, seq)] = Snapshot(self._states.folder(checkpoint).resolve(), measured.outputs[0])
        session = request.fields["sampling_session"]
        named: dict[str, object] = {"path": None, "sampling_session_id": session} if session else {"path": str(checkpoint)}
        return json_result(type="save_weights_for_sampler", **named)

    def _save_external(self, lane: str, seq: int, request: Request) -> bytes:
        return json_result(type="save_weights_external", path=str(self._save_files(lane, seq, request, "external_weights")))

    def _save_files(self, lane: str, seq: int, request: Request, kind: Kind) -> SavedModel:
        """Saves a model to continue from, of the kind `weights`, or the installed one: PEFT's files, or all weights."""
        resumable = partial(self._engine.save, lane, gradient=False)
        write = resumable if kind == "weights" else partial(self._engine.write_sampler_weights, lane)
        checkpoint = SavedModel(lane, kind, request.fields["name"])
        self._states.save(checkpoint, write, self._facts(lane, seq, request), request.fields["overwrite"])
        return checkpoint

    def _facts(self, lane: str, seq: int, request: Request) -> Facts:
        fields, now = request.fields, time.time()
        is_named = not fields.get("sampling_session")
        life = fields["ttl"] or (None if is_named else EPHEMERAL_SECONDS)
        expires = None if life is None else now + life
        whose = {"tenant": fields["tenant"], "metadata": fields["metadata"], "is_named": is_named, "created": now}
        return Facts(self._name(lane), self._engine.models[lane], seq, self._engine.steps(lane), expires, **whose)

    def _refuse(self, lane: str, seq: int, request: Request) -> bytes:
        return failure(request.fields["message"], "user")


def _adapters(lane: str, request: Request) -> tuple[LoraConfig | None, int]:
    """As `lora_of`, of a new model. Raises TenantError also for a critic without adapters."""
    lora, seed = lora_of(request.fields["lora"], lane)
    if request.fields.get("critic", False) and lora is None:
        raise TenantError("not supported: a critic with lora_config.rank = 0, all parameters; expected a rank of at least 1")
    return lora, seed
