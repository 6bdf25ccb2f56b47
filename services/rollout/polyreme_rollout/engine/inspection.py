"""Reads the weights that a vLLM worker computes with, even where only a packed copy exists.

Invariant: the values are exact. On CPU vLLM packs linear weights for its kernels and discards the plain ones. A linear layer applied
to the identity matrix returns its weights: each product multiplies by one, and each sum adds zeros.
"""

from typing import Any

import torch
import xxhash


@torch.no_grad()
def effective_weights(model: Any) -> dict[str, torch.Tensor]:
    """This rank's parameters by vLLM's (fused) names, without vocabulary padding. A tied head appears as `lm_head.weight`."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.numel()}
    for path, layer in model.named_modules():
        method, width = getattr(layer, "quant_method", None), _width(layer)
        if method is None or width is None:
            continue
        rows = getattr(getattr(layer, "shard_indices", None), "num_org_elements", None)
        name = f"{path}.weight"
        if rows is None or path.endswith("lm_head"):
            identity = torch.eye(width, dtype=model_dtype(model))
            found[name] = method.apply(layer, identity, None).t()[:rows]
        else:
            found[name] = found[name][:rows]
    return found


def digests(model: Any) -> dict[str, tuple[list[int], int]]:
    """Shape and xxh3_64 of the bytes of each of `effective_weights`; minus zero counts as zero."""
    return {
        name: (list(tensor.shape), xxhash.xxh3_64_intdigest((tensor + 0.0).contiguous().view(torch.uint8).numpy().data))
        for name, tensor in effective_weights(model).items()
    }


def model_dtype(model: Any) -> torch.dtype:
    """The dtype of the matrices. Norms may have a wider one."""
    dtype: torch.dtype = next(parameter.dtype for parameter in model.parameters() if parameter.dim() == 2)
    return dtype


def _width(layer: Any) -> int | None:
    """A layer's input size on this rank; None unless it is linear or an embedding."""
    for attribute in ("input_size_per_partition", "input_size", "embedding_dim"):
        if isinstance(size := getattr(layer, attribute, None), int):
            return size
    return None
