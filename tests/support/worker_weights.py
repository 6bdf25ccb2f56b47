"""The weights that a vLLM worker must hold after a push of Hugging Face tensors, by vLLM's names."""

from collections.abc import Callable

import numpy as np
import xxhash


def digest(array: np.ndarray) -> tuple[tuple[int, ...], int]:
    return array.shape, xxhash.xxh3_64_intdigest(np.ascontiguousarray(array + np.float32(0)).data)


def rank_weights(weights: dict[str, np.ndarray], tied: bool, rank: int, parallel: int) -> dict[str, np.ndarray]:
    """The weights of a tensor-parallel rank from the Hugging Face tensors, by vLLM's names."""

    def part(name: str, axis: int) -> np.ndarray:
        return np.split(weights[name], parallel, axis)[rank]

    padded = -(-weights["model.embed_tokens.weight"].shape[0] // 64) * 64
    rows = slice(rank * padded // parallel, (rank + 1) * padded // parallel)
    found: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        if ".experts." in name:
            continue
        prefix, _, leaf = name.rpartition("self_attn.") if "self_attn" in name else name.rpartition("mlp.")
        if leaf.startswith(("shared_expert.", "shared_experts.")):
            block, leaf = leaf.split(".", 1)
            prefix = f"{prefix}mlp.{block}."
        elif leaf:
            prefix += "" if "self_attn" in name else "mlp."
        if leaf.startswith("q_proj."):
            suffix = leaf.removeprefix("q_proj.")
            names = [f"{prefix}self_attn.{x}_proj.{suffix}" for x in "qkv"]
            found[f"{prefix}self_attn.qkv_proj.{suffix}"] = np.concatenate([part(x, 0) for x in names])
        elif leaf.startswith("gate_proj."):
            suffix = leaf.removeprefix("gate_proj.")
            names = [f"{prefix}{x}_proj.{suffix}" for x in ("gate", "up")]
            found[f"{prefix}gate_up_proj.{suffix}"] = np.concatenate([part(x, 0) for x in names])
        elif leaf.startswith(("o_proj.", "down_proj.")):
            found[name] = array if name.endswith(".bias") else part(name, 1)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            found[name] = array[rows]
        elif not leaf.startswith(("k_proj.", "v_proj.", "up_proj.")):
            found[name] = array
    found |= _stacked_experts(weights, part)
    if tied:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def _stacked_experts(weights: dict[str, np.ndarray], part: Callable[[str, int], np.ndarray]) -> dict[str, np.ndarray]:
    """vLLM's w13, gate above up, and w2 of each layer, from the matrices of its experts."""
    found: dict[str, np.ndarray] = {}
    blocks = {name.partition(".experts.")[0] for name in weights if ".experts." in name}
    for block in blocks:
        gate, up, down = ("w1", "w3", "w2") if block.endswith("block_sparse_moe") else ("gate_proj", "up_proj", "down_proj")
        count = 1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in weights if name.startswith(f"{block}.experts."))
        experts = [f"{block}.experts.{number}" for number in range(count)]
        found[f"{block}.experts.routed_experts.w13_weight"] = np.stack(
            [np.concatenate([part(f"{expert}.{gate}.weight", 0), part(f"{expert}.{up}.weight", 0)]) for expert in experts]
        )
        found[f"{block}.experts.routed_experts.w2_weight"] = np.stack([part(f"{expert}.{down}.weight", 1) for expert in experts])
    return found
    return found
