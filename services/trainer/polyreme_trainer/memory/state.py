"""The memory that a model occupies between two steps: weights, gradients and optimizer state.

A trained model takes 16 bytes per parameter in float32 (weight, gradient, two moments, 4 each), and 18 in bfloat16 (weight 2,
gradient 4, master weight 4, two moments 8), as in Rajbhandari et al. 2020 (ZeRO), with gradients accumulated in float32.

Invariant: parameters are counted with their padding and on every rank that holds them, as `hf_mapping` places them.
"""

import math
from dataclasses import dataclass

from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import check, is_expert, is_expert_bias, param_shapes
from polyreme_trainer.memory.sharding import Sharding

WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes per number, by the name of its type in the configuration."""
GRADIENT_BYTES = 4  # also of a bfloat16 weight: gradients are summed in float32
MOMENTS_BYTES = 8
MASTER_BYTES = 4  # for a weight that is not float32 itself


@dataclass(frozen=True)
class Model:
    """A model that the learner holds.

    Attributes:
        role: its name.
        dtype: "float32" or "bfloat16".
        trained: whether it has gradients and an optimizer.
        adapter: the table of its adapters, which are then the only trained parameters; None without adapters.
        copies_actor: whether it takes the actor's weights, at the start or between two iterations.
    """

    role: str
    arch: Architecture
    dtype: str
    trained: bool
    adapter: Architecture | None = None
    copies_actor: bool = False

    @property
    def width(self) -> int:
        """Bytes per weight and per activation."""
        return WIDTHS[self.dtype]


@dataclass(frozen=True)
class Addend:
    """One addend of the estimate: its bytes, and their computation as text."""

    name: str
    nbytes: int
    arithmetic: str


def rank_parameters(arch: Architecture, sharding: Sharding) -> int:
    """The parameters on one rank, with padding, without expert biases. Raises ValueError unless the sizes divide over ranks."""
    check(arch, sharding.rank.tp, sharding.rank.expert_cut.tp)
    return sum(math.prod(shape) for name, shape in param_shapes(arch, sharding.rank).items() if not is_expert_bias(name))


def expert_biases(arch: Architecture, sharding: Sharding) -> int:
    """The number of expert biases on one rank. They are float32, and have neither gradients nor moments."""
    return sum(math.prod(shape) for name, shape in param_shapes(arch, sharding.rank).items() if is_expert_bias(name))


def expert_parameters(arch: Architecture, sharding: Sharding) -> int:
    """The number of parameters of the rank's experts, which only `expert_optimizer_ranks` ranks share."""
    return sum(math.prod(shape) for name, shape in param_shapes(arch, sharding.rank).items() if is_expert(name))


@dataclass(frozen=True)
class ModelState:
    """One rank's part of a model, in bytes.

    Attributes:
        weights: the weights, including adapters.
        gradients, optimizer: empty for a frozen model.
        largest: bytes of the optimizer's state of the largest parameter.
    """

    role: str
    weights: tuple[Addend, ...]
    gradients: tuple[Addend, ...] = ()
    optimizer: tuple[Addend, ...] = ()
    largest: int = 0


def state_of(model: Model, sharding: Sharding) -> ModelState:
    """Weights, gradients and optimizer state of one rank. Raises ValueError when the sizes do not divide over the ranks."""
    count = rank_parameters(model.arch, sharding)
    weights = [Addend(f"{model.role} weights", count * model.width, f"{count:,} parameters x {model.width} bytes")]
    if biases := expert_biases(model.arch, sharding):
        weights.append(
            Addend(f"{model.role} expert biases", biases * WIDTHS["float32"], f"{biases:,} x {WIDTHS['float32']} bytes")
        )
    changed = model.adapter or model.arch
    if model.adapter is not None:
        count = rank_parameters(changed, sharding)
        weights.append(Addend(f"{model.role} adapters", count * model.width, f"{count:,} parameters x {model.width} bytes"))
    if not model.trained:
        return ModelState(model.role, tuple(weights))
    gradients = Addend(
        f"{model.role} gradients", count * GRADIENT_BYTES, f"{count:,} parameters x {GRADIENT_BYTES} bytes (float32)"
    )
    master = MASTER_BYTES if model.width < MASTER_BYTES else 0
    each, parts = MOMENTS_BYTES + master, "two moments" + (", master weight" if master else "")
    experts = expert_parameters(changed, sharding) if sharding.expert_optimizer_ranks != sharding.optimizer_ranks else 0
    optimizer = []
    for name, part, ranks in (
        ("optimizer", count - experts, sharding.optimizer_ranks),
        ("expert optimizer", experts, sharding.expert_optimizer_ranks),
    ):
        if part:
            divided = f" / {ranks} ranks" if ranks > 1 else ""
            arithmetic = f"{part:,} parameters x {each} bytes ({parts}){divided}"
            optimizer.append(Addend(f"{model.role} {name}", -(-part * each // ranks), arithmetic))
    widest = max(math.prod(shape) for shape in param_shapes(changed, sharding.rank).values())
    largest = min(widest * each, sum(term.nbytes for term in optimizer))
    return ModelState(model.role, tuple(weights), (gradients,), tuple(optimizer), largest)


def copy_terms(actor: Model, copy: Model, sharding: Sharding) -> list[Addend]:
    """Temporaries of copying an actor's weights: one parameter at a time, in float32 for a wider copy, with its adapter added."""
    sizes = {name: math.prod(shape) for name, shape in param_shapes(actor.arch, sharding.rank).items()}
    terms = []
    if actor.adapter is not None:
        widest = max(size for name, size in sizes.items() if name.startswith("decoder.layers.") and not is_expert(name))
        each = 2 * WIDTHS["float32"] + actor.width  # the weight and the sum in float32, and the sum of another layer
        terms.append(Addend("actor merged layer", widest * each, f"{widest:,} parameters x {each} bytes"))
    if copy.width > actor.width:
        widest = max(sizes.values())
        terms.append(Addend(f"{copy.role} newest weight", widest * copy.width, f"{widest:,} parameters x {copy.width} bytes"))
    return terms
