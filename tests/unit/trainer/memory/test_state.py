"""Weights, gradients and optimizer state against published parameter counts, without allocating."""

import math
from dataclasses import replace

import pytest

from polyreme.config.trainer import LoraConfig, ParallelConfig
from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank
from polyreme_trainer.megatron.huggingface.lora_mapping import adapter_architecture
from polyreme_trainer.memory.sharding import Sharding, shardings
from polyreme_trainer.memory.state import Addend, Model, expert_parameters, rank_parameters, state_of
from support.configs import GLM4_MOE
from support.published import CONFIGS, PARAMETERS


def architecture(name: str) -> Architecture:
    return read_architecture(HfConfig(CONFIGS[name], name))


def terms_of(model: Model, sharding: Sharding) -> list[Addend]:
    state = state_of(model, sharding)
    return [*state.weights, *state.gradients, *state.optimizer]


def total(model: Model, sharding: Sharding) -> int:
    return sum(term.nbytes for term in terms_of(model, sharding))


@pytest.mark.parametrize(
    ("name", "dtype", "each"),
    [
        ("Qwen2.5-7B-Instruct", "float32", 16),
        ("Qwen2.5-7B-Instruct", "bfloat16", 18),
        ("Qwen2.5-32B", "bfloat16", 18),
        ("Qwen3-235B-A22B", "bfloat16", 18),
    ],
)
def test_a_trained_model_takes_the_published_bytes_of_each_published_parameter(name: str, dtype: str, each: int) -> None:
    arch = architecture(name)
    assert arch.parameters == PARAMETERS[name]
    assert total(Model("actor", arch, dtype, trained=True), Sharding()) == each * PARAMETERS[name]


def test_the_active_parameters_of_a_mixture_are_those_in_its_name() -> None:
    assert round(architecture("Qwen3-235B-A22B").active_parameters / 1e9) == 22


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_ranks_divide_every_matrix_and_repeat_the_norms(tensor: int) -> None:
    arch = architecture("Qwen2.5-32B")
    norms = (2 * arch.layers + 1) * arch.hidden
    each = rank_parameters(arch, Sharding(Rank(tp=tensor)))
    assert each == norms + (arch.parameters - norms) // tensor


def test_pipeline_and_expert_ranks_together_hold_every_parameter() -> None:
    arch = replace(architecture("Qwen3-235B-A22B"), layers=4)
    stages = [rank_parameters(arch, Sharding(Rank(pp_rank=stage, pp=2))) for stage in range(2)]
    assert sum(stages) == arch.parameters
    experts = (
        sum(math.prod(shape) for row in arch.family.expert for shape in arch.shapes(row).values()) * arch.experts * arch.layers
    )
    half = rank_parameters(arch, Sharding(Rank(ep=2)))
    assert half == arch.parameters - experts // 2


def test_a_frozen_model_is_its_weights_and_a_shared_optimizer_divides_only_its_state() -> None:
    arch = architecture("Qwen2.5-7B-Instruct")
    assert total(Model("reference", arch, "bfloat16", trained=False), Sharding()) == 2 * arch.parameters
    shared = total(Model("actor", arch, "bfloat16", trained=True), Sharding(optimizer_ranks=4))
    assert shared == (2 + 4 + 12 // 4) * arch.parameters


@pytest.mark.parametrize(("dtype", "weight", "each"), [("float32", 4, 16), ("bfloat16", 2, 18)])
def test_beside_adapters_a_parameter_is_its_weight_alone(dtype: str, weight: int, each: int) -> None:
    arch = architecture("Qwen2.5-7B-Instruct")
    adapter = adapter_architecture(arch, LoraConfig(rank=16))
    model = Model("actor", arch, dtype, trained=True, adapter=adapter)
    assert total(model, Sharding()) == weight * arch.parameters + each * 40_370_176
    two = total(model, Sharding(optimizer_ranks=2))
    assert total(model, Sharding()) - two == (each - weight - 4) // 2 * 40_370_176


def test_the_experts_of_a_rank_are_updated_by_the_ranks_that_have_the_same() -> None:
    arch = replace(architecture("Qwen3-235B-A22B"), layers=4)
    experts = (
        sum(math.prod(shape) for row in arch.family.expert for shape in arch.shapes(row).values()) * arch.experts * arch.layers
    )
    others = arch.parameters - experts
    (sharding,) = shardings(arch, ParallelConfig(data=8, expert=4))
    shared = total(Model("actor", arch, "bfloat16", trained=True), sharding)
    assert shared == (2 + 4) * (others + experts // 4) + 12 * others // 8 + 12 * (experts // 4) // 2
    (sharding,) = shardings(arch, ParallelConfig(data=8, expert=2, expert_tensor=2))
    assert total(Model("actor", arch, "bfloat16", trained=True), sharding) == shared


@pytest.mark.parametrize(("expert", "weights", "gradients", "optimizer"), [(1, 54.8, 109.5, 20.5), (16, 5.2, 10.4, 20.5)])
def test_the_table_in_the_guide_to_layouts(expert: int, weights: float, gradients: float, optimizer: float) -> None:
    arch = architecture("Qwen3-235B-A22B")
    sharding, _ = shardings(arch, ParallelConfig(tensor=4, pipeline=2, data=16, expert=expert))
    first, second, *rest = (term.nbytes / 2**30 for term in terms_of(Model("actor", arch, "bfloat16", trained=True), sharding))
    assert (first, second, sum(rest)) == pytest.approx((weights, gradients, optimizer), abs=0.05)
    experts = expert_parameters(arch, Sharding())
    assert round(experts / arch.parameters, 2) == 0.97


def test_expert_biases_are_float32_numbers_without_gradient_and_moments() -> None:
    arch = read_architecture(HfConfig(GLM4_MOE | {"vocab_size": 48}))  # without padding
    biases = 3 * 4
    assert total(Model("actor", arch, "bfloat16", trained=True), Sharding()) == 18 * (arch.parameters - biases) + 4 * biases
    assert total(Model("reference", arch, "float32", trained=False), Sharding()) == 4 * arch.parameters
    stages = [rank_parameters(arch, Sharding(Rank(pp_rank=stage, pp=2))) for stage in range(2)]
    assert sum(stages) == arch.parameters - biases
    assert stages[0] != stages[1]  # one of the first stage's two layers is dense


def test_beside_experts_every_rank_has_the_adapters_and_divides_their_state() -> None:
    arch = replace(architecture("Qwen3-235B-A22B"), layers=4)
    adapter = adapter_architecture(arch, LoraConfig(rank=16))
    (sharding,) = shardings(arch, ParallelConfig(data=8, expert=4))
    frozen = total(Model("actor", arch, "bfloat16", trained=False), sharding)
    found = total(Model("actor", arch, "bfloat16", trained=True, adapter=adapter), sharding)
    assert found == frozen + (2 + 4) * adapter.parameters + 12 * adapter.parameters // 8


def test_sizes_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match="heads = 28"):
        rank_parameters(architecture("Qwen2.5-7B-Instruct"), Sharding(Rank(tp=8)))
    with pytest.raises(ValueError, match="qwen2 has no experts"):
        rank_parameters(architecture("Qwen2.5-7B-Instruct"), Sharding(Rank(ep=2)))
    with pytest.raises(ValueError, match="qwen2 has no experts"):
        rank_parameters(architecture("Qwen2.5-7B-Instruct"), Sharding(Rank(etp=2)))
    with pytest.raises(ValueError, match="expert ffn = 1536"):
        rank_parameters(architecture("Qwen3-235B-A22B"), Sharding(Rank(etp=5)))
    with pytest.raises(ValueError, match="128 experts do not divide over 3"):
        rank_parameters(architecture("Qwen3-235B-A22B"), Sharding(Rank(ep=3)))
