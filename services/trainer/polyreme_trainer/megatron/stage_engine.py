"""The megatron engine of a stage: one trained model, and a reference where the objective has one.

Invariant: the result of a step depends only on its rows, their order and the weights. Ranks and micro-batches change it only by rounding.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyreme.config.stage import StageConfig
from polyreme.experience.loading import LoadReports, unreported
from polyreme.rundir.checkpoint_manifest import checkpoint_path
from polyreme_trainer.algorithms.metrics import Metrics, combine, finish
from polyreme_trainer.algorithms.objective import Objective
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.learner.engine import Saved
from polyreme_trainer.learner.gates import LIMITS, Gate
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.learner.stage_engine import STEP, Sums, mismatched
from polyreme_trainer.megatron import atomic
from polyreme_trainer.megatron.batches.batch import IGNORE, IntArray, supervised, with_end
from polyreme_trainer.megatron.checkpoints import checkpoint
from polyreme_trainer.megatron.checkpoints.checkpoint_writer import CheckpointWriter, Save
from polyreme_trainer.megatron.checkpoints.frozen_weights import FrozenWeights
from polyreme_trainer.megatron.checkpoints.saves import FROZEN, find_newest
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface.export import Export, as_classifier, export_hf
from polyreme_trainer.megatron.models.critic import Critic, build_critic
from polyreme_trainer.megatron.models.pipeline import on_every_stage
from polyreme_trainer.megatron.models.policy import Policy, build_policy
from polyreme_trainer.megatron.offload.host_memory import HostMemory
from polyreme_trainer.megatron.parallel.shard import data_shard
from polyreme_trainer.megatron.probes import comparison
from polyreme_trainer.megatron.training.losses import RowsLoss, over_ranks
from polyreme_trainer.megatron.training.optimizer import adam_of, learning_rate
from polyreme_trainer.megatron.training.roles import BaseRole, LossTerm, Role


class MegatronStageEngine:
    """One rank's share of a stage.

    Args:
        config: of the stage.
        objective: the loss to minimise.
        reference: Hugging Face directory of the reference; None: the stage has none.
        files: the model's small files.
        stop_ids: tokens that end an answer.
        ranks, device: the ranks of this stage, and this rank's device. Requires `init_parallel`.
        loads: provides for each model the function to call with the fraction of its weights that this rank has loaded.
    """

    def __init__(
        self,
        config: StageConfig,
        objective: Objective,
        reference: Path | None,
        files: Mapping[str, bytes],
        stop_ids: Sequence[int],
        ranks: Ranks,
        device: Device,
        loads: LoadReports = unreported,
    ) -> None:
        self.config, self.objective, self.files, self.ranks, self.device = config, objective, files, ranks, device
        self.stop_ids, self.loads = stop_ids, loads
        self.shard = data_shard(config.trainer.micro_batch_tokens, device)
        self.root = config.run_dir / "checkpoints"
        self.prefix = config.checkpoint_prefix
        self.writer = CheckpointWriter(ranks)
        self.facts: Mapping[str, Any] = {}
        self.host = HostMemory(config.trainer.offload, device.pins)
        self.model = self.make_model()
        self.model.make_optimizer(adam_of(config.trainer.optimizer))
        self.frozen, self.reference_path = FrozenWeights(ranks), reference
        self.reference = None if reference is None else self.make_reference(reference)

    def make_model(self) -> Role[Any]:
        """The trained model, with the weights of its Hugging Face directory."""
        model, settings = self.config.model, self.config.trainer
        if self.objective.head == "language":
            return self.policy_role("model", model.path, trainable=True)
        build = partial(
            build_critic,
            model.path,
            model.dtype,
            self.device,
            recompute=settings.recompute,
            lora=settings.lora,
            moe=settings.moe,
            seed=self.config.seed,
            loaded=self.loads("model"),
        )
        critic = self.host.admit(build)
        return Role("model", critic, lambda batch: critic.values(batch.ids)[batch.targets != IGNORE], self.shard)

    def make_reference(self, path: Path) -> Role[Policy]:
        """The reference. With adapters, the initial model as a reference is the trained model with its adapters switched off."""
        if self.config.shares_reference(path):
            return BaseRole("reference", self.model.model, self.model.output, self.shard)
        return self.policy_role("reference", path, trainable=False)

    def policy_role(self, name: str, path: Path, *, trainable: bool) -> Role[Policy]:
        """A language model with the weights of a Hugging Face directory. Raises ConfigError."""
        build = partial(build_policy, path, self.config, self.device, trainable=trainable, loaded=self.loads(name))
        policy = self.host.admit(build)
        return Role(name, policy, lambda batch: policy.logprobs(batch.ids, batch.targets), self.shard)

    def load(self) -> int:
        checkpoint.check_writable(self.root, self.ranks)  # the first save may be hours away
        found = find_newest(self.ranks, self.root, self.prefix)
        if found is None:
            return 0
        self.frozen.check(self.frozen_directories, found.facts[FROZEN])
        checkpoint.load(found, [self.model], self.loads)
        self.facts = found.facts
        return found.iteration

    def step(self, rows: StageRows, number: int, steps: int) -> Mapping[str, float]:
        lr = learning_rate(self.config.trainer.optimizer, number, steps)
        metrics = self.model.forward_backward(self.term(rows, self.baseline(rows, len(rows))))
        norm = self.model.optim_step(lr)
        routed = finish(combine([self.model.routing_metrics]))
        return {**finish(over_ranks(self.shard, metrics)), **routed, "grad_norm": norm, "lr": lr}

    def measure(self, rows: StageRows, size: int) -> Sums:
        baseline, parts = self.baseline(rows, size), list[Metrics]()
        for chosen in in_parts(len(rows), size):
            parts += self.model.measure(self.term(rows.take(chosen), baseline))
        return over_ranks(self.shard, parts)

    def save(self, number: int, facts: Mapping[str, Any], hf_path: Path | None) -> None:
        export = None if hf_path is None else self.exported({STEP: f"{number}\n".encode()})
        self.writer.start(
            Save(
                checkpoint_path(self.root, number, self.prefix),
                [self.model],
                lambda: {**facts, FROZEN: self.frozen.record(self.frozen_directories)},
                self.config.trainer.keep_checkpoints,
                hf_path,
                {} if export is None else {"": export},
                partial(atomic.discard_unfinished, self.config.run_dir / "hf", "*"),
            )
        )

    def finish_save(self, wait: bool) -> Saved | None:
        return self.writer.finish(wait)

    def export(self, path: Path) -> Sequence[Gate]:
        export = self.exported({})
        ids = self.probe_ids()
        mine = self.probe(ids.to(self.device.torch))
        outcomes: list[Gate] = []

        async def write_and_compare() -> None:
            assert export is not None
            await asyncio.to_thread(export_hf, path, export)
            outcomes.append(await asyncio.to_thread(self.compare, path, ids, mine))

        self.ranks.on_leader(write_and_compare)
        return outcomes

    def exported(self, files: Mapping[str, bytes]) -> Export | None:
        """A copy of the model for an export, with more small files; None on ranks other than 0. Collective."""
        tensors, adapter = self.model.model.full_tensors(), self.model.model.adapter(self.config.model.path)
        if tensors is None or not self.ranks.leads:
            return None
        export = Export(tensors, {**self.files, **files}, adapter)
        return as_classifier(export, pad_token_id=self.classifier_pad()) if self.objective.head == "value" else export

    def close(self) -> None:
        self.writer.close()

    def term(self, rows: StageRows, baseline: float) -> LossTerm:
        """The objective on rows, with the reference's log-probabilities where there is a reference."""
        sequences = supervised(rows.ids, rows.loss_mask, rows.width)
        if self.objective.head == "value":
            sequences = with_end(sequences)
        every = np.arange(len(sequences))
        reference = None if self.reference is None else self.reference.forward(sequences, every)
        return LossTerm(sequences, every, RowsLoss(self.objective, rows, sequences, reference, baseline))

    def baseline(self, rows: StageRows, size: int) -> float:
        """KTO's z: the mean log-ratio of mismatched answers over all rows, 0 or more; 0 for other objectives. `size`: see `measure`."""
        if not self.objective.needs_baseline:
            return 0.0
        assert self.reference is not None
        total = 0.0
        for chosen in in_parts(len(rows), size):
            other = mismatched(rows, chosen.tolist(), self.model.model.arch.max_position)
            sequences = supervised(other.ids, other.loss_mask)
            every = np.arange(len(sequences))
            log_ratios = self.model.forward(sequences, every).astype(np.float64) - self.reference.forward(sequences, every)
            total += float(log_ratios.sum())
        return max(0.0, total / len(rows))

    @property
    def frozen_directories(self) -> dict[str, Path]:
        """The directories of weights that a resume reads again, by their use. Checkpoints have their digests."""
        base = {} if self.config.trainer.lora is None else {"model.path": self.config.model.path}
        return base if self.reference_path is None else {"reference": self.reference_path, **base}

    def classifier_pad(self) -> int | None:
        """The padding token for config.json. transformers scores a sequence at its last token that is not padding, so no stop token is chosen."""
        pad = json.loads(self.files["config.json"]).get("pad_token_id")
        return None if pad in self.stop_ids else pad

    def probe_ids(self) -> Tensor:
        """Random tokens to compare models by, int64 [4, length]."""
        arch = self.model.model.arch
        return comparison.probe_ids(arch.vocab, min(32, arch.max_position), self.config.seed)

    @torch.no_grad()
    def probe(self, ids: Tensor) -> Tensor:
        """The model's logits [b, s, vocab], or its values [b, s]. Collective."""
        model = self.model.model
        model.use()
        if not isinstance(model, Critic):
            return model.logits(ids)
        return on_every_stage(model, ids, lambda: model.values(ids), tuple(ids.shape))

    def compare(self, path: Path, ids: Tensor, mine: Tensor) -> Gate:
        """Compares the outputs of the exported model in transformers with this engine's. On rank 0."""
        dtype, limits = self.config.model.dtype, LIMITS[self.config.model.dtype]
        if self.objective.head == "value":
            return comparison.values_gate(mine, comparison.load_hf_critic(path, dtype), ids, limits)
        return comparison.logits_gate(mine, comparison.load_hf(path, dtype), ids, limits)


def in_parts(rows: int, size: int) -> Iterator[IntArray]:
    """Yields the numbers of `size` rows at a time, in order; the last part may have fewer."""
    for start in range(0, rows, size):
        yield np.arange(start, min(start + size, rows))
