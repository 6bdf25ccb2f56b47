"""The options of megatron-core for layers with experts: no own loss, no dropped tokens, sequence parallelism over tensor ranks. Also the
expert bias as a number of its own dtype."""

import torch

from polyreme_trainer.megatron.experts import moe
from polyreme_trainer.megatron.experts.routing import updated_bias
from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank
from polyreme_trainer.megatron.layers.cpu.spec import CPU
from polyreme_trainer.megatron.models.build import transformer_config
from polyreme_trainer.megatron.models.model import tensor_specs
from support.configs import GLM4_MOE, MIXTRAL


def test_the_policy_that_is_trained_is_the_one_that_sampled() -> None:
    """A capacity or jitter would give it other experts. The losses on the router are `routing`'s, not megatron-core's."""
    config = transformer_config(read_architecture(HfConfig(MIXTRAL)), torch.float32, Rank(), CPU)
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (4, 2, 8)
    assert config.moe_router_load_balancing_type == "none" and config.moe_aux_loss_coeff == 0
    assert config.moe_expert_capacity_factor is None and config.moe_input_jitter_eps is None
    assert config.moe_z_loss_coeff is None and not config.moe_router_enable_expert_bias
    assert config.moe_router_dtype == "fp32" and not config.moe_router_pre_softmax


def test_layers_with_an_expert_bias_have_no_second_one_of_megatron() -> None:
    arch = read_architecture(HfConfig(GLM4_MOE | {"routed_scaling_factor": 2.5}))
    config = transformer_config(arch, torch.float32, Rank(), CPU)
    assert config.moe_router_score_function == "sigmoid" and not config.moe_router_enable_expert_bias
    assert config.moe_layer_freq == [0, 1, 1, 1] and config.moe_router_topk_scaling_factor == 2.5
    assert config.moe_shared_expert_intermediate_size == 6 and not config.moe_shared_expert_gate


def test_an_expert_bias_is_float32_in_a_version_of_any_dtype() -> None:
    specs = tensor_specs(read_architecture(HfConfig(GLM4_MOE)), "bfloat16")
    assert [spec.name for spec in specs if spec.dtype == "F32"] == [
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)
    ]
    assert {spec.dtype for spec in specs} == {"F32", "BF16"}
    assert {spec.dtype for spec in tensor_specs(read_architecture(HfConfig(MIXTRAL)), "bfloat16")} == {"BF16"}


def test_the_bias_of_an_expert_that_few_tokens_chose_grows() -> None:
    bias, choices = torch.tensor([0.5, 0.5, -1.0, 0.0]), torch.tensor([0, 8, 3, 1], dtype=torch.float64)
    assert torch.equal(updated_bias(bias, choices, 0.25), torch.tensor([0.75, 0.25, -1.0, 0.25]))
    assert torch.equal(updated_bias(bias, torch.zeros(4, dtype=torch.float64), 0.25), bias)  # a step without tokens


def test_sequence_parallelism_comes_with_experts_over_several_tensor_ranks() -> None:
    experts = read_architecture(HfConfig(MIXTRAL))
    dense = read_architecture(HfConfig(MIXTRAL | {"model_type": "llama"}))
    assert moe.options(experts, Rank(tp=2))["sequence_parallel"] and not moe.options(experts, Rank())["sequence_parallel"]
    assert moe.options(dense, Rank(tp=2)) == {}
