"""The balance of experts in an iteration, compared with plain torch: every trained sample counts, also one without an advantage."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from polyreme.config.model import ModelConfig
from polyreme.config.trainer import ParallelConfig, RunMoeConfig
from polyreme.experience.records import GroupRecord
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from support import learning
from support.configs import algorithm, run_config
from support.model_checks import file_tensors, hf_model
from support.models import tiny_family_model
from support.ranks import run_ranks
from support.router_checks import router_losses, routers_of

pytestmark = pytest.mark.real

AUX, Z, RATE = 0.4, 0.2, 0.01
SETTINGS = {"mixtral": RunMoeConfig(aux_loss_coef=AUX, z_loss_coef=Z), "glm4_moe": RunMoeConfig(bias_update_rate=RATE)}
"""Losses for experts without a bias, and an update of the biases alone."""


@pytest.mark.parametrize(("family", "data"), [("mixtral", 2), ("glm4_moe", 1)])
def test_samples_without_an_advantage_are_balanced_too(family: str, data: int, tmp_path: Path) -> None:
    """The scores of every third group are equal. Two iterations, with transformers' layers and torch's AdamW."""
    path, settings = tiny_family_model(family, tmp_path / "model"), SETTINGS[family]
    recorded = trained(tmp_path, path, settings, data)
    model, arch = hf_model(str(path)), load_architecture(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning.LR, eps=learning.EPS, weight_decay=0.0)
    for iteration, found in enumerate(recorded["trained"], start=1):
        loss, balancing, squares, counts = losses_of(model, arch, learning.made_up_groups(iteration, arch.vocab))
        optimizer.zero_grad()
        (loss + (settings.aux_loss_coef or 0.0) * balancing + settings.z_loss_coef * squares).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for router, count in zip(routers_of(model, arch), counts, strict=True):
            if settings.bias_update_rate:
                router.e_score_correction_bias.add_(RATE * (count.mean() - count).sign())
        assert found["moe/aux_loss"] == pytest.approx(balancing.item(), rel=1e-5)
        assert found["moe/z_loss"] == pytest.approx(squares.item(), rel=1e-5)
        assert found["trained_samples"] < 24
    expected, weights = file_tensors(model, dict(model.state_dict())), load_file(tmp_path / "balanced.safetensors")
    torch.testing.assert_close(weights, {name: expected[name] for name in weights}, rtol=0, atol=1e-5)


def trained(folder: Path, model: Path, settings: RunMoeConfig, data: int) -> dict[str, Any]:
    """The results of two iterations."""
    config = run_config(folder, model=ModelConfig(path=model))
    optimizer = config.trainer.optimizer.model_copy(update={"lr": learning.LR, "eps": learning.EPS})
    changes = {"parallel": ParallelConfig(data=data), "micro_batch_tokens": 128, "optimizer": optimizer, "moe": settings}
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})
    sections = json.dumps({"balanced": algorithm().model_dump(mode="json")})
    run_ranks(learning.train_every_way, data, config.model_dump_json(), sections, str(folder))
    results: dict[str, Any] = json.loads((folder / "balanced.json").read_text())
    return results


def losses_of(
    model: Any, arch: Architecture, groups: list[GroupRecord]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The policy's loss as in GRPO with the token mean, and the router losses over every token of every trained sample."""
    tokens = sum(int(sample.loss_mask.sum()) for group in groups for sample in group.samples)
    loss, logits = torch.zeros(()), [list[torch.Tensor]() for _ in range(arch.expert_layers)]
    for group in groups:
        scores = torch.tensor([sample.score for sample in group.samples])
        advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
        for sample, advantage in zip(group.samples, advantages, strict=True):
            if not sample.loss_mask.any():
                continue
            ids = torch.tensor([*group.prompt_ids, *sample.token_ids])[None].long()
            output = model(ids[:, :-1], output_router_logits=True)
            for layer, each in zip(logits, output.router_logits, strict=True):
                layer.append(each)
            response = F.log_softmax(output.logits[0], -1).gather(1, ids[0, 1:, None])[len(group.prompt_ids) - 1 :, 0]
            ratio = torch.exp(response - response.detach())
            loss = loss - (ratio * advantage * torch.from_numpy(sample.loss_mask.copy())).sum() / tokens
    return loss, *router_losses(model, arch, [torch.cat(layer) for layer in logits])
