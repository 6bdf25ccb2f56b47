"""Programs for the ranks of test_learner: iterations of the learner's step on synthetic groups. All ranks run the same program."""

import json
import os
import sys
import threading
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from polyreme.api.v1.experience_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from polyreme.config.recipes.algorithm import AlgorithmConfig
from polyreme.config.run import RunConfig
from polyreme.config.trainer import CriticConfig, SftPhase
from polyreme.experience.metric_records import fields_of
from polyreme.experience.record_codec import encode_group
from polyreme.experience.records import GroupRecord, RewardPart, SampleRecord
from polyreme_trainer.algorithms import losses
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.learner.device_turns import LearnerTurns
from polyreme_trainer.learner.engine import PlannedBatch, Written
from polyreme_trainer.learner.leader import LeaderError, Ranks
from polyreme_trainer.learner.loop import Learner
from polyreme_trainer.megatron.checkpoints import checkpoint, checkpoint_writer
from polyreme_trainer.megatron.checkpoints.checkpoint_writer import BackgroundWork
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.models.build import init_parallel
from polyreme_trainer.megatron.parallel.channel import BroadcastChannel
from polyreme_trainer.megatron.run_engine import RunEngine
from polyreme_trainer.stages.warm_start import run_phase

LR = 1e-3
HELD_SECONDS = 300.0
EPS = 1e-6
"""Epsilon of Adam. The gradient of a key bias is only rounding; with the usual epsilon, this noise would move it by the learning rate."""


def made_up_groups(iteration: int, vocab: int, groups: int = 6, samples: int = 4) -> list[GroupRecord]:
    """Random tokens of uneven lengths, every third group with equal scores, some tokens masked, some of an older version, some responses
    truncated."""
    random = np.random.default_rng(iteration)
    result = []
    for index in range(groups):
        members = []
        for sample in range(samples):
            score = 0.5 if index % 3 == 2 else float(sample % 2) + 0.1 * sample
            length = int(random.integers(1, 30))
            members.append(
                SampleRecord(
                    token_ids=random.integers(1, vocab, length, dtype=np.int32),
                    logprobs=-random.random(length, dtype=np.float32) * 4,
                    loss_mask=(random.random(length) < 0.9).astype(np.uint8),
                    finish_reason=FINISH_REASON_LENGTH if (index + sample) % 4 == 0 else FINISH_REASON_STOP,
                    spans=[(max(0, iteration - 1 - (index + sample) % 2), 0, length)],
                    score=score,
                    parts=[RewardPart("exact", score, score)],
                    teacher_logprobs=np.full(length, -1, dtype=np.float32),
                )
            )
        prompt = random.integers(1, vocab, int(random.integers(2, 12)), dtype=np.int32)
        result.append(GroupRecord(index=index, attempt=1, prompt_ids=prompt, samples=members))
    return result


def with_greedy(group: GroupRecord) -> GroupRecord:
    """The group with a copy of its first sample as the greedy one, which is not trained on."""
    first = group.samples[0]
    return replace(group, samples=[*group.samples, replace(first, loss_mask=np.zeros(len(first), dtype=np.uint8))])


def planned(iteration: int, vocab: int, greedy: bool = False) -> PlannedBatch:
    groups = [with_greedy(group) if greedy else group for group in made_up_groups(iteration, vocab)]
    return PlannedBatch(iteration, tuple(range(len(groups))), tuple(encode_group(group) for group in groups))


def supervised_rows(vocab: int) -> StageRows:
    """Twelve rows of uneven lengths."""
    random = np.random.default_rng(5)
    ids = [random.integers(1, vocab, int(n), dtype=np.int32) for n in random.integers(4, 40, 12)]
    return StageRows(ids, [(np.arange(len(row)) >= 3).astype(np.uint8) for row in ids])


class Rank:
    """One rank with everything an iteration needs."""

    def __init__(self, config: RunConfig, device: Device) -> None:
        self.config = config
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.ranks = Ranks(rank, BroadcastChannel(device.torch) if world > 1 else None)
        files = {"config.json": Path(config.model.path, "config.json").read_bytes()}
        self.engine = RunEngine(config, files, f"test-{uuid.uuid4().hex[:8]}", self.ranks, device)
        self.engine.followers.begin()
        if config.algorithm.ptx is not None:
            self.engine.mix_in(supervised_rows(self.engine.policy.arch.vocab))
        if self.engine.algorithm.needs.reference and config.shares_reference:
            self.engine.make_reference(config.model.path)
        elif self.engine.algorithm.needs.reference and self.engine.reference is None:
            self.engine.reference = self.engine.frozen_role("reference", self.engine.policy.dtype)
            self.engine.reference.model.use(self.engine.policy)
            self.engine.reference.model.load_state_dict(self.engine.policy.weights())

    def iterate(self, iteration: int) -> dict[str, Any]:
        """Trains an iteration. Returns its metrics without times."""
        greedy = self.engine.algorithm.needs.greedy
        measured = self.engine.train(planned(iteration, self.engine.policy.arch.vocab, greedy))
        return {name: value for name, value in measured.items() if not name.startswith("timing/")}

    def save(self, version: int) -> None:
        """Writes the version to the arena and saves it."""
        self.engine.save(self.engine.write(0, version, term=1), version, {})
        assert self.engine.finish_save(wait=True) is not None

    def write(self, path: Path, results: Mapping[str, object]) -> None:
        """Writes, on the first rank, all weights and some results. Weights of roles other than the actor have the role's name as prefix."""
        others = self.engine.saved[1:]
        whole = {"": self.engine.policy.full_tensors(), **{f"{role.name}.": role.model.full_tensors() for role in others}}
        if self.ranks.leads:
            tensors = {prefix + name: tensor for prefix, part in whole.items() for name, tensor in (part or {}).items()}
            save_file(tensors, path.with_suffix(".safetensors"))
            path.with_suffix(".json").write_text(json.dumps(results))


class AloneLearner(Learner):
    """A learner with made-up groups, and without a log and replicas."""

    def plan(self, iteration: int) -> PlannedBatch:
        return planned(iteration, 45)

    def write(self, version: int) -> Written:
        return self.engine.write(0, version, term=1)

    async def hand_over(self, *_: object) -> None:
        pass


def calls_of_a_loss(config_json: str, out: str) -> None:
    """Writes the functions from the control loop to the arithmetic of a clipped loss, as they call each other."""
    rank = Rank(*start(config_json))
    turns = LearnerTurns(rank.config, "", "", rank.ranks)
    learner = AloneLearner(rank.config, {}, rank.engine, "", "", rank.ranks, turns)
    stacks: set[tuple[str, ...]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is losses.clip.__code__:
            names = [caller.f_code.co_qualname for caller, _ in walk_stack(frame)]
            stacks.add(tuple(reversed(names[: names.index("Learner.iterate") + 1])))

    sys.setprofile(note)
    learner.iterate(1)
    sys.setprofile(None)
    Path(out).write_text(json.dumps(sorted(stacks)))
    rank.engine.close()


def start(config_json: str) -> tuple[RunConfig, Device]:
    config, device = RunConfig.model_validate_json(config_json), Device("cpu")
    device.seed(config.seed)
    init_parallel(config.trainer.parallel, device)
    return config, device


def train_every_way(config_json: str, algorithms: str, out: str) -> None:
    """Runs two iterations of each algorithm (JSON: name to section), and a warm start, each from the model's weights.

    PPO's critic is that of the configuration; the critic of an algorithm whose name ends in "from the actor" starts as the actor.
    """
    config, device = start(config_json)
    for name, section in json.loads(algorithms).items():
        critic = CriticConfig() if name.endswith("from the actor") else config.trainer.critic
        trainer = config.trainer.model_copy(update={"critic": critic})
        changes = {"algorithm": AlgorithmConfig.model_validate(section), "trainer": trainer}
        rank = Rank(config.model_copy(update=changes), device)
        rank.write(Path(out, name), {"trained": [rank.iterate(i) for i in (1, 2)]})
        rank.engine.close()
    rank = Rank(config, device)
    measured, canary = warm_start(rank), rank.engine.probes.canary()
    rank.write(Path(out, "warm_start"), {"losses": measured, "canary": canary and [canary.ids, canary.logprobs]})
    rank.engine.close()


def warm_start(rank: Rank) -> list[float | None]:
    phase = SftPhase(data=Path("unused"), steps=3, batch_size=5, lr=LR)
    rows = supervised_rows(rank.engine.policy.arch.vocab)
    rank.engine.begin_iterations()  # with the epsilon of the test's configuration
    records = list(run_phase(rank.engine, phase, rows, seed=0))
    assert records[-1].step == phase.steps
    return [record.loss for record in records]


class HeldWork(BackgroundWork[Any]):
    """A save that is written only after `may_write` is set."""

    may_write = threading.Event()

    def _run(self) -> None:
        assert self.may_write.wait(HELD_SECONDS)
        super()._run()


def save_and_continue(config_json: str, out: str) -> None:
    """Saves versions 0 and 3 of 5, and compares version 0 with transformers; the weights of every version are written too.

    Version 3 is written to disk only after another iteration, whose version has overwritten the arena slot.
    """
    rank = Rank(*start(config_json))
    assert rank.engine.load() is None
    rank.save(0)
    gates = rank.engine.compare_hf(rank.engine.hf_path(0))
    vars(checkpoint_writer)["BackgroundWork"] = HeldWork
    cut_short = rank.engine.hf_path(2).with_name(".iteration-000002.1234abcd.new")
    if rank.ranks.leads:
        cut_short.mkdir()
    metrics = []
    for iteration in range(1, 6):
        metrics.append(rank.iterate(iteration))
        rank.write(Path(out, f"version-{iteration}"), {})
        written = rank.engine.write(0, iteration, term=1)
        if iteration == 3:
            rank.engine.save(written, iteration, {})
        assert rank.engine.finish_save(wait=False) is None
    assert rank.engine.newest_save == 0
    HeldWork.may_write.set()
    saved = rank.engine.finish_save(wait=True)
    assert saved is not None and (saved.number, rank.engine.newest_save) == (3, 3)
    assert rank.engine.finish_save(wait=True) is None
    assert not cut_short.exists()
    results: dict[str, object] = {
        "gates": [fields_of(gate.record()) for gate in gates],
        "state": rank.engine.state.to_json(),
        "metrics": metrics,
    }
    rank.write(Path(out, "whole"), results)
    rank.engine.close()


def resume_and_continue(config_json: str, out: str) -> None:
    rank = Rank(*start(config_json))
    assert rank.engine.load() == 3
    metrics = []
    for iteration in (4, 5):
        metrics.append(rank.iterate(iteration))
        metrics[-1].pop("offload/moved_bytes", None)
        leave_and_return(rank.engine)
    rank.write(Path(out, "resumed"), {"state": rank.engine.state.to_json(), "metrics": metrics})
    fail_to_write(rank)
    rank.engine.close()


def fail_to_write(rank: Rank) -> None:
    """A save whose export rank 0 cannot write ends every rank, and leaves no checkpoint."""
    folder = rank.engine.hf_path(5).parent
    if rank.ranks.leads:
        folder.rename(folder.with_name("moved"))
        folder.touch()
    rank.engine.save(rank.engine.write(0, 5, term=1), 5, {})
    try:
        rank.engine.finish_save(wait=True)
    except FileExistsError as error:
        assert rank.ranks.leads and Path(error.filename) == folder
    except LeaderError:
        assert not rank.ranks.leads
    else:
        raise AssertionError("the failure of a save was not reported")
    assert rank.engine.newest_save == 3
    assert [each.iteration for each in checkpoint.find(rank.config.run_dir / "checkpoints")] == [0, 3]
    if rank.ranks.leads:
        folder.unlink()
        folder.with_name("moved").rename(folder)


def leave_and_return(engine: RunEngine) -> None:
    """Leaves and returns to the device like an accelerator's learner between two turns. On CPU it would stay."""
    engine.offload_roles(pin=False)
    assert engine.offload is not None
    assert engine.offload.nbytes > 4 * engine.policy.arch.parameters // engine.config.trainer.parallel.world_size
    left = [tensor for role in engine.saved for tensor in role.tensors()]
    assert sum(tensor.untyped_storage().nbytes() for tensor in left) == 0
    engine.return_to_device()


def rank_0_waits_then_fails(seconds: str) -> None:
    """Rank 0 waits for longer than the deadline of collectives, then fails with an error that all ranks receive."""
    import asyncio
    from datetime import timedelta

    from polyreme.errors import GateError
    from polyreme_trainer.learner import leader as module

    module.HEARTBEAT_SECONDS = 0.2
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The store waits for all ranks, whose starts differ by more than the deadline on a slow machine.
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(*place, size, rank == 0, timeout=timedelta(seconds=300))  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=4))
    ranks = Ranks(torch.distributed.get_rank(), BroadcastChannel(torch.device("cpu")))

    async def slow() -> bytes:
        await asyncio.sleep(float(seconds))
        return b"answer" * 1000

    assert ranks.broadcast_from_leader(slow) == b"answer" * 1000

    async def fails() -> bytes:
        raise GateError("a", "b", "c")

    try:
        ranks.broadcast_from_leader(fails)
    except GateError:
        assert ranks.leads
    except LeaderError as error:
        assert not ranks.leads
        assert error.exit_code == GateError.exit_code
        assert "expected a; found b" in str(error)
    else:
        raise AssertionError("the failure went by unseen")
