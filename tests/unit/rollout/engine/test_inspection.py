"""The names of a vLLM model's tensors, with experts as the supported releases of vLLM hold them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from polyreme_rollout.engine.inspection import hf_names

MAPPING = [(f"experts.w{13 if name != 'down_proj' else 2}_", f"experts.{number}.{name}.", number, name)
           for number in range(2) for name in ("gate_proj", "down_proj", "up_proj")]  # fmt: skip
"""As vLLM's: (parameter, part of the Hugging Face name, expert, kind)."""


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight, self.w2_weight = (nn.Parameter(torch.zeros(2, 2)) for _ in range(2))


class MappedExperts(Experts):
    def get_expert_mapping(self) -> list[Any]:
        return MAPPING


class Model(nn.Module):
    """One block with experts and a fused projection, and a tied head."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012
    config = SimpleNamespace(tie_word_embeddings=True)

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.mlp, self.attn, self.lm_head = nn.Module(), nn.Module(), nn.Linear(2, 2, bias=False)
        self.attn.qkv_proj = nn.Linear(2, 2, bias=False)
        self.mlp.experts = experts


class MappedModel(Model):
    def get_expert_mapping(self) -> list[Any]:
        return MAPPING


@pytest.mark.parametrize("model", [Model(MappedExperts()), MappedModel(Experts())], ids=["vllm 0.32", "vllm 0.23"])
def test_names_of_experts_come_from_the_layer_or_from_the_model(model: Model) -> None:
    experts = {f"mlp.experts.{number}.{name}.weight" for number in range(2) for name in ("gate_proj", "up_proj", "down_proj")}
    assert hf_names(model) == experts | {f"attn.{name}_proj.weight" for name in "qkv"}
