"""The learner's control loop: iteration i trains on plan i with policy version i - 1, and pushes version i to the replicas.

Invariant: a version is in the arena before it is in the log, and in the log before it is pushed, so any crash repeats work and
loses none. Every rank runs this file line by line; `Ranks` carries what only rank 0 knows or does. This module imports no torch.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from polyreme.config.run import RunConfig
from polyreme.experience.metric_records import (
    Alarm,
    CheckpointSaved,
    DoneLearning,
    MetricRecord,
    MetricValues,
    Resumed,
    WarmStartDone,
)
from polyreme.process.lifecycle import freeze_gc
from polyreme.weights.manifest import Manifest, changed_tensors
from polyreme_trainer.learner import gates
from polyreme_trainer.learner.clock import Clock
from polyreme_trainer.learner.device_turns import LearnerTurns
from polyreme_trainer.learner.engine import DeviceUse, PlannedBatch, Saved, TrainEngine, Written
from polyreme_trainer.learner.leader import Ranks, join, split
from polyreme_trainer.learner.run_client import RunClient
from polyreme_trainer.learner.saving import Saving
from polyreme_trainer.observe import alarms
from polyreme_trainer.observe.metrics import iteration_record, observe
from polyreme_trainer.stages import warm_start
from polyreme_trainer.stages.share_rows import share_rows
from polyreme_trainer.weight_sync.publisher import Publisher

logger = logging.getLogger(__name__)

SLOT_SECONDS = 3.0
"""How long training waits for an arena slot that a replica still reads, in addition to the time to transfer its bytes."""


class Learner:
    """One rank of the learner.

    Args:
        config, files: the run's configuration and the model's small files.
        engine: this rank's training engine.
        redis_url, run_id: where rank 0 finds the run, when `run` begins.
        ranks: the ranks of this learner.
        turns: the ranks' turns on shared devices, which the ranks hold now; the caller closes them.
    """

    def __init__(
        self,
        config: RunConfig,
        files: Mapping[str, bytes],
        engine: TrainEngine,
        redis_url: str,
        run_id: str,
        ranks: Ranks,
        turns: LearnerTurns,
    ) -> None:
        self.config, self.files, self.engine, self.ranks = config, files, engine, ranks
        self.turns = turns
        self.device_use = DeviceUse(0, 0)
        """The device memory of the newest turn."""
        self.redis_url, self.run_id = redis_url, run_id
        self.version = 0
        """The policy's version."""
        self.saving = Saving(engine.finish_save, self.report_save)
        self.published: tuple[Manifest, ...] = ()
        """The parts of the newest published version; on rank 0."""
        self.history: list[alarms.Observation] = []
        self.alarmed: set[str] = set()
        self.alarm_onsets: Counter[str] = Counter()

    async def connect(self) -> None:
        """Takes over as the run's learner and starts the publisher. On rank 0."""
        self.client = await RunClient.open(self.redis_url, self.run_id)
        self.publisher = Publisher(self.redis_url, self.run_id, self.client.term, self.engine.arena)
        self.publisher.start()

    def run(self) -> None:
        """Connects, trains until the last iteration or until the run drains, and saves the result in both cases.

        Raises:
            PolyremeError: the run cannot continue, with the reason.
        """
        self.ranks.on_leader(self.connect)
        try:
            written = self.begin()
            if written is not None:
                self.train(written)
            self.ranks.on_leader(lambda: self.client.close())
        finally:
            if self.ranks.leads:
                self.publisher.close()  # before the engine removes the arena that the publisher reads

    def train(self, written: Written) -> None:
        """Trains all iterations that follow `written`, the newest version."""
        freeze_gc()
        first = self.version + 1
        for iteration in range(first, self.config.iterations + 1):
            self.saving.finish(wait=False)
            trained = self.iterate(iteration)
            if trained is None:
                break
            self.version, written = iteration, trained
            if self.saving.is_due(self.version, self.config.trainer, self.ranks):
                self.save(written)
        self.saving.finish(wait=True)
        if self.version != self.engine.newest_save:
            self.take_devices()
            self.save(written)
        self.lend_devices()
        self.saving.finish(wait=True)
        if self.version == self.config.iterations:
            self.ranks.on_leader(self.finish)

    def begin(self) -> Written | None:
        """Restores the run's newest version from a checkpoint, or creates version 0 by the warm start, and pushes it.

        The gates then compare the replicas, the learner and the Hugging Face export on this version.

        Returns:
            The written version; None when the run drains during the warm start.
        """
        loaded = self.engine.load()
        if loaded is None:
            self.check_gates(self.engine.compare_hf(self.config.model.path))
            if not self.warm_start():
                return None
        self.mix_in()
        self.version = loaded or 0
        written = self.write(self.version)
        self.ranks.on_leader(lambda: self.client.begin(self.version, self.engine.facts))
        if loaded is not None:
            self.ranks.on_leader(lambda: self.client.run.emit(Resumed(iteration=self.version)))
        if loaded is None:
            self.save(written)
            self.saving.finish(wait=True)
        self.check_gates(self.engine.compare_hf(self.engine.hf_path(self.version)))
        self.ranks.on_leader(partial(self.publish, written))
        self.compare_replicas()
        self.ranks.on_leader(lambda: self.client.running())
        return written

    def warm_start(self) -> bool:
        """Runs the warm start. Returns whether version 0 is complete; False when the run drains first."""
        began = time.perf_counter()
        complete = warm_start.warm_start(self.engine, self.config, self.files, self.ranks, self.report_progress)
        if complete:
            self.engine.begin_iterations()
        if complete and self.config.trainer.sft:
            record = WarmStartDone(seconds=time.perf_counter() - began)
            self.ranks.on_leader(lambda: self.client.run.emit(record))
        return complete

    def mix_in(self) -> None:
        """Gives the engine the supervised rows that iterations mix into their steps."""
        if (ptx := self.config.algorithm.ptx) is not None:
            rows = share_rows(self.ranks, partial(warm_start.read_examples, ptx.data, self.config, self.files))
            self.engine.mix_in(rows)

    def iterate(self, iteration: int) -> Written | None:
        """Runs one iteration: plan, train, write, publish, report. Returns the new version; None when the run drains instead."""
        clock = Clock()
        self.lend_devices()
        clock.lap("device_leave")
        batch = self.plan(iteration)
        clock.lap("learner_wait")
        if batch is None:
            return None
        self.take_devices()
        clock.lap("device_wait")
        metrics = self.engine.train(batch)
        clock.lap("train")
        written = self.write(iteration)
        clock.lap("write")
        self.ranks.on_leader(partial(self.hand_over, batch, metrics, written, clock))
        return written

    def take_devices(self) -> None:
        """Waits for the devices, if they are shared. No version is pushed until the replicas have them again."""
        if self.turns.take():
            self.ranks.on_leader(lambda: self.publisher.set_devices_train(True))
            self.engine.return_to_device()

    def lend_devices(self) -> None:
        """Leaves the devices to the replicas, if they are shared."""
        if self.turns.shared and self.turns.held:
            self.device_use = self.engine.leave_device()
            self.turns.give_up()
            self.ranks.on_leader(lambda: self.publisher.set_devices_train(False))

    def plan(self, iteration: int) -> PlannedBatch | None:
        """The groups that the iteration trains on; None when the run drains."""
        parts = split(self.ranks.broadcast_from_leader(partial(self.planned_groups, iteration)))
        if not parts:
            return None
        indices, *payloads = parts
        return PlannedBatch(iteration, tuple(int(index) for index in indices.split()), tuple(payloads))

    async def planned_groups(self, iteration: int) -> bytes:
        """The plan's indices as text, then the payloads of its groups, joined; nothing when the run drains. On rank 0."""
        planned = await self.client.plan(iteration, self.config.trainer.straggler_timeout)
        if planned is None:
            return join([])
        plan, payloads = planned
        return join([" ".join(map(str, plan.indices)).encode(), *payloads])

    def write(self, version: int) -> Written:
        """Writes the actor into a free arena slot."""
        slot, *term = self.ranks.broadcast_from_leader(self.free_slot).split()
        return self.engine.write(int(slot), version, int(term[0]))

    async def free_slot(self) -> bytes:
        """A free arena slot and the learner's term, as text. On rank 0."""
        slot = await self.publisher.acquire_slot(SLOT_SECONDS)
        return f"{slot} {self.client.term.counter}".encode()

    async def hand_over(self, batch: PlannedBatch, metrics: MetricValues, written: Written, clock: Clock) -> None:
        """Sets the run's version to the iteration's, publishes it and reports. On rank 0."""
        before = self.published
        await self.turns.check()
        await self.client.experience.set_version(batch.iteration)
        await self.publish(written)
        changed = sum(map(changed_tensors, before or [None] * len(written.manifests), written.manifests))
        await self.report(batch, metrics, changed, clock.total())

    async def publish(self, written: Written) -> None:
        """Gives a version to the publisher, which pushes it while training continues. On rank 0."""
        assert written.manifest is not None
        self.publisher.publish(written.manifest, written.slot, written.generation, written.canary, written.parts)
        self.published = written.manifests

    async def report(self, batch: PlannedBatch, metrics: MetricValues, changed: int, seconds: dict[str, float]) -> None:
        """Emits the iteration's record and each new alarm. On rank 0."""
        self.history = alarms.recent([*self.history, observe(batch.iteration, batch.groups, metrics, changed)])
        holding = alarms.check(self.history, gates.LIMITS[self.config.model.dtype].mismatch_kl)
        for text in alarms.announcements(holding, self.alarmed, self.alarm_onsets):
            logger.warning("%s", text)
            await self.client.run.emit(Alarm(text=text))
        self.alarmed = set(holding)
        if (samples := self.engine.trained_samples) is not None:
            await self.client.run.set_trained(batch.iteration, samples.encode())
        if self.turns.shared:
            use = self.device_use
            metrics = {**metrics, "device/freed_bytes": use.freed_bytes, "device/peak_bytes": use.peak_bytes}
        else:
            seconds = {name: value for name, value in seconds.items() if not name.startswith("device_")}
        record = iteration_record(batch.iteration, batch.groups, metrics, seconds, time.time(), self.config)
        await self.client.run.emit(replace(record, alarms=list(holding.values())))

    def save(self, written: Written) -> None:
        """Waits for the previous save, then starts to save the current version, which `written` holds."""

        def begin() -> None:
            facts: dict[str, object] = {"run_id": self.run_id, "version": self.version, "fingerprint": self.config.fingerprint()}
            self.ranks.on_leader(lambda: self.client.add_facts(facts))
            self.engine.save(written, self.version, facts)

        self.saving.start(begin)

    def report_save(self, saved: Saved, stall_seconds: float) -> None:
        """Releases what no checkpoint needs any more, and records the save."""
        self.ranks.on_leader(partial(self.release, saved, stall_seconds))

    async def release(self, saved: Saved, stall_seconds: float) -> None:
        """Deletes from the log groups that no checkpoint needs and whose samples are on disk, and records the save. On rank 0."""
        await self.client.experience.release(min(saved.oldest, await self.client.run.recorded()))
        record = CheckpointSaved(
            iteration=saved.number,
            path=str(saved.path),
            hf_path=str(saved.hf_path),
            seconds=saved.seconds,
            stall_seconds=stall_seconds,
        )
        await self.client.run.emit(record)

    def compare_replicas(self) -> None:
        """Waits for replicas that serve the current version and compares their answers with the learner's models."""
        self.lend_devices()
        if not self.engine.compares_answers:
            self.ranks.on_leader(self.committed)
            return
        greedy, sampled = gates.decode_answers(self.ranks.broadcast_from_leader(self.replica_answers))
        self.take_devices()
        self.check_gates(self.engine.compare_answers(greedy, sampled))

    async def replica_answers(self) -> bytes:
        """Encoded answers of the replicas that serve the current version. On rank 0."""
        return gates.encode_answers(*await self.client.replica_answers(self.publisher, self.version, self.config))

    async def committed(self) -> None:
        """Waits until enough replicas serve the current version. On rank 0."""
        await self.client.committed(self.publisher, self.version, self.config)

    async def finish(self) -> None:
        """Waits until replicas serve the last version, so that it can be evaluated. On rank 0."""
        await self.committed()
        await self.client.run.emit(DoneLearning())

    def check_gates(self, outcomes: Sequence[gates.Gate]) -> None:
        """Records rank 0's outcomes. Raises GateError (LeaderError on other ranks) at the first that failed."""
        self.ranks.on_leader(lambda: self.client.check_gates(outcomes))

    def report_progress(self, record: MetricRecord) -> bool:
        """Emits a record of the warm start. Returns whether the run drains, the same on every rank."""
        return self.ranks.broadcast_from_leader(lambda: self.client.progress(record)) == b"\x01"
