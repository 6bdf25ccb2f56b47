"""Routing replay (Ma et al. 2025): the learner sends each sampled token to the experts that the replica chose for it.

The gradient goes through the weights of these experts, which the learner's router computes. Positions of a prompt, and those
before a token of the environment, have no reported experts; there the learner's router decides.

Invariant: every sampled token of an iteration has a valid route in every layer, or the iteration fails.
"""

import numpy as np

from polyreme.errors import DataError
from polyreme.experience.records import SampleRecord
from polyreme_trainer.algorithms.batch import TokenBatch, sequence_of
from polyreme_trainer.megatron.batches.batch import FloatArray, IntArray, Routes, Sequences
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.training.roles import AnyRole


def decode_routes(sample: SampleRecord, arch: Architecture) -> Routes:
    """The experts of a sample's tokens, uint8 or uint16 [tokens, expert layers, top_k]; with turns int16 or int32, -1 outside.

    Raises:
        DataError: a sampled token has no route that the model's routers can choose.
    """
    dtype = np.dtype("u1" if arch.experts <= 256 else "<u2")
    width = arch.expert_layers * arch.top_k * dtype.itemsize
    if sample.routes is None or sample.routes.shape[1] != width:
        raise DataError(
            f"{width} bytes of experts per token ({arch.expert_layers} layers x {arch.top_k} of {arch.experts} experts), "
            "for trainer.moe.replay_routes",
            "none" if sample.routes is None else f"{sample.routes.shape[1]} bytes",
            "Use an engine that reports its routes, or set trainer.moe.replay_routes to false.",
        )
    routes: Routes = np.ascontiguousarray(sample.routes).view(dtype).reshape(len(sample), arch.expert_layers, arch.top_k)
    sampled = np.zeros(len(sample), dtype=np.bool_)
    for _, start, end in sample.spans:
        sampled[start:end] = True
    ordered = np.sort(routes[sampled], axis=-1)
    if ordered.max() >= arch.experts or (ordered[..., 1:] == ordered[..., :-1]).any():
        raise DataError(
            f"{arch.top_k} different experts below {arch.experts} per token and layer",
            f"expert {ordered.max()} or one twice",
            "Report this as a bug of the inference engine.",
        )
    if sampled.all():
        return routes
    return np.where(sampled[:, None, None], routes.astype(np.promote_types(dtype, np.int8)), -1)


def mismatch(actor: AnyRole, sequences: Sequences, tokens: TokenBatch, indices: IntArray) -> dict[str, float]:
    """k3 of KL(sampling || learner) over the sampled tokens of `indices`, with replay and without. Collective.

    Args:
        indices: sequences that the actor's present weights sampled.
    """
    sampled = np.isin(sequence_of(sequences.offsets), indices) & (tokens.mask > 0)
    if not sampled.any():
        return {}

    def measure(replays: bool) -> float:
        before, actor.replays = actor.replays, replays
        try:
            log_ratios = _of(actor.forward(sequences, indices), sampled) - _of(tokens.behaviour, sampled)
        finally:
            actor.replays = before
        return float(np.mean(np.expm1(log_ratios) - log_ratios))

    return {"moe/mismatch_kl_replayed": measure(True), "moe/mismatch_kl_routed": measure(False)}


def _of(values: FloatArray, which: np.ndarray) -> np.ndarray:
    return values[which].astype(np.float64)
