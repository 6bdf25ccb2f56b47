"""The engine of a stage: one trained model, and a reference where the stage has one."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from polyreme.config.stage import StageConfig
from polyreme.experience.loading import LoadReports, unreported
from polyreme_trainer.algorithms.objective import Head
from polyreme_trainer.learner.engine import STEP, Saved
from polyreme_trainer.learner.gates import LIMITS, Gate
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.checkpoints import checkpoint
from polyreme_trainer.megatron.checkpoints.saves import Saves
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.engine import MegatronEngine
from polyreme_trainer.megatron.huggingface.export import Export, as_classifier, export_hf
from polyreme_trainer.megatron.models.critic import Critic
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.probes import comparison
from polyreme_trainer.megatron.probes.model_probes import outputs
from polyreme_trainer.megatron.training.optimizer import adam_of
from polyreme_trainer.megatron.training.roles import Role


class MegatronStageEngine(MegatronEngine):
    """One rank's share of a stage.

    Args:
        head: the trained model's output.
        reference: Hugging Face directory of the reference; None: the stage has none.
        stop_ids: tokens that end an answer.
        config, files, ranks, device, loads: see `MegatronEngine`.
    """

    def __init__(
        self,
        config: StageConfig,
        head: Head,
        reference: Path | None,
        files: Mapping[str, bytes],
        stop_ids: Sequence[int],
        ranks: Ranks,
        device: Device,
        loads: LoadReports = unreported,
    ) -> None:
        super().__init__(config, files, ranks, device, loads)
        self.config, self.stop_ids = config, stop_ids
        self.model = self.add_trained(head)
        self.model.make_optimizer(adam_of(config.trainer.optimizer))
        base = {} if config.trainer.lora is None else {"model.path": config.model.path}
        self.saves = Saves(config, ranks, base if reference is None else {"reference": reference, **base})
        if reference is not None and config.shares_reference(reference):
            self.add_base("reference", self.model)
        elif reference is not None:
            self.add_policy("reference", reference, trainable=False)
        self.longest = min(role.model.arch.max_position for role in self.roles.values())

    def add_trained(self, head: Head) -> Role[Policy] | Role[Critic]:
        """Creates the trained role."""
        path = self.config.model.path
        return self.add_critic("model", path) if head == "value" else self.add_policy("model", path, trainable=True)

    def load(self) -> int:
        checkpoint.check_writable(self.config.run_dir / "checkpoints", self.ranks)  # the first save may be hours away
        loaded = self.saves.load([self.model], self.loads)
        if loaded is None:
            return 0
        number, self.facts = loaded
        return number

    def save(self, number: int, facts: Mapping[str, object], hf_path: Path | None) -> None:
        export = None if hf_path is None else self.exported({STEP: f"{number}\n".encode()})
        self.saves.save(number, [self.model], facts, hf_path, {} if export is None else {"": export})

    def finish_save(self, wait: bool) -> Saved | None:
        return self.saves.finish(wait)

    def export(self, path: Path) -> Sequence[Gate]:
        export, arch = self.exported({}), self.model.model.arch
        ids = comparison.probe_ids(arch.vocab, min(32, arch.max_position), self.config.seed)
        mine = outputs(self.model.model, ids.to(self.device.torch))
        outcomes: list[Gate] = []

        async def write_and_compare() -> None:
            assert export is not None
            await asyncio.to_thread(export_hf, path, export)
            outcomes.append(await asyncio.to_thread(self.compare, path, ids, mine))

        self.ranks.on_leader(write_and_compare)
        return outcomes

    def exported(self, files: Mapping[str, bytes]) -> Export | None:
        """A copy of the model for an export, with more small files; None on ranks other than 0. Collective."""
        tensors, adapter = (
            self.model.model.full_tensors(),
            self.model.model.adapter(*self.config.published(self.config.model.path)),
        )
        if tensors is None or not self.ranks.leads:
            return None
        export = Export(tensors, {**self.files, **files}, adapter)
        return as_classifier(export, pad_token_id=self.classifier_pad()) if self.is_critic else export

    def close(self) -> None:
        self.saves.close()

    @property
    def is_critic(self) -> bool:
        """Whether the trained model has a value head."""
        return isinstance(self.model.model, Critic)

    def classifier_pad(self) -> int | None:
        """The padding token for config.json. transformers scores a sequence at its last other token, so it is no stop token."""
        pad = json.loads(self.files["config.json"]).get("pad_token_id")
        return None if pad in self.stop_ids else pad

    def compare(self, path: Path, ids: torch.Tensor, mine: torch.Tensor) -> Gate:
        """Compares the outputs of the exported model in transformers with this engine's. On rank 0."""
        dtype, limits = self.config.model.dtype, LIMITS[self.config.model.dtype]
        if self.is_critic:
            return comparison.values_gate(mine, comparison.load_hf_critic(path, dtype), ids, limits)
        return comparison.logits_gate(mine, comparison.load_hf(path, dtype), ids, limits)
