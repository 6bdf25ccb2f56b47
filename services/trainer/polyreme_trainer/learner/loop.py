"""The learner's loop: iteration i trains on plan i with policy version i - 1, and hands version i to the replicas.

Every rank runs this file line by line; what rank 0 alone knows or does goes through `Ranks.ask` and `Ranks.tell`. A version is in
the arena before the log knows it, and in the log before it is pushed, so a crash at any point repeats work and loses none.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from polyreme.config.run import RunConfig
from polyreme.experience.records import GroupRecord, decode_group
from polyreme.process.lifecycle import settle
from polyreme.weights.manifest import Manifest
from polyreme_trainer.algorithms.grpo import group_advantages
from polyreme_trainer.learner import gates
from polyreme_trainer.learner.leader import Ranks, join, split
from polyreme_trainer.learner.run_client import Desk
from polyreme_trainer.megatron.batch import collect
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.mcore import parallel_state
from polyreme_trainer.megatron.model import check_same_weights
from polyreme_trainer.megatron.optimizer import Adam, Optimizer, learning_rate
from polyreme_trainer.megatron.policy import Policy, build_policy
from polyreme_trainer.megatron.saves import Saves
from polyreme_trainer.megatron.step import Layout, Trained, train_iteration
from polyreme_trainer.observe import alarms
from polyreme_trainer.observe.metrics import iteration_record, observe
from polyreme_trainer.stages import sft
from polyreme_trainer.weight_sync.publisher import Publisher
from polyreme_trainer.weight_sync.version_writer import VersionWriter, changed_tensors

log = logging.getLogger(__name__)

SLOT_SECONDS = 3.0
"""That a replica may keep training waiting for its slot, beyond the time that its bytes take."""


class Learner:
    """One rank of the learner.

    Args:
        config, files: of the run: its configuration and the model's small files.
        redis_url, run_id: where rank 0 finds the run.
        ranks, device: this rank's place. Needs `init_parallel`.
    """

    def __init__(
        self, config: RunConfig, files: Mapping[str, bytes], redis_url: str, run_id: str, ranks: Ranks, device: Device
    ) -> None:
        self.config, self.files, self.ranks, self.device = config, files, ranks, device
        self.redis_url, self.run_id = redis_url, run_id
        self.policy = build_policy(config, device)
        if config.trainer.parallel.nodes > 1:
            check_same_weights(self.policy)
        self.optimizer = self.make_optimizer()
        self.layout = data_layout(config, self.policy, device)
        self.reference: Policy | None = None
        self.writer = VersionWriter(self.policy, ranks, run_id, writes=self.layout.data_rank == 0)
        self.saves = Saves(config, files, ranks)
        self.limits = gates.LIMITS[config.model.dtype]
        self.history: list[alarms.Observation] = []
        self.alarmed: set[str] = set()
        ranks.tell(self.open_desk)

    def make_optimizer(self) -> Optimizer:
        """An optimizer of the policy as it is now: in bfloat16 it keeps a full-precision copy of the weights from here on."""
        settings = self.config.trainer.optimizer
        adam = Adam(settings.beta1, settings.beta2, settings.eps, settings.weight_decay, settings.clip_grad)
        return Optimizer(self.policy, adam)

    async def open_desk(self) -> None:
        self.desk = await Desk.open(self.redis_url, self.run_id)
        self.publisher = Publisher(self.redis_url, self.run_id, self.desk.term, self.writer.arena)
        self.publisher.start()

    async def close_desk(self) -> None:
        self.publisher.close()
        await self.desk.close()

    def run(self) -> None:
        """Trains to the last iteration, or until the run drains; what was trained is saved in both cases.

        Raises:
            PolyremeError: the run cannot go on, with the reason.
        """
        version = self.begin()
        settle()
        for iteration in range(version + 1, self.config.iterations + 1):
            if not self.iterate(iteration):
                break
            version = iteration
            if self.saves.due(version):
                self.save(version)
        if version != self.saves.newest:
            self.save(version)
        if version == self.config.iterations:
            self.ranks.tell(partial(self.finish, version))
        self.ranks.tell(self.close_desk)

    def begin(self) -> int:
        """Brings the policy to the run's newest version, made by the warm start or read from a checkpoint, and pushes it.

        The replicas must then agree with the learner and with the Hugging Face export, on that very version.
        """
        version = self.saves.load(self.policy, self.optimizer)
        fresh = version is None
        if version is None:
            version = 0
            self.gate_logits(self.config.model.path)
            self.warm_start()
            self.optimizer = self.make_optimizer()
        slot, sealed, generation, _ = self.write(version)
        self.ranks.tell(lambda: self.desk.experience.begin(version))
        if fresh:
            self.save(version)
        if self.config.algorithm.kl_coef > 0:
            self.reference = self.saves.reference(self.policy)
        hf = self.gate_logits(self.saves.hf_path(version))
        self.ranks.tell(partial(self.push, sealed, slot, generation))
        self.gate_replicas(version, hf)
        self.ranks.tell(lambda: self.desk.running())
        return version

    def warm_start(self) -> None:
        """The supervised phases, each with an optimizer of its own."""
        began = time.perf_counter()
        phases = self.config.trainer.sft
        for number, phase in enumerate(phases):
            ids, mask = sft.unpack(self.ranks.ask(partial(sft.packed_examples, phase, self.config, self.files)))
            optimizer = Optimizer(self.policy, Adam(beta2=phase.beta2, weight_decay=phase.weight_decay))

            def report(values: dict[str, float], number: int = number, steps: int = phase.steps) -> None:
                record = {"kind": "sft", "phase": number + 1, "steps": steps, **values}
                self.ranks.tell(lambda: self.desk.progress(record))

            sft.run_phase(self.policy, optimizer, self.layout, phase, ids, mask, (self.config.seed, number), report)
        if phases:
            seconds = time.perf_counter() - began
            self.ranks.tell(lambda: self.desk.run.emit({"kind": "sft_done", "seconds": seconds}))

    def iterate(self, iteration: int) -> bool:
        """One iteration: plan, train, write, push. False when the run drains instead."""
        config = self.config
        began = time.perf_counter()
        payloads = split(self.ranks.ask(partial(self.next_groups, iteration)))
        if not payloads:
            return False
        groups = [decode_group(payload) for payload in payloads]
        waited = time.perf_counter()

        scores = np.array([[sample.score for sample in group.samples] for group in groups])
        sequences = collect(groups, group_advantages(scores, config.algorithm.normalize_std), iteration - 1)
        lr = learning_rate(config.trainer.optimizer, iteration, config.iterations)
        trained = train_iteration(
            self.policy,
            self.reference,
            self.optimizer,
            self.layout,
            sequences,
            config.group_size,
            config.algorithm,
            config.rollout.temperature,
            lr,
            (config.seed, iteration),
            config.importance_cap,
        )
        self.device.synchronize()
        after_training = time.perf_counter()

        before = self.writer.last
        slot, sealed, generation, write_seconds = self.write(iteration)
        seconds = {"learner_wait": waited - began, "train": after_training - waited, "write": write_seconds}

        async def hand_over() -> None:
            await self.desk.experience.set_version(iteration)
            await self.push(sealed, slot, generation)
            seconds["iteration"] = time.perf_counter() - began
            assert sealed is not None
            await self.report(iteration, groups, trained, lr, seconds, changed_tensors(before, sealed))

        self.ranks.tell(hand_over)
        return True

    async def next_groups(self, iteration: int) -> bytes:
        return join(await self.desk.groups(iteration, self.config.trainer.straggler_timeout))

    def write(self, version: int) -> tuple[int, Manifest | None, int, float]:
        """Writes the policy into a free slot: the slot, and what `VersionWriter.write` returns."""

        async def free_slot() -> bytes:
            return bytes([await self.publisher.acquire_slot(SLOT_SECONDS)])

        (slot,) = self.ranks.ask(free_slot)
        self.slot = slot
        return slot, *self.writer.write(slot, version, self.desk.term.counter if self.ranks.leads else 0)

    async def push(self, sealed: Manifest | None, slot: int, generation: int) -> None:
        assert sealed is not None
        self.publisher.publish(sealed, slot, generation)

    async def report(
        self,
        iteration: int,
        groups: list[GroupRecord],
        trained: Trained,
        lr: float,
        seconds: Mapping[str, float],
        changed: int,
    ) -> None:
        """Emits the iteration's record, and each alarm that was silent before."""
        self.history.append(observe(iteration, groups, trained, lr, changed))
        holding = alarms.check(self.history, self.limits.mismatch_kl)
        for name in holding.keys() - self.alarmed:
            log.warning("%s", holding[name])
            await self.desk.run.emit({"kind": "alarm", "text": holding[name]})
        self.alarmed = set(holding)
        record = iteration_record(iteration, groups, trained, lr, seconds, time.time())
        await self.desk.run.emit({**record, "alarms": list(holding.values())})

    def save(self, version: int) -> None:
        """Checkpoint and Hugging Face export of `version`, which is the policy's and the last slot's; then the log may let go."""
        began = time.perf_counter()
        facts: dict[str, Any] = {"run_id": self.run_id, "version": version, "fingerprint": self.config.fingerprint()}
        if self.ranks.leads:
            facts["term"] = self.desk.term.counter
        tensors = self.writer.tensors(self.slot) if self.ranks.leads else {}
        path, oldest = self.saves.save(version, self.policy, self.optimizer, facts, tensors)

        async def tell() -> None:
            # The newest iteration's groups stay until the next save: its samples may not be in the run directory yet.
            await self.desk.experience.release(max(0, min(oldest, version - 1)))
            hf_path = str(self.saves.hf_path(version))
            seconds = time.perf_counter() - began
            await self.desk.run.emit(
                {"kind": "saved", "iteration": version, "path": str(path), "hf_path": hf_path, "seconds": seconds}
            )

        self.ranks.tell(tell)

    def gate_logits(self, path: Path) -> torch.nn.Module | None:
        """The policy against the Hugging Face model of a directory, which is returned on rank 0."""
        ids = gates.probe_ids(self.policy.arch.vocab, min(32, self.policy.arch.max_position), self.config.seed)
        logits = self.policy.logits(ids.to(self.device.torch))
        models: list[torch.nn.Module] = []

        async def check() -> None:
            models.append(await asyncio.to_thread(gates.load_hf, path, self.config.model.dtype))
            await self.desk.gate(await asyncio.to_thread(gates.logits_gate, logits, models[0], ids, self.limits))

        self.ranks.tell(check)
        return models[0] if models else None

    def gate_replicas(self, version: int, hf: torch.nn.Module | None) -> None:
        """Every replica that serves `version` against the Hugging Face model (greedy) and the learner (log-probabilities)."""
        sampled: list[gates.Answer] = []

        async def ask() -> bytes:
            assert hf is not None
            greedy, answers = await self.desk.replica_answers(self.publisher, version, self.config)
            await self.desk.gate(await asyncio.to_thread(gates.greedy_gate, hf, greedy, self.limits))
            sampled.extend(answers)
            return join([np.array(part).tobytes() for part in (gates.stack(answers)[0].shape, *gates.stack(answers))])

        shape, *parts = (np.frombuffer(part, np.int64) for part in split(self.ranks.ask(ask)))
        rows = max(1, self.config.trainer.micro_batch_tokens // int(shape[1]))
        ids, targets = (torch.from_numpy(part.reshape(shape).copy()).to(self.device.torch).split(rows) for part in parts)
        with torch.no_grad():
            temperature = self.config.rollout.temperature
            ours = torch.cat([self.policy.logprobs(*pair, temperature) for pair in zip(ids, targets, strict=True)])
        self.ranks.tell(lambda: self.desk.gate(gates.replica_gate(ours, sampled, self.limits)))

    async def finish(self, version: int) -> None:
        """The run's last version is served by the replicas, so that it can be evaluated."""
        await self.desk.committed(self.publisher, version, self.config)
        await self.desk.run.emit({"kind": "done_learning"})


def data_layout(config: RunConfig, policy: Policy, device: Device) -> Layout:
    """This rank's share of every batch."""
    group = parallel_state.get_data_parallel_group()
    ranks = parallel_state.get_data_parallel_world_size()

    def sum_over_data(tensor: torch.Tensor) -> None:
        if ranks > 1:
            dist.all_reduce(tensor, group=group)

    return Layout(
        device=device.torch,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_ranks=ranks,
        sum_over_data=sum_over_data,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        parameters=policy.arch.parameters,
    )
