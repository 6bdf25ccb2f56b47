"""The options of megatron-core for layers with experts: no own loss, no dropped tokens, sequence parallelism over tensor ranks."""

import torch

from polyreme_trainer.megatron import moe
from polyreme_trainer.megatron.build import transformer_config
from polyreme_trainer.megatron.cpu.spec import CPU
from polyreme_trainer.megatron.families import read_architecture
from polyreme_trainer.megatron.families.hf_config import HfConfig
from polyreme_trainer.megatron.hf_mapping import Rank
from support.configs import MIXTRAL


def test_the_policy_that_is_trained_is_the_one_that_sampled() -> None:
    """A capacity or jitter would give it other experts. The losses on the router are `routing`'s, not megatron-core's."""
    config = transformer_config(read_architecture(HfConfig(MIXTRAL)), torch.float32, Rank(), CPU)
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (4, 2, 8)
    assert config.moe_router_load_balancing_type == "none" and config.moe_aux_loss_coeff == 0
    assert config.moe_expert_capacity_factor is None and config.moe_input_jitter_eps is None
    assert config.moe_z_loss_coeff is None and not config.moe_router_enable_expert_bias
    assert config.moe_router_dtype == "fp32" and not config.moe_router_pre_softmax


def test_sequence_parallelism_comes_with_experts_over_several_tensor_ranks() -> None:
    experts = read_architecture(HfConfig(MIXTRAL))
    dense = read_architecture(HfConfig(MIXTRAL | {"model_type": "llama"}))
    assert moe.options(experts, Rank(tp=2))["sequence_parallel"] and not moe.options(experts, Rank())["sequence_parallel"]
    assert moe.options(dense, Rank(tp=2)) == {}
