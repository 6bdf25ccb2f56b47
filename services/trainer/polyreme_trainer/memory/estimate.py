"""The memory of a learner rank as a sum of named terms, and the memory of a policy's versions outside the ranks.

Invariant: an estimate depends only on the configuration and the models' config.json files. It counts tensors: not the
interpreter, not the device's context, and not the buffers of collectives.

With offload, gradients exist only in their model's steps. An optimizer step has its own peak: without activations, with part of
the moments and full-precision weights on the device. So has copying the actor's weights into another model: both are there.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from polyreme.config.trainer import OffloadConfig, ParallelConfig
from polyreme.weights.delta import WHOLE_ABOVE
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.offload import PART_BYTES
from polyreme_trainer.memory.activations import MicroBatchSize, step_terms
from polyreme_trainer.memory.sharding import Sharding, shardings, written_parameters
from polyreme_trainer.memory.state import MASTER_BYTES, MOMENTS_BYTES, WIDTHS, Addend, Model, ModelState, copy_terms, state_of

GIB = 2**30
ARENA_SLOTS = 3
"""Number of policy versions in the arena, the default of `Arena.create`."""


def on_device(
    states: Sequence[ModelState], active: Collection[ModelState], trained: ModelState | None, offload: OffloadConfig
) -> list[Addend]:
    """The state that is on the device while `active` compute, of which `trained` sums gradients (None: no model does)."""
    terms: list[Addend] = []
    for state in states:
        if state in active or not offload.idle_models:
            terms += state.weights
        if state is trained or not offload.is_set:
            terms += state.gradients
        if not offload.optimizer:
            terms += state.optimizer
    return terms


def step_term(state: ModelState) -> Addend:
    """The part of an offloaded optimizer's state that a step of the model moves to the device."""
    whole = sum(term.nbytes for term in state.optimizer)
    arithmetic = f"of {whole:,} bytes, {PART_BYTES:,} at a time, or of the largest parameter"
    return Addend(f"{state.role} optimizer step", min(whole, max(PART_BYTES, state.largest)), arithmetic)


def resting(states: Sequence[ModelState], offload: OffloadConfig) -> list[Addend]:
    """All state that can be in the host's memory. While models are exchanged, all of them can be there at once."""
    weights = [term for state in states for term in state.weights] if offload.idle_models and len(states) > 1 else []
    return weights + ([term for state in states for term in state.optimizer] if offload.optimizer else [])


@dataclass(frozen=True)
class RankEstimate:
    """The peak memory of one rank.

    Attributes:
        state: the models' weights, gradients and optimizer state, which are on the device at the same time.
        step: the additional memory of training one model; of several trained models, the largest.
        host: the terms that are in the host's memory while they are not in use. They may repeat terms of `state`.
        moves: whether `step` is a part of `host`, which leaves the host's memory meanwhile.
    """

    state: list[Addend]
    step: list[Addend]
    host: list[Addend] = field(default_factory=list)
    moves: bool = False

    @property
    def terms(self) -> list[Addend]:
        return [*self.state, *self.step]

    @property
    def nbytes(self) -> int:
        return sum(term.nbytes for term in self.terms)

    @property
    def host_bytes(self) -> int:
        return sum(term.nbytes for term in self.host)

    @property
    def all_terms(self) -> list[Addend]:
        """The terms of device and host together, each once, for machines where both are the same memory."""
        return list(dict.fromkeys([*self.state, *([] if self.moves else self.step), *self.host]))

    @property
    def all_bytes(self) -> int:
        return sum(term.nbytes for term in self.all_terms)


def moments(
    models: Sequence[Model], sharding: Sharding, batch: MicroBatchSize, offload: OffloadConfig | None = None
) -> dict[str, RankEstimate]:
    """The estimates of one rank in the phases of training. Raises ValueError when a model's sizes do not divide over the ranks.

    Args:
        models: the actor first.

    Returns:
        By name: "ROLE", the micro-batches of a trained model; "ROLE optimizer step", if that moves state; "ROLE copy", when a
        model takes the actor's weights.
    """
    offload = offload or OffloadConfig()
    states = [state_of(model, sharding) for model in models]
    host = resting(states, offload)
    found = {}
    for model, working in zip(models, states, strict=True):
        if model.trained:
            device = on_device(states, [working], working, offload)
            found[model.role] = RankEstimate(device, step_terms(model, sharding, batch), host)
            if offload.optimizer:
                found[f"{model.role} optimizer step"] = RankEstimate(device, [step_term(working)], host, moves=True)
        if model.copies_actor:
            # A fixed reference is loaded from version 0, which exists only when every trained model has taken the weights.
            pairs = zip(models, states, strict=True)
            present = [state for each, state in pairs if each.trained or each.copies_actor or not model.trained]
            device = on_device(present, [states[0], working], None, offload)
            temporaries = copy_terms(models[0], model, sharding)
            found[f"{model.role} copy"] = RankEstimate(device, temporaries, resting(present, offload))
    return found


def stage_estimates(
    models: Sequence[Model],
    parallel: ParallelConfig,
    batch: MicroBatchSize,
    offload: OffloadConfig | None = None,
    together: bool = False,
) -> list[RankEstimate]:
    """The largest of the `moments` of one rank of each pipeline stage.

    Args:
        together: whether device and host are the same memory, so that the bytes of both count.

    Raises:
        ValueError: a model's sizes do not divide over the ranks.
    """
    every = [moments(models, sharding, batch, offload).values() for sharding in shardings(models[0].arch, parallel)]
    return [max(found, key=lambda moment: moment.all_bytes if together else moment.nbytes) for found in every]


def arena_term(parameters: int, dtype: str) -> Addend:
    """The shared memory of a machine's part of the policy's versions. parameters: those of the part."""
    width = WIDTHS[dtype]
    return Addend(
        "arena", ARENA_SLOTS * parameters * width, f"{ARENA_SLOTS} versions x {parameters:,} parameters x {width} bytes"
    )


def delta_term(parameters: int, dtype: str) -> Addend:
    """The deltas that a machine keeps of its part of the policy's versions. parameters: those of the part.

    Older ones are discarded beyond this size. The memory in which a delta is computed or combined is added for a short time.
    """
    width = WIDTHS[dtype]
    return Addend(
        "deltas", int(WHOLE_ABOVE * parameters * width), f"at most {WHOLE_ABOVE} x {parameters:,} parameters x {width} bytes"
    )


def replica_weights(arch: Architecture, dtype: str, tensor: int) -> int:
    """Bytes of the policy's weights on one device of a replica of `tensor` devices."""
    return -(-arch.parameters * WIDTHS[dtype] // tensor)


def cache_bytes_per_token(arch: Architecture, dtype: str, tensor: int) -> int:
    """Bytes of one token's keys and values on one device of a replica of `tensor` devices, all layers together.

    A head that several devices need is stored on each of them.
    """
    return 2 * arch.layers * max(1, arch.kv_heads // tensor) * arch.head_dim * WIDTHS[dtype]


def checkpoint_terms(
    models: Sequence[Model], followers: Collection[str], export_dtype: str, parallel: ParallelConfig
) -> list[Addend]:
    """The copies of the ranks of each machine. The ranks that write a model's tensors save them, and rank 0 exports the models.

    The machines divide the optimizer: each has the optimizer of its stages or, if all have the same stage, an equal share.

    Args:
        followers: the roles without an optimizer that a checkpoint contains.
        export_dtype: the dtype of the exported models.

    Raises:
        ValueError: the sizes do not divide over the ranks.
    """
    saved = [model for model in models if model.trained or model.role in followers]
    written = [written_parameters(model.adapter or model.arch, parallel) for model in saved]
    return [
        _machine_term(saved, [counts[machine] for counts in written], export_dtype if machine == 0 else None, parallel)
        for machine in range(parallel.nodes)
    ]


def _machine_term(saved: Sequence[Model], written: Sequence[int], export_dtype: str | None, parallel: ParallelConfig) -> Addend:
    parts, total = list[str](), 0
    for model, count in zip(saved, written, strict=True):
        if count:
            parts.append(f"{model.role} {count:,} parameters x {model.width} bytes")
            total += count * model.width
        if model.trained:
            optimizer = MOMENTS_BYTES + (MASTER_BYTES if model.width < MASTER_BYTES else 0)
            changed = count if parallel.pipeline > 1 else (model.adapter or model.arch).parameters
            machines = 1 if parallel.pipeline > 1 else parallel.nodes
            parts.append(
                f"{model.role} optimizer {changed:,} x {optimizer}" + (f" / {machines} machines" if machines > 1 else "")
            )
            total += -(-changed * optimizer // machines)
        if export_dtype is not None and model.role != "reference":
            exported, width = model.arch.parameters, WIDTHS[export_dtype]
            parts.append(f"{model.role} export {exported:,} x {width}")
            total += exported * width
    return Addend("checkpoint", total, " + ".join(parts))
