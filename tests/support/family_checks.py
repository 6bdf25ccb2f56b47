"""Runs in the ranks of test_model_parity for every family: compares both specs, the critic, entropies and chunks with transformers."""

import math
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from polyreme_trainer.megatron import mcore
from polyreme_trainer.megatron.batches.batch import IGNORE
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.layers import logprobs
from polyreme_trainer.megatron.layers.accelerator import CUDA
from polyreme_trainer.megatron.models.critic import build_critic
from polyreme_trainer.megatron.models.policy import Policy
from support import model_checks, router_checks
from support.model_checks import TOLERANCE, batch, hf_model, policy_of


def every_family(folder: str, tensor: str) -> None:
    """Runs every check on each model in the folder; for directories named untied, only the checks that depend on the head."""
    device = model_checks.start(tensor)
    for model in sorted(Path(folder).iterdir()):
        print(f"checking {model.name}", flush=True)
        if model.name.endswith("-untied"):
            model_checks.logits_and_logprobs_agree(str(model), device)
            model_checks.slices_fill_shared_views(str(model), device, str(model))
        else:
            family_agrees(str(model), device, str(model))


def family_agrees(model: str, device: Device, folder: str) -> None:
    model_checks.logits_and_logprobs_agree(model, device)
    model_checks.training_agrees_with_plain_torch(model, device)
    model_checks.slices_fill_shared_views(model, device, folder)
    model_checks.export_loads_in_transformers(model, device, folder)
    entropies_agree_also_in_blocks(model, device)
    both_specs_agree(model, device)
    arch = load_architecture(Path(model))
    if arch.family.classifier:
        critic_agrees(model, device, folder)
    if arch.experts:
        router_checks.balance_agrees(model, device)
        router_checks.replay_agrees(model, device)


def positions_agree(folder: str) -> None:
    """Compares logits over the whole context, for models with other rotary embeddings or a sliding window."""
    device = model_checks.start("1")
    for model in sorted(Path(folder).iterdir()):
        whole_context_agrees(str(model), device)


def whole_context_agrees(model: str, device: Device) -> None:
    actor, reference = policy_of(model, device), hf_model(model)
    ids, _ = batch(actor.arch.vocab, rows=2, width=actor.arch.max_position)
    with torch.no_grad():
        expected = reference(ids).logits
    torch.testing.assert_close(actor.logits(ids)[ids > 0], expected[ids > 0], rtol=0, atol=1e-4)
    both_specs_agree(model, device)


def entropies_agree_also_in_blocks(model: str, device: Device) -> None:
    """Compares log-probabilities, entropies and their gradients of packed sequences, computed in one and in several blocks of the
    vocabulary."""
    reference = hf_model(model)
    ids, targets = batch(reference.config.vocab_size)
    wanted = targets != IGNORE
    weight = torch.linspace(-1, 1, int(wanted.sum()))
    distribution = torch.distributions.Categorical(logits=reference(ids).logits / 0.7)
    want = [distribution.log_prob(targets.clamp(min=0))[wanted], distribution.entropy()[wanted]]
    _objective(want, weight).backward()
    whole = logprobs.BLOCK_LOGITS
    try:
        for limit in (whole, 300):
            logprobs.BLOCK_LOGITS = limit
            actor = policy_of(model, device)
            got = actor.logprobs_and_entropies(*model_checks.packed(ids, targets), 0.7)
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
            _objective(got, weight).backward()
            _gradients_agree(actor, reference)
    finally:
        logprobs.BLOCK_LOGITS = whole


def _objective(results: list[Tensor] | Tensor, weight: Tensor) -> Tensor:
    logprobs, entropies = results
    return (logprobs * weight).sum() + (entropies * weight.flip(0)).sum()


def _gradients_agree(actor: Policy, reference: torch.nn.Module) -> None:
    """Compares the gradients of every parameter that tensor ranks divide. Replicated ones are summed later; `training_agrees` compares
    them."""
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    expected = model_checks.file_tensors(reference, gradients)
    assert actor.ddp
    for row, _ in hf_mapping.stage_rows(actor.arch, actor.rank):
        if row.share == "all":
            continue
        gradient = dict(actor.module.named_parameters())[row.param].main_grad
        for piece in actor.slices:
            if piece.param == row.param:
                want = expected[piece.hf_name][piece.hf_index]
                torch.testing.assert_close(gradient[piece.param_index], want, rtol=1e-4, atol=1e-4)


def both_specs_agree(model: str, device: Device) -> None:
    """megatron-core's own layers on the CPU give the same logits, log-probabilities and gradients as this package's."""
    ours = policy_of(model, device)
    theirs = Policy(load_architecture(Path(model)), "float32", device, trainable=True, spec=CUDA)
    theirs.load_hf(Path(model))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ids, targets = batch(ours.arch.vocab)
    with device.megatron():
        torch.testing.assert_close(ours.logits(ids)[ids > 0], theirs.logits(ids)[ids > 0], rtol=0, atol=1e-4)
        for actor in (ours, theirs):
            actor.logprobs(*model_checks.packed(ids, targets), 0.9).sum().backward()
            mcore.finalize_model_grads(actor.ddp)
    for (name, one), (_, other) in zip(ours.module.named_parameters(), theirs.module.named_parameters(), strict=True):
        torch.testing.assert_close(one.main_grad, other.main_grad, rtol=1e-4, atol=1e-4, msg=partial("{}: {}".format, name))


def critic_agrees(model: str, device: Device, folder: str) -> None:
    """Values and the head's gradient equal those of transformers; a language model's critic starts at zero; weights survive a round
    trip."""
    from transformers import AutoModelForSequenceClassification

    path = Path(folder) / "classifier"
    if torch.distributed.get_rank() == 0:
        torch.manual_seed(3)
        AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32).save_pretrained(path)
    torch.distributed.barrier()
    reference = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    critic = build_critic(path, "float32", device)
    ids, _ = batch(critic.arch.vocab)
    real = ids > 0
    want = reference.score(reference.model(ids).last_hidden_state).squeeze(-1)
    got = critic.values(ids)
    assert got.dtype == torch.float32 and not math.isclose(float(got.detach().std()), 0)
    torch.testing.assert_close(got[real], want[real], rtol=0, atol=1e-4)
    (want * real).square().sum().backward()
    (got * real).square().sum().backward()
    head = critic.module.output_layer.weight.main_grad
    torch.testing.assert_close(head, reference.score.weight.grad, rtol=1e-4, atol=1e-4)
    full = critic.full_tensors()
    if full is not None:
        saved = load_file(path / "model.safetensors")
        assert full.keys() == saved.keys()
        assert all(torch.equal(full[name], saved[name]) for name in saved)
    fractions = list[float]()
    fresh = build_critic(Path(model), "float32", device, trainable=False, loaded=fractions.append)
    assert fractions[-1] == 1
    assert not fresh.values(ids).any()
