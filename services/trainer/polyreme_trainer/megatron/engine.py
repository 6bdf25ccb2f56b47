"""One rank's models on megatron-core, and the operations that every program uses, see `learner.engine.Engine`.

Invariant: every result is the same on all ranks, except where the protocol returns it on rank 0 only. The result of a step
depends only on its rows, their order and the weights: ranks and micro-batches change it only by rounding.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.experience.loading import LoadReports, unreported
from polyreme.rundir.checkpoint_manifest import CheckpointFacts
from polyreme_trainer.algorithms.metrics import Metrics, combine, finish
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.learner.engine import RowsLoss
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.batches.batch import IGNORE, FloatArray, MicroBatch, Sequences, supervised, with_end
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.models.critic import Critic, build_critic
from polyreme_trainer.megatron.models.policy import Policy, build_policy
from polyreme_trainer.megatron.offload.host_memory import HostMemory
from polyreme_trainer.megatron.parallel.shard import data_shard
from polyreme_trainer.megatron.training.losses import ObjectiveLoss, over_ranks
from polyreme_trainer.megatron.training.roles import AnyRole, BaseRole, LossTerm, Role, every


class MegatronEngine:
    """The roles of a run or a stage. Its kinds create them and save them.

    Args:
        config, files: the configuration and the model's small files.
        ranks, device: the ranks and this rank's device. Requires `init_parallel`.
        loads: provides for each role the function to call with the fraction of its weights that this rank has loaded.

    Attributes:
        roles: by name.
    """

    def __init__(
        self,
        config: RunConfig | StageConfig,
        files: Mapping[str, bytes],
        ranks: Ranks,
        device: Device,
        loads: LoadReports = unreported,
    ) -> None:
        self.files, self.ranks, self.device, self.loads = files, ranks, device, loads
        self._config = config
        self.shard = data_shard(config.trainer.micro_batch_tokens, device)
        self.host = HostMemory(config.trainer.offload, device.pins)
        self.roles: dict[str, AnyRole] = {}
        self.facts: CheckpointFacts = {}

    def add_policy(self, name: str, path: Path, *, trainable: bool, temperature: float = 1.0) -> Role[Policy]:
        """Creates a role with a language model that has the weights of a Hugging Face directory. Raises ConfigError."""
        build = partial(build_policy, path, self._config, self.device, trainable=trainable, loaded=self.loads(name))
        return self.policy_role(name, self.host.admit(build), temperature)

    def policy_role(self, name: str, policy: Policy, temperature: float) -> Role[Policy]:
        """Creates a role whose output is the log-probabilities of the trained tokens at a temperature."""
        role = Role(name, policy, lambda batch: policy.logprobs(batch.ids, batch.targets, temperature), self.shard)
        self.roles[name] = role
        return role

    def add_critic(self, name: str, path: Path) -> Role[Critic]:
        """Creates a role with a value head on the weights of a Hugging Face directory. Raises ConfigError."""
        settings = self._config.trainer
        build = partial(
            build_critic,
            path,
            self._config.model.dtype,
            self.device,
            recompute=settings.recompute,
            lora=settings.lora,
            moe=settings.moe,
            seed=self._config.seed,
            loaded=self.loads(name),
        )
        critic = self.host.admit(build)
        role = Role(name, critic, lambda batch: critic.values(batch.ids)[batch.targets != IGNORE], self.shard)
        self.roles[name] = role
        return role

    def add_base(self, name: str, adapted: AnyRole) -> AnyRole:
        """Creates a role with another role's model without its adapters, in the same memory."""
        role = BaseRole(name, adapted.model, adapted.output, self.shard)
        self.roles[name] = role
        return role

    def forward(self, role: str, rows: StageRows) -> FloatArray:
        sequences = self._sequences(role, rows)
        return self.roles[role].forward(sequences, every(sequences), partial(self._output, role))

    def forward_backward(self, role: str, rows: StageRows, loss: RowsLoss) -> list[Metrics]:
        return self.roles[role].forward_backward(self._term(role, rows, loss))

    def measure(self, role: str, rows: StageRows, loss: RowsLoss) -> list[Metrics]:
        return self.roles[role].measure(self._term(role, rows, loss))

    def means(self, metrics: Sequence[Metrics]) -> Mapping[str, float]:
        return finish(over_ranks(self.shard, metrics))

    def optim_step(self, role: str, lr: float) -> Mapping[str, float]:
        norm = self.roles[role].optim_step(lr)
        return {**finish(combine([self.roles[role].routing_metrics])), "grad_norm": norm, "lr": lr}

    def _term(self, role: str, rows: StageRows, loss: RowsLoss) -> LossTerm[Metrics]:
        sequences = self._sequences(role, rows)
        return LossTerm(sequences, every(sequences), ObjectiveLoss(loss, rows, sequences), partial(self._output, role))

    def _sequences(self, role: str, rows: StageRows) -> Sequences:
        """Rows as sequences. A value head reads whole ones."""
        sequences = supervised(rows.ids, rows.loss_mask, rows.width)
        return with_end(sequences) if isinstance(self.roles[role].model, Critic) else sequences

    def _output(self, role: str, batch: MicroBatch) -> Tensor:
        """A model's numbers for rows. No policy sampled them, so log-probabilities are those at temperature 1."""
        model = self.roles[role].model
        return model.logprobs(batch.ids, batch.targets) if isinstance(model, Policy) else self.roles[role].output(batch)
