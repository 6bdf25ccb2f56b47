"""Runs in the ranks of test_model_parity for every family with experts: compares balanced and replayed routers with transformers'
layers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from metric_rows import ROUTING
from torch import Tensor
from torch.testing import assert_close
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from polyreme.config.trainer import MoeConfig, Recompute
from polyreme_trainer.algorithms.metrics import combine, finish
from polyreme_trainer.megatron.batches.batch import Sequences, supervised
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import is_expert_bias
from polyreme_trainer.megatron.mcore import parallel_state
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.parallel.shard import DataShard
from polyreme_trainer.megatron.training.optimizer import Adam
from polyreme_trainer.megatron.training.roles import LossTerm, Role
from support.model_checks import file_tensors, hf_model

LENGTHS = (9, 4, 12, 6)
PROMPT = 2
"""Number of tokens at the start of each row that the model's routers route."""
RATE = 0.01
"""Change of the expert biases in a step."""
RECOMPUTE: tuple[Recompute | None, ...] = (None, "full", "selective")


def make_rows(vocab: int) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.integers(1, vocab, length) for length in LENGTHS]


def make_role(model: str, device: Device, recompute: Recompute | None, moe: MoeConfig | None = None) -> Role[Policy]:
    """A role without clipping, whose micro-batches have at most 24 tokens."""
    policy = Policy(load_architecture(Path(model)), "float32", device, trainable=True, recompute=recompute, moe=moe)
    policy.load_hf(Path(model))
    role = Role("actor", policy, lambda batch: policy.logprobs(batch.ids, batch.targets), DataShard(device.torch, 24))
    role.make_optimizer(Adam(clip_grad=0))
    return role


def idle_step(role: Role[Policy], sequences: Sequences) -> None:
    """An optimizer step on the summed negative log-likelihood. The learning rate is 0, so the weights do not change."""
    role.forward_backward(LossTerm(sequences, np.arange(len(sequences)), lambda batch, output: (-output.sum(), {})))
    role.optim_step(0.0)


def check_step(role: Role[Policy], device: Device, sequences: Sequences, expected: Mapping[str, Tensor]) -> None:
    """Checks the gradients of the summed negative log-likelihood."""
    with device.megatron():
        idle_step(role, sequences)
    params = dict(role.model.module.named_parameters())
    for piece in role.model.slices:
        if is_expert_bias(piece.param):
            continue
        mine = params[piece.param].main_grad[piece.param_index]
        assert_close(mine, expected[piece.hf_name][piece.hf_index], rtol=1e-4, atol=1e-4, msg=str(piece))


def balance_agrees(model: str, device: Device) -> None:
    """Compares gradients and metrics of a step with both router losses, in several micro-batches, with plain torch on transformers' router
    logits. For a single layer, the balancing loss is that of transformers."""
    arch, aux_coef, z_coef = load_architecture(Path(model)), 0.4, 0.2
    rows = make_rows(arch.vocab)
    sequences = supervised(rows, [np.ones(len(row), np.uint8) for row in rows])
    reference, total, tokens = hf_model(model), torch.zeros(()), len(sequences.mask)
    logits: list[list[Tensor]] = [[] for _ in range(arch.expert_layers)]
    for row in rows:
        output = reference(torch.from_numpy(row[None, :-1]), output_router_logits=True)
        total = total + negative_log_likelihood(output.logits, row)
        for layer, each in zip(logits, output.router_logits, strict=True):
            layer.append(each)
    whole = [torch.cat(layer) for layer in logits]
    assert all(len(layer) == tokens for layer in whole)
    balancing, squares, counts = router_losses(reference, arch, whole)
    biases = dict[str, Tensor]()
    if arch.family.scores == "softmax":
        theirs = [torch.as_tensor(load_balancing_loss_func((layer,), arch.experts, arch.top_k)) for layer in whole]
        assert_close(balancing, torch.stack(theirs).mean())
    else:
        for router, count in zip(routers_of(reference, arch), counts, strict=True):
            name = f"model.layers.{arch.dense_layers + len(biases)}.mlp.gate.e_score_correction_bias"
            biases[name] = updated_by_megatron(count, router.e_score_correction_bias)
    (total + aux_coef * balancing + z_coef * squares).backward()
    expected = file_gradients(reference)
    for recompute in RECOMPUTE:
        settings = MoeConfig(aux_loss_coef=aux_coef, z_loss_coef=z_coef, bias_update_rate=RATE if biases else 0.0)
        role = make_role(model, device, recompute, settings)
        check_step(role, device, sequences, expected)
        check_biases(role, biases)
        found = finish(combine([role.routing_metrics]))
        assert set(found) == {metric.name for metric in ROUTING}
        assert math.isclose(found["moe/aux_loss"], balancing.item(), rel_tol=1e-4)
        assert math.isclose(found["moe/z_loss"], squares.item(), rel_tol=1e-4)
    for recompute in RECOMPUTE if biases else ():  # without a loss, the choices are counted while the step trains
        role = make_role(model, device, recompute, MoeConfig(bias_update_rate=RATE))
        with device.megatron():
            idle_step(role, sequences)
        check_biases(role, biases)


def router_losses(reference: Any, arch: Architecture, logits: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Balancing loss and z-loss, each the mean over the layers, and the choices of every expert in each layer, in plain torch.

    Args:
        logits: for each layer the router logits of all tokens, [tokens, experts].
    """
    balancing, squares, counts = torch.zeros(()), torch.zeros(()), []
    for router, layer in zip(routers_of(reference, arch), logits, strict=True):
        chosen, shares = layer.topk(arch.top_k).indices, layer.softmax(-1)
        if arch.family.scores == "sigmoid":
            chosen = (layer.sigmoid() + router.e_score_correction_bias).topk(arch.top_k).indices
            shares = layer.sigmoid() / layer.sigmoid().sum(-1, keepdim=True)
        counts.append(torch.nn.functional.one_hot(chosen, arch.experts).float().sum((0, 1)))
        balancing = balancing + arch.experts * (counts[-1] / len(layer) * shares.mean(0)).sum() / len(logits)
        squares = squares + layer.logsumexp(-1).square().mean() / len(logits)
    return balancing, squares, counts


def updated_by_megatron(counts: Tensor, bias: Tensor) -> Tensor:
    """The expert bias after a step with these choices. megatron-core sums the choices over the tensor and data ranks."""
    ranks = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True).size()
    return get_updated_expert_bias(counts / ranks, bias, RATE)


def check_biases(role: Role[Policy], expected: Mapping[str, Tensor]) -> None:
    """Compares this rank's expert biases, bit by bit."""
    weights = role.model.weights()
    found = {piece.hf_name: weights[piece.param] for piece in role.model.slices if is_expert_bias(piece.param)}
    assert found.keys() == expected.keys()
    for name, bias in expected.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], bias), name


def routers_of(reference: Any, arch: Architecture) -> list[Any]:
    """transformers' routers, layer by layer."""
    routers = [module for module in reference.modules() if type(module).__name__.lower().endswith("topkrouter")]
    assert len(routers) == arch.expert_layers
    return routers


def replay_agrees(model: str, device: Device) -> None:
    """Loss and gradient with given experts are those of transformers' layers with the same experts. Replaying the routers' own experts
    changes
    nothing."""
    arch, random = load_architecture(Path(model)), np.random.default_rng(4)
    rows = make_rows(arch.vocab)
    shapes = [(len(row) - PROMPT, arch.expert_layers, arch.experts) for row in rows]
    others = [random.random(shape).argsort(-1)[..., : arch.top_k].astype(np.uint8) for shape in shapes]
    own, other = with_experts(model, rows, None), with_experts(model, rows, others)
    assert abs(other.loss - own.loss) > 1e-3
    theirs = [np.stack(each, axis=1)[PROMPT - 1 :].astype(np.uint8) for each in own.chosen]
    plain = supervised(rows, [np.ones(len(row), np.uint8) for row in rows])
    for recompute in RECOMPUTE[:2]:
        for routes, expected in ((None, own), (theirs, own), (others, other)):
            role = make_role(model, device, recompute)
            role.replays = routes is not None
            sequences = Sequences(plain.ids, plain.mask, routes=routes)
            loss = -float(role.forward(sequences, np.arange(len(rows))).sum())
            assert math.isclose(loss, expected.loss, rel_tol=1e-5)
            check_step(role, device, sequences, expected.gradients)


@dataclass(frozen=True)
class Forced:
    """The results of transformers: summed negative log-likelihood, its gradients, and the experts of each row and layer [tokens, top_k]."""

    loss: float
    gradients: Mapping[str, Tensor]
    chosen: list[list[np.ndarray]]


def with_experts(model: str, rows: list[np.ndarray], given: list[np.ndarray] | None) -> Forced:
    """Runs transformers' model with the experts `given` at the last positions of each row."""
    reference, chosen, total = hf_model(model), list[list[np.ndarray]](), torch.zeros(())
    arch = load_architecture(Path(model))

    def place(router: Any, inputs: Any, output: Any) -> Any:
        logits, _, experts = output
        if given is not None:
            forced = torch.from_numpy(given[len(chosen) - 1][:, len(chosen[-1])].astype(np.int64))
            experts = torch.cat([experts[: len(experts) - len(forced)], forced])
        chosen[-1].append(experts.numpy())
        weights = (logits.sigmoid() if arch.family.scores == "sigmoid" else logits.softmax(-1)).gather(1, experts)
        weights = weights / weights.sum(-1, keepdim=True) if arch.renormalizes else weights
        return logits, weights * arch.routed_scale, experts

    for router in routers_of(reference, arch):
        router.register_forward_hook(place)
    for row in rows:
        chosen.append([])
        total = total + negative_log_likelihood(reference(torch.from_numpy(row[None, :-1])).logits, row)
    total.backward()
    return Forced(total.item(), file_gradients(reference), chosen)


def negative_log_likelihood(logits: Tensor, row: np.ndarray) -> Tensor:
    """The sum over all tokens of a row except the first."""
    return -logits.log_softmax(-1)[0, range(len(row) - 1), row[1:]].sum()


def file_gradients(model: Any) -> dict[str, Tensor]:
    """The gradients by the names of the model's files."""
    return file_tensors(model, {name: each.grad for name, each in model.named_parameters() if each.grad is not None})
