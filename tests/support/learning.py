"""Programs for the ranks of test_learner: iterations of the learner's own step on made-up groups. Same lines on every rank."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from polyreme.api.v1.experience_pb2 import FINISH_REASON_STOP
from polyreme.config.run import AlgorithmConfig, RunConfig, SftPhase
from polyreme.experience.records import GroupRecord, SampleRecord
from polyreme_trainer.algorithms.grpo import group_advantages
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.learner.loop import data_layout
from polyreme_trainer.megatron.batch import Sequences, collect
from polyreme_trainer.megatron.build import init_parallel
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.optimizer import Adam, Optimizer
from polyreme_trainer.megatron.policy import Policy, build_policy
from polyreme_trainer.megatron.saves import Saves
from polyreme_trainer.megatron.step import Trained, train_iteration
from polyreme_trainer.stages import sft
from polyreme_trainer.weight_sync.version_writer import VersionWriter

LR = 1e-3
ADAM = Adam(eps=1e-6)
"""A key bias has no gradient but rounding; with Adam's usual epsilon that noise alone would move it by the learning rate."""


def made_up_groups(iteration: int, vocab: int, groups: int = 6, samples: int = 4) -> list[GroupRecord]:
    """Random tokens of uneven lengths, every third group with equal scores, some tokens masked, some of an older version."""
    random = np.random.default_rng(iteration)
    result = []
    for index in range(groups):
        members = []
        for sample in range(samples):
            length = int(random.integers(1, 30))
            members.append(
                SampleRecord(
                    token_ids=random.integers(1, vocab, length, dtype=np.int32),
                    logprobs=-random.random(length, dtype=np.float32) * 4,
                    loss_mask=(random.random(length) < 0.9).astype(np.uint8),
                    finish_reason=FINISH_REASON_STOP,
                    spans=[(iteration - 1 - (index + sample) % 2, 0, length)],
                    score=0.5 if index % 3 == 2 else float(sample % 2) + 0.1 * sample,
                )
            )
        prompt = random.integers(1, vocab, int(random.integers(2, 12)), dtype=np.int32)
        result.append(GroupRecord(index=index, attempt=1, prompt_ids=prompt, samples=members))
    return result


def sequences_of(config: RunConfig, groups: list[GroupRecord], version: int) -> Sequences:
    scores = np.array([[sample.score for sample in group.samples] for group in groups])
    return collect(groups, group_advantages(scores, config.algorithm.normalize_std), version)


class Rank:
    """One rank with everything an iteration needs."""

    def __init__(self, config: RunConfig, device: Device) -> None:
        self.config, self.device = config, device
        self.ranks = Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), self.device.torch)
        self.policy = build_policy(self.config, self.device)
        self.optimizer = Optimizer(self.policy, ADAM)
        self.layout = data_layout(self.config, self.policy, self.device)
        self.reference: Policy | None = self.policy.reference() if self.config.algorithm.kl_coef else None

    def iterate(self, iteration: int) -> Trained:
        groups = made_up_groups(iteration, self.policy.arch.vocab)
        return train_iteration(
            self.policy,
            self.reference,
            self.optimizer,
            self.layout,
            sequences_of(self.config, groups, iteration - 1),
            len(groups[0].samples),
            self.config.algorithm,
            self.config.rollout.temperature,
            LR,
            (self.config.seed, iteration),
            self.config.importance_cap,
        )

    def write(self, path: Path, results: dict[str, object]) -> None:
        """The whole weights and some results, by the first rank."""
        tensors = self.policy.full_tensors()
        if self.ranks.leads:
            assert tensors is not None
            save_file(tensors, path.with_suffix(".safetensors"))
            path.with_suffix(".json").write_text(json.dumps(results))


def start(config_json: str) -> tuple[RunConfig, Device]:
    config, device = RunConfig.model_validate_json(config_json), Device("cpu")
    device.seed(config.seed)
    init_parallel(config.trainer.parallel, device)
    return config, device


def train_every_way(config_json: str, algorithms: str, out: str) -> None:
    """Two iterations by each of the algorithms (JSON: name to section), and a warm start, each from the model's own weights."""
    config, device = start(config_json)
    for name, section in json.loads(algorithms).items():
        rank = Rank(config.model_copy(update={"algorithm": AlgorithmConfig.model_validate(section)}), device)
        rank.write(Path(out, name), {"trained": [asdict(rank.iterate(i)) for i in (1, 2)]})
    rank = Rank(config, device)
    rank.write(Path(out, "warm_start"), {"losses": warm_start(rank)})


def warm_start(rank: Rank) -> list[float]:
    phase = SftPhase(data=Path("unused"), steps=3, batch_size=5, lr=LR)
    random = np.random.default_rng(5)
    ids = [random.integers(1, rank.policy.arch.vocab, int(n), dtype=np.int32) for n in random.integers(4, 40, 12)]
    mask = [(np.arange(len(row)) >= 3).astype(np.uint8) for row in ids]
    reports: list[dict[str, float]] = []
    sft.run_phase(rank.policy, rank.optimizer, rank.layout, phase, ids, mask, (0, 0), reports.append)
    return [report["loss"] for report in reports]


def save_and_go_on(config_json: str, out: str) -> None:
    """Saves after iteration 2 of 4."""
    rank = Rank(*start(config_json))
    saves = Saves(rank.config, {"config.json": Path(rank.config.model.path, "config.json").read_bytes()}, rank.ranks)
    assert saves.load(rank.policy, rank.optimizer) is None
    writer = VersionWriter(rank.policy, rank.ranks, f"test-{Path(out).name}", writes=rank.layout.data_rank == 0)
    for iteration in range(1, 5):
        rank.iterate(iteration)
        if iteration == 2:
            writer.write(0, iteration, term=1)
            tensors = writer.tensors(0) if rank.ranks.leads else {}
            saves.save(iteration, rank.policy, rank.optimizer, {}, tensors)
    rank.write(Path(out, "whole"), {})
    writer.close()


def resume_and_go_on(config_json: str, out: str) -> None:
    rank = Rank(*start(config_json))
    version = Saves(rank.config, {}, rank.ranks).load(rank.policy, rank.optimizer)
    assert version == 2
    for iteration in range(version + 1, 5):
        rank.iterate(iteration)
    rank.write(Path(out, "resumed"), {})


def rank_0_waits_then_fails(seconds: str) -> None:
    """Collectives have a short deadline; rank 0's wait is longer, and ends in an error that all ranks learn of."""
    import asyncio
    from datetime import timedelta

    from polyreme.errors import GateError
    from polyreme_trainer.learner import leader as module
    from polyreme_trainer.learner.leader import LeaderError

    module.HEARTBEAT_SECONDS = 0.2
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The store waits for all ranks: their starts are apart by more than the deadline on a slow machine.
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(*place, size, rank == 0, timeout=timedelta(seconds=300))  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=4))
    ranks = Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))

    async def slow() -> bytes:
        await asyncio.sleep(float(seconds))
        return b"answer" * 1000

    assert ranks.ask(slow) == b"answer" * 1000

    async def fails() -> bytes:
        raise GateError("a", "b", "c")

    try:
        ranks.ask(fails)
    except GateError:
        assert ranks.leads
    except LeaderError as error:
        assert not ranks.leads
        assert error.exit_code == GateError.exit_code
        assert "expected a; found b" in str(error)
    else:
        raise AssertionError("the failure went by unseen")
