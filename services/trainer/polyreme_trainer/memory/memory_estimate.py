"""The memory of a run's or a stage's learner, printed before it is allocated, and the refusal of a learner that cannot fit.

Invariant: the estimate reads config.json files and nothing else, imports no torch, and allocates nothing.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from polyreme.config.run import RunConfig
from polyreme.config.stage import DpoConfig, RewardModelConfig, StageConfig
from polyreme.errors import ConfigError, PolyremeError
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.lora_mapping import adapter_architecture
from polyreme_trainer.memory.activations import MicroBatchSize
from polyreme_trainer.memory.estimate import GIB, RankEstimate, arena_term, checkpoint_terms, delta_term, stage_estimates
from polyreme_trainer.memory.placement import devices_needed
from polyreme_trainer.memory.replica_memory import refuse_replica, replica_line, sleeping_weights
from polyreme_trainer.memory.sharding import written_parameters
from polyreme_trainer.memory.state import Addend, Model
from polyreme_trainer.stages.table import TABLE

logger = logging.getLogger(__name__)

_SMALLER = (
    "Set trainer.offload, trainer.recompute or trainer.lora, use more tensor ranks or stages (trainer.parallel), a smaller "
    "trainer.micro_batch_tokens, model.dtype: bfloat16, an algorithm with fewer models, a smaller model, or larger devices."
)


@dataclass(frozen=True)
class MachineMemory:
    """The learner's memory on one machine.

    Attributes:
        rank: the estimate of the machine's rank that needs most.
        ranks: the number of its ranks.
        arena: shared memory of its part of the policy's versions; None if it has no part. A stage publishes no versions.
        checkpoint: host memory while a checkpoint is written.
        shares_device: whether all models are in the host's memory while replicas have the devices.
        asleep: the weights of replicas, in the host's memory while the learner has the devices; None if they are dropped.
        deltas: those of its part of the versions; None if versions are sent whole or not at all.
    """

    rank: RankEstimate
    ranks: int
    arena: Addend | None
    checkpoint: Addend
    shares_device: bool = False
    asleep: Addend | None = None
    deltas: Addend | None = None

    @property
    def shared(self) -> list[Addend]:
        """The terms in the host's memory that the ranks share."""
        return [term for term in (self.arena, self.deltas, self.asleep, self.checkpoint) if term is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks and of what they share, on a machine whose ranks compute in its own memory."""
        return self.ranks * self.rank.all_bytes + sum(term.nbytes for term in self.shared)

    @property
    def kept(self) -> int:
        """Bytes that each rank keeps in the host's memory while replicas use the same devices: all state except gradients."""
        state = {*self.rank.state, *self.rank.host}
        return sum(term.nbytes for term in state if not term.name.endswith(" gradients"))

    @property
    def host(self) -> int:
        """Bytes of the host's memory, when the ranks use accelerators."""
        each = self.kept if self.shares_device else self.rank.host_bytes
        return self.ranks * each + sum(term.nbytes for term in self.shared)


@dataclass(frozen=True)
class LearnerMemory:
    """The learner's memory on each of its machines.

    Attributes:
        machines: the first one first.
        on_cpu: whether the ranks compute in the machines' own memory.
    """

    machines: list[MachineMemory]
    on_cpu: bool

    @property
    def rank(self) -> RankEstimate:
        """The estimate of the rank that needs most."""
        ranks = (machine.rank for machine in self.machines)
        return max(ranks, key=lambda rank: rank.all_bytes if self.on_cpu else rank.nbytes)

    @property
    def fullest(self) -> MachineMemory:
        """The machine whose own memory holds most."""
        return max(self.machines, key=lambda machine: machine.nbytes if self.on_cpu else machine.host)

    def at(self, machine: int | None) -> "LearnerMemory":
        """The memory on one machine. None: on all."""
        return self if machine is None else replace(self, machines=[self.machines[machine]])


def learner_memory(config: RunConfig | StageConfig) -> LearnerMemory:
    """The estimate of a configuration. Raises ConfigError for a model that cannot be trained or does not divide over ranks."""
    models, parallel = models_of(config), config.trainer.parallel
    arenas: list[Addend | None] = [None] * parallel.nodes
    deltas = arenas
    on_cpu = config.device == "cpu"
    try:
        stages = stage_estimates(models, parallel, micro_batch_of(config), config.trainer.offload, together=on_cpu)
        if isinstance(config, RunConfig):
            parts = written_parameters(models[0].arch, parallel)
            arenas = [arena_term(count, config.model.dtype) if count else None for count in parts]
            if _sends_deltas(config):
                deltas = [delta_term(count, config.model.dtype) if count else None for count in parts]
        checkpoints = checkpoint_terms(models, _followers(config), config.model.dtype, parallel)
    except ValueError as error:
        raise ConfigError("sizes that divide over the ranks", str(error), "Change trainer.parallel.") from None
    machines, colocated = [], isinstance(config, RunConfig) and config.placement == "colocated"
    asleep = sleeping_weights(config) if isinstance(config, RunConfig) else None
    for node, (arena, kept, checkpoint) in enumerate(zip(arenas, deltas, checkpoints, strict=True)):
        each = parallel.pipeline // parallel.nodes  # stages on a machine; without stages, all machines have the same
        mine = stages[node * each : (node + 1) * each] if each else stages
        rank = max(mine, key=lambda stage: stage.all_bytes if on_cpu else stage.nbytes)
        machines.append(MachineMemory(rank, parallel.ranks_per_node, arena, checkpoint, colocated, asleep, kept))
    return LearnerMemory(machines, on_cpu)


def _sends_deltas(config: RunConfig) -> bool:
    """Whether a replica may be on another host than the arena, and receive deltas there."""
    return config.weights.anchor_interval > 1 and (config.placement == "separate" or config.trainer.parallel.nodes > 1)


def _followers(config: RunConfig | StageConfig) -> set[str]:
    """The roles without an optimizer that follow the actor, which a checkpoint contains."""
    if isinstance(config, StageConfig):
        return set()
    renewed = config.recipe.kl is not None and config.recipe.kl.renew_interval > 0
    return {"moving average", *(["reference"] if renewed else [])}


def models_of(config: RunConfig | StageConfig) -> list[Model]:
    """The models that the learner holds, the trained policy first. Raises ConfigError."""
    arch, dtype, lora = load_architecture(config.model.path), config.model.dtype, config.trainer.lora

    def trained(role: str, arch: Architecture, copies_actor: bool = False) -> Model:
        adapter = None if lora is None else adapter_architecture(arch, lora)
        return Model(role, arch, dtype, trained=True, adapter=adapter, copies_actor=copies_actor)

    if isinstance(config, StageConfig):
        reference = TABLE[config.stage].reference(config)
        model = trained("model", arch.with_value_head() if isinstance(config, RewardModelConfig) else arch)
        if reference is None or config.shares_reference(reference):
            return [model]
        return [model, Model("reference", load_architecture(reference), dtype, trained=False)]
    models = [trained("actor", arch)]
    if config.algorithm.has_critic:
        critic = load_architecture(config.trainer.critic.path or config.model.path)
        models.append(trained("critic", critic.with_value_head(), copies_actor=config.trainer.critic.path is None))
    followers = _followers(config)
    if config.recipe.kl is not None and not config.shares_reference:
        models.append(Model("reference", arch, dtype, trained=False, copies_actor="reference" in followers))
    if config.trainer.ema_decay is not None:
        models.append(Model("moving average", arch, "float32", trained=False, copies_actor=True))
    return models


def micro_batch_of(config: RunConfig | StageConfig) -> MicroBatchSize:
    """The largest micro-batch: the token budget, or all tokens of a rank in one optimizer step if these are fewer."""
    if isinstance(config, StageConfig):
        pairs = isinstance(config, RewardModelConfig) or (isinstance(config, DpoConfig) and config.loss.kind != "kto")
        steps = [(config.trainer.batch_size, config.data.max_tokens * (2 if pairs else 1))]
        entropy = False
    else:
        groups = -(-config.groups_per_iteration // config.algorithm.minibatches)
        steps = [(groups * config.group_size, config.longest_sequence)]
        rows = [phase.batch_size for phase in config.trainer.sft]
        rows += [config.algorithm.ptx.batch_size] if config.algorithm.ptx else []
        steps += [(count, config.rollout.max_model_len) for count in rows]
        entropy = config.recipe.entropy_coef > 0
    budget, parallel = config.trainer.micro_batch_tokens, config.trainer.parallel
    whole = max(min(max(budget, longest), -(-count // parallel.data) * longest) for count, longest in steps)
    tokens = -(-whole // parallel.context)
    pads = config.device == "cpu" or config.model.dtype == "float32"  # no kernel takes packed sequences
    longest = config.data.max_tokens if isinstance(config, StageConfig) else max(each for _, each in steps)
    return MicroBatchSize(
        tokens, tokens, entropy, on_cpu=config.device == "cpu", recompute=config.trainer.recompute, padded=longest if pads else 0
    )


def memory_lines(config: RunConfig | StageConfig) -> Iterator[str]:
    """The estimate as lines of text. Raises ConfigError."""
    memory, parallel = learner_memory(config), config.trainer.parallel
    yield f"memory         of each learner rank ({parallel.layout}), in GiB:"
    for term in memory.rank.terms:
        yield f"  {term.nbytes / GIB:>9,.3f}    {term.name}: {term.arithmetic}"
    yield f"  {memory.rank.nbytes / GIB:>9,.3f}    in all"
    if memory.rank.host:
        on_cpu = ", the same memory on CPU" if config.device == "cpu" else ""
        yield f"memory         of the host for each learner rank, while not in use (trainer.offload){on_cpu}, in GiB:"
        for term in memory.rank.host:
            yield f"  {term.nbytes / GIB:>9,.3f}    {term.name}: {term.arithmetic}"
        yield f"  {memory.rank.host_bytes / GIB:>9,.3f}    in all; {parallel.ranks_per_node} rank(s) on each machine"
    for number, machine in enumerate(memory.machines, start=1):
        place = "the learner's machine" + (f" {number} of {parallel.nodes}" if parallel.nodes > 1 else "")
        if machine.arena is not None:
            yield f"memory         in /dev/shm of {place}: {machine.arena.nbytes / GIB:,.3f} GiB, {machine.arena.arithmetic}"
        if machine.deltas is not None:
            yield (
                f"memory         in the host of {place} while replicas receive deltas: "
                f"{machine.deltas.nbytes / GIB:,.3f} GiB, {machine.deltas.arithmetic}"
            )
        if machine.asleep is not None:
            yield (
                f"memory         in the host of {place} while the learner has the devices: "
                f"{machine.asleep.nbytes / GIB:,.3f} GiB, {machine.asleep.arithmetic}"
            )
        nbytes, arithmetic = machine.checkpoint.nbytes, machine.checkpoint.arithmetic
        yield f"memory         in the host of {place} while a checkpoint is written: {nbytes / GIB:,.3f} GiB, {arithmetic}"
    if not isinstance(config, StageConfig):
        yield f"memory         of each replica's device: {replica_line(config)}"
        if config.device != "cpu":
            yield placement_line(config, memory)


def placement_line(config: RunConfig, memory: LearnerMemory) -> str:
    """The devices that each placement needs, and the host memory that a learner's models need while replicas have the devices."""
    apart, together = (devices_needed(config, placement) for placement in ("separate", "colocated"))
    return (
        f"devices        {apart} with placement: separate, {together} with placement: colocated, which keeps"
        f" {max(each.ranks * each.kept for each in memory.machines) / GIB:,.3f} GiB of the learner "
        "in the host's memory during generation"
    )


def fit_errors(
    config: RunConfig | StageConfig, limit: int | None, host: int | None = None, machine: int | None = None
) -> Iterator[PolyremeError]:
    """Yields an error when the models do not divide over the ranks, or the learner cannot fit.

    Args:
        limit: memory of a device in bytes; on CPU, of the machine, which all ranks of a node share. None: unknown.
        host: the machine's own memory in bytes, without its accelerators. None: unknown.
        machine: the learner's machine that has this memory. None: all have the same.
    """
    try:
        memory = learner_memory(config).at(machine)
    except ConfigError as error:
        yield error
        return
    on_cpu, rank, node = memory.on_cpu, memory.rank, memory.fullest
    if limit is not None and limit < (node.nbytes if on_cpu else rank.nbytes):
        found = _sum(rank.terms, rank.nbytes)
        if on_cpu:
            terms = sorted(node.rank.all_terms, key=lambda term: term.name)
            found = _machine_sum(node, _sum(terms, node.rank.all_bytes), node.nbytes)
        place = "this machine" if on_cpu else "each device"
        yield ConfigError(f"a learner that fits the {limit / GIB:,.1f} GiB of {place}", found, _SMALLER)
    if host is not None and not on_cpu and host < node.host:
        each = f"{node.kept / GIB:,.2f} GiB of its models" if node.shares_device else _sum(node.rank.host, node.rank.host_bytes)
        yield ConfigError(
            f"a learner that keeps at most the {host / GIB:,.1f} GiB of this machine's memory",
            _machine_sum(node, each, node.host),
            "Disable a part of trainer.offload, set rollout.vllm.sleep_level: 2 or placement: separate, "
            "spread the ranks over more machines, or use a machine with more memory.",
        )


def _machine_sum(machine: MachineMemory, each: str, nbytes: int) -> str:
    shared = "".join(f" + {term.name} {term.nbytes / GIB:,.2f}" for term in machine.shared)
    return f"{machine.ranks} rank(s) x ({each}){shared}: {nbytes / GIB:,.2f} GiB"


def _sum(terms: Iterable[Addend], nbytes: int) -> str:
    return " + ".join(f"{term.name} {term.nbytes / GIB:,.2f}" for term in terms) + f" = {nbytes / GIB:,.2f} GiB for each rank"


def report(config: RunConfig | StageConfig, limit: int | None) -> Iterator[str | PolyremeError]:
    """The estimate's lines, and errors when the learner or a replica exceeds `limit`; see `fit_errors`. Raises ConfigError."""
    yield from memory_lines(config)
    yield from fit_errors(config, limit)
    if isinstance(config, RunConfig) and limit is not None:
        yield from refuse_replica(config, limit)


def announce(config: RunConfig | StageConfig, limit: int, host: int, rank: int) -> None:
    """Logs the estimate on rank 0, before any allocation. Raises ConfigError on all ranks of a machine where it exceeds a limit.

    Args:
        limit, host: as in `fit_errors`, of this rank's machine.
        rank: the number of this rank.
    """
    if rank == 0:
        for line in memory_lines(config):
            logger.info("%s", line)
    for error in fit_errors(config, limit, host, rank // config.trainer.parallel.ranks_per_node):
        raise error
