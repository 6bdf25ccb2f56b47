"""The engine of a run: its roles, checkpoints and versions, as the control loop uses them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from polyreme.config.run import RunConfig
from polyreme.config.trainer import OptimizerConfig, SftPhase
from polyreme.experience.loading import LoadReports, unreported
from polyreme.experience.metric_records import MetricValues
from polyreme.experience.record_codec import TrainedSamples
from polyreme.rundir.checkpoint_manifest import CheckpointFacts
from polyreme.weights.arena import Arena
from polyreme_trainer.algorithms.mixing import rows_of_step
from polyreme_trainer.algorithms.state import AlgorithmState
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.learner.engine import DeviceUse, PlannedBatch, Saved, Written
from polyreme_trainer.learner.gates import Answer, Gate
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.learner.learning_rate import learning_rate
from polyreme_trainer.megatron.batches.batch import MicroBatch, Sequences, split_steps, supervised
from polyreme_trainer.megatron.batches.samples import collect
from polyreme_trainer.megatron.checkpoints import checkpoint
from polyreme_trainer.megatron.checkpoints.saves import RunSaves
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.engine import MegatronEngine
from polyreme_trainer.megatron.huggingface.export import CRITIC, EMA, Export
from polyreme_trainer.megatron.models.critic import Critic
from polyreme_trainer.megatron.models.model import check_same_weights
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.offload.offload import Offload
from polyreme_trainer.megatron.probes.model_probes import ModelProbes
from polyreme_trainer.megatron.training.followers import Followers
from polyreme_trainer.megatron.training.iteration import Iteration, episodes_of
from polyreme_trainer.megatron.training.optimizer import Adam, adam_of
from polyreme_trainer.megatron.training.own_algorithm import load_algorithm
from polyreme_trainer.megatron.training.replay import decode_routes
from polyreme_trainer.megatron.training.roles import AnyRole, Role
from polyreme_trainer.megatron.training.step import train_iteration
from polyreme_trainer.megatron.versions.version_writer import VersionWriter

MIXING = 0x707478
"""Separates the random order of mixed-in supervised rows from other uses of the run's seed."""


class RunEngine(MegatronEngine):
    """One rank's roles, checkpoints and arena.

    Args:
        run_id: names the arena.
        config, files, ranks, device, loads: see `MegatronEngine`.
    """

    def __init__(
        self,
        config: RunConfig,
        files: Mapping[str, bytes],
        run_id: str,
        ranks: Ranks,
        device: Device,
        loads: LoadReports = unreported,
    ) -> None:
        super().__init__(config, files, ranks, device, loads)
        self.config = config
        self.algorithm = load_algorithm(config)
        self.temperature = config.rollout.temperature
        """Ratios, the KL to the reference and the entropy are those of the distributions that replicas sample from."""
        self.actor = self.add_policy("actor", config.model.path, trainable=True, temperature=self.temperature)
        self.policy = policy = self.actor.model
        """The actor's model."""
        if config.trainer.parallel.nodes > 1:
            check_same_weights(policy)
        self.adam = adam_of(config.trainer.optimizer)
        self.actor.make_optimizer(self.adam)
        self.actor.replays = config.trainer.moe.replay_routes
        kl = self.algorithm.recipe.kl
        self.followers = Followers(policy, self.frozen_role, kl.renew_interval if kl else 0, config.trainer.ema_decay)
        self.reference: AnyRole | None = self.followers.reference
        self.critic = self.make_critic() if self.algorithm.needs.critic else None
        self.state = AlgorithmState()
        """The algorithm's state between iterations."""
        self.trained_samples: TrainedSamples | None = None
        """How the last iteration used its samples."""
        self.writer = VersionWriter(
            policy, ranks, run_id, policy.writes, config.trainer.parallel.nodes, config.security, config.weights.anchor_interval
        ).open()
        self.saves = RunSaves(config, ranks)
        self.longest = config.rollout.max_model_len
        self.rows: Sequences | None = None
        """The supervised rows that iterations mix into their steps."""
        self.offload: Offload | None = None
        """The tensors that have left the device; None while all are on it."""
        self.probes = ModelProbes(config, policy, self.critic.model if self.critic else None, ranks, device)

    @property
    def trained(self) -> list[AnyRole]:
        """The roles with an optimizer."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    @property
    def saved(self) -> list[AnyRole]:
        """The roles in a checkpoint. A constant reference is not among them, because it is version 0's export."""
        return [*self.trained, *self.followers.roles]

    def frozen_role(self, name: str, dtype: str) -> Role[Policy]:
        """Creates a role with a policy of the actor's shapes and without an optimizer."""
        policy = self.host.admit(lambda: Policy(self.policy.arch, dtype, self.device, trainable=False))
        return self.policy_role(name, policy, self.temperature)

    @property
    def arena(self) -> Arena:
        return self.writer.arena

    @property
    def newest_save(self) -> int | None:
        return self.saves.newest

    def hf_path(self, version: int) -> Path:
        return self.saves.hf_path(version)

    def supervised_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """The actor's log-probabilities of a supervised micro-batch, fp32 [k], at temperature 1: no policy sampled it."""
        return self.policy.logprobs(batch.ids, batch.targets)

    def logprobs_and_entropies(self, batch: MicroBatch) -> torch.Tensor:
        """The actor's log-probabilities and entropies of the trained tokens, at sampling temperature: fp32 [2, k], in nats."""
        return self.policy.logprobs_and_entropies(batch.ids, batch.targets, self.temperature)

    def load(self) -> int | None:
        loaded = self.saves.load(self.saved, self.loads)
        if loaded is None:
            return None
        version, self.facts = loaded
        self.state = AlgorithmState.from_json(self.facts["algorithm"])
        if self.algorithm.needs.reference and self.followers.reference is None:
            self.make_reference(self.saves.check_reference(self.facts))
        settings = self.config.trainer
        if self.critic is not None and self.critic.model.adapters is not None and settings.critic.path is None and settings.sft:
            base = self.saves.check_reference(self.facts)
            self.critic.model.load_base(base, self.loads("critic"))  # it started from the actor after the warm start
        return version

    def begin_phase(self, phase: SftPhase) -> None:
        self.actor.make_optimizer(Adam(beta2=phase.beta2, weight_decay=phase.weight_decay))

    def begin_iterations(self) -> None:
        self.actor.make_optimizer(self.adam)
        if self.critic is not None and self.config.trainer.critic.path is None:
            self.critic.model.copy_backbone(self.policy)
            self.critic.make_optimizer(adam_of(self.critic_optimizer))
        self.followers.begin()

    def mix_in(self, rows: StageRows) -> None:
        self.rows = supervised(rows.ids, rows.loss_mask)

    def mixed(self, iteration: int, steps: int) -> list[Sequences]:
        """The supervised rows of each optimizer step of an iteration; empty when none are mixed in."""
        ptx, rows, seed = self.config.algorithm.ptx, self.rows, (self.config.seed, MIXING)
        if ptx is None or rows is None:
            return []
        first = (iteration - 1) * steps
        return [rows.take(rows_of_step(len(rows), ptx.batch_size, first + step, seed)) for step in range(steps)]

    def save_warm_start(self, step: int, facts: Mapping[str, int]) -> None:
        self.saves.save_warm_start(step, self.trained, facts)

    def load_warm_start(self) -> Mapping[str, int] | None:
        found = self.saves.find_warm_start()
        if found is None:
            return None
        if found.facts["step"]:  # between two steps of a phase
            self.begin_phase(self.config.trainer.sft[found.facts["phase"]])
        checkpoint.load(found, self.trained, self.loads)
        return found.facts

    @property
    def critic_optimizer(self) -> OptimizerConfig:
        """The critic's own optimizer settings, or else the actor's."""
        return self.config.trainer.critic.optimizer or self.config.trainer.optimizer

    def make_critic(self) -> Role[Critic]:
        """Creates the critic role with the weights of its Hugging Face directory."""
        role = self.add_critic("critic", self.config.trainer.critic.path or self.config.model.path)
        role.make_optimizer(adam_of(self.critic_optimizer))
        return role

    def make_reference(self, path: Path) -> None:
        """Creates the reference role from the Hugging Face directory of version 0. When `shares_reference` is set, version 0 is
        the actor without its adapters, so the role uses the actor's memory and reads nothing."""
        if self.config.shares_reference:
            self.reference = self.add_base("reference", self.actor)
            return
        self.reference = self.frozen_role("reference", self.policy.dtype)
        self.reference.model.load_hf(path, self.loads("reference"))

    def train(self, batch: PlannedBatch) -> MetricValues:
        config = self.config
        routes = partial(decode_routes, arch=self.policy.arch) if self.actor.replays else None
        sequences, tokens = collect(batch.groups, self.part_weights(), self.algorithm.needs.greedy, routes)
        seed = (config.seed, batch.iteration)
        groups = tokens.group[episodes_of(sequences, tokens)]
        steps = split_steps(groups, config.algorithm.minibatches, config.algorithm.epochs, seed)
        warmup = 0 if self.critic is None else config.trainer.critic.warmup_iterations
        iteration = Iteration(
            number=batch.iteration,
            sequences=sequences,
            tokens=tokens,
            steps=steps,
            state=self.state,
            lr=learning_rate(config.trainer.optimizer, batch.iteration, config.iterations, skipped=warmup),
            critic_lr=learning_rate(self.critic_optimizer, batch.iteration, config.iterations),
            trains_actor=batch.iteration > warmup,
            mixed=self.mixed(batch.iteration, len(steps)),
            ptx_coef=config.algorithm.ptx.coef if config.algorithm.ptx else 0.0,
        )
        trained = train_iteration(iteration, self.algorithm, self)
        self.state, self.trained_samples = trained.state, trained.samples
        metrics = {**trained.metrics, **self.followers.follow(batch.iteration)}
        self.device.synchronize()
        if config.trainer.offload.is_set:
            moves = self.host.take_moves()
            metrics |= {"offload/moved_bytes": moves.nbytes, "timing/offload": moves.seconds}
        return metrics | {f"timing/{part}": seconds for part, seconds in trained.seconds.items()}

    def part_weights(self) -> dict[str, float] | None:
        """The weights of the reward's named parts, when the algorithm normalises each of them."""
        rewards = self.config.reward.rewards if self.config.reward else []
        return {spec.label: spec.weight for spec in rewards} if self.algorithm.needs.parts else None

    def write(self, slot: int, version: int, term: int) -> Written:
        return replace(self.writer.write(slot, version, term), canary=self.probes.canary())

    def save(self, written: Written, version: int, facts: CheckpointFacts) -> None:
        adapter = self.policy.adapter(*self.config.published(self.config.model.path))
        others = {CRITIC: self.critic_export(), EMA: self.followers.export(self.files)}
        exports = {name: model for name, model in others.items() if model}
        whole = self.policy.full_tensors() if self.writer.parts > 1 else None
        if self.ranks.leads:  # copies, because later versions overwrite the slot
            tensors = whole or {name: tensor.clone() for name, tensor in self.writer.tensors(written.slot).items()}
            exports[""] = Export(tensors, self.files, adapter)
        self.saves.save(version, self.saved, {**facts, "algorithm": self.state.to_json()}, self.hf_path(version), exports)

    def finish_save(self, wait: bool) -> Saved | None:
        saved = self.saves.finish(wait)
        if saved and saved.hf_path == self.hf_path(0) and self.algorithm.needs.reference and self.followers.reference is None:
            self.make_reference(saved.hf_path)
        return saved

    def critic_export(self) -> Export | None:
        """The critic's present weights for an export; None without a critic and on ranks other than 0. Collective."""
        tensors = None if self.critic is None else self.critic.model.full_tensors()
        if tensors is None or not self.ranks.leads:
            return None
        path = self.config.trainer.critic.path
        return Export(tensors, {**self.files, **({} if path is None else {"config.json": (path / "config.json").read_bytes()})})

    def compare_hf(self, path: Path) -> Sequence[Gate]:
        return self.probes.compare_hf(path)

    compares_answers = True

    def compare_answers(self, greedy: Sequence[Answer], sampled: Sequence[Answer]) -> Sequence[Gate]:
        return self.probes.compare_answers(greedy, sampled)

    def leave_device(self) -> DeviceUse:
        """See `TrainEngine`. On CPU the host's memory is the device's, so everything stays where it is."""
        if self.device.kind == "cpu":
            return DeviceUse(0, self.device.free_cached())
        self.offload_roles(pin=True)
        return DeviceUse(self.offload.nbytes if self.offload else 0, self.device.free_cached())

    def offload_roles(self, pin: bool) -> None:
        """Moves every role to the host's memory and drops the gradients."""
        roles = [*self.saved, *([self.reference] if self.reference and not self.followers.reference else [])]
        gradients = [grad for role in self.trained if role.optimizer for grad in role.optimizer.gradients()]
        self.offload = Offload((tensor for role in roles for tensor in role.tensors()), gradients, pin)

    def return_to_device(self) -> None:
        if self.offload is not None:
            self.offload.restore()
            self.offload = None

    def close(self) -> None:
        self.saves.close()
        self.writer.close()
