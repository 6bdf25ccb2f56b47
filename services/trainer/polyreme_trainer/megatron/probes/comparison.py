"""Computes the numbers of the start gates: it compares the learner, the Hugging Face model and the replicas' answers.

Invariant: only one answer's logits exist at a time, because logits of many answers over a real vocabulary take gigabytes.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyreme.process.quick_imports import quick_imports
from polyreme_trainer.algorithms.kl import estimate
from polyreme_trainer.learner.gates import Answer, Gate, GateLimits


def probe_ids(vocab: int, length: int, seed: int) -> Tensor:
    """Random tokens, int64 [4, length]."""
    return torch.from_numpy(np.random.default_rng([seed, 0x9A7E]).integers(0, vocab, (4, length)))


def load_hf(path: Path, dtype: str) -> torch.nn.Module:
    """The Hugging Face model of a directory, on the CPU, in evaluation mode."""
    return _load("AutoModelForCausalLM", path, dtype)


def load_hf_critic(path: Path, dtype: str) -> torch.nn.Module:
    """The Hugging Face sequence classifier of a directory, on the CPU, in evaluation mode."""
    return _load("AutoModelForSequenceClassification", path, dtype)


def _load(kind: str, path: Path, dtype: str) -> torch.nn.Module:
    with quick_imports():  # it imports half of transformers
        transformers = import_module("transformers")
        import_module("transformers.utils.logging").disable_progress_bar()
        load = getattr(transformers, kind).from_pretrained
        model: torch.nn.Module = load(path, dtype=getattr(torch, dtype), local_files_only=True)
    return model.requires_grad_(False).eval()


def logits_gate(learner: Tensor, model: torch.nn.Module, ids: Tensor, limits: GateLimits) -> Gate:
    """Compares the learner's logits [b, s, vocab] of `ids` [b, s] with the Hugging Face model's."""
    with torch.no_grad():
        difference = (model(input_ids=ids).logits.float() - learner.cpu()).abs().max()
    return Gate(
        "largest logit difference between learner and Hugging Face model",
        float(difference),
        limits.logits,
        "Report it with the model's config.json: the trainer and transformers compute different functions.",
    )


def values_gate(learner: Tensor, model: Any, ids: Tensor, limits: GateLimits) -> Gate:
    """Compares the critic's values [b, s] of `ids` [b, s] with those of the Hugging Face classifier at every position."""
    with torch.no_grad():
        values = model.score(model.base_model(input_ids=ids).last_hidden_state)[..., 0].float()
        difference = (values - learner.cpu()).abs().max()
    return Gate(
        "largest value difference between the learner's critic and the Hugging Face model",
        float(difference),
        limits.logits,
        "Report it with the critic's config.json: the trainer and transformers compute different functions.",
    )


def greedy_gate(model: torch.nn.Module, answers: Sequence[Answer], limits: GateLimits) -> Gate:
    """Checks replicas' greedy answers with the Hugging Face model of the same weights.

    One forward pass over prompt and answer shows for every token whether the model would have chosen the same one. The limit
    allows for near ties, which rounding decides.
    """
    gaps = []
    for answer in answers:
        ids, response = (
            torch.from_numpy(np.concatenate([answer.prompt, answer.response])),
            torch.from_numpy(answer.response.copy()),
        )
        with torch.no_grad():
            logits = model(input_ids=ids[None, :-1], logits_to_keep=len(response)).logits[0].float()
        gaps.append((logits.amax(-1) - logits.gather(1, response[:, None])[:, 0]).max())
    return Gate(
        "log-probability by which the Hugging Face model prefers another token to a replica's greedy one",
        float(torch.stack(gaps).max()),
        limits.greedy,
        "Check the replica's model, dtype and engine version: it serves different weights, "
        "or its engine computes another function.",
    )


def replica_gate(learner: Tensor, answers: Sequence[Answer], limits: GateLimits) -> Gate:
    """Compares the learner's log-probabilities of the sampled tokens, float32 [k], answer by answer, with the replica's."""
    behaviour = torch.from_numpy(np.concatenate([answer.logprobs for answer in answers]))
    return Gate(
        "mismatch_kl per token between learner and replica",
        float(estimate("k3", behaviour, learner.cpu()).mean()),
        limits.mismatch_kl,
        "Check that trainer and replica use the same dtype and temperature, "
        "and that the replica's logprobs are processed_logprobs.",
    )
