"""Reads the weights that a vLLM worker uses, even if only a packed copy exists.

Invariant: the values are exact. On CPU vLLM packs weights for its kernels and discards the plain ones. A linear layer applied to
the identity matrix returns its weights: each product multiplies by one, and each sum adds zeros. Experts are only reordered:
packing a matrix of element numbers shows where each element went.
"""

from typing import Any

import torch
import xxhash

EXPERT_WEIGHTS = (".w13_weight", ".w2_weight")
"""Suffixes of the names of vLLM's stacked experts: gate above up, and down."""


def expert_layers(model: torch.nn.Module) -> dict[str, Any]:
    """The modules that hold the experts of a layer, by path."""
    return {path: layer for path, layer in model.named_modules() if hasattr(layer, "w13_weight")}


@torch.no_grad()
def effective_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's parameters by vLLM's (fused) names, without vocabulary padding. A tied head appears as `lm_head.weight`."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.numel()}
    for path, layer in model.named_modules():
        method, width = getattr(layer, "quant_method", None), input_width(layer)
        if method is None or width is None:
            continue
        rows = getattr(getattr(layer, "shard_indices", None), "num_org_elements", None)
        name = f"{path}.weight"
        if rows is None or path.endswith("lm_head"):
            identity = torch.eye(width, dtype=layer.weight.dtype)
            found[name] = method.apply(layer, identity, None).t()[:rows]
        else:
            found[name] = found[name][:rows]
    for path, layer in expert_layers(model).items():
        for end in EXPERT_WEIGHTS:
            plain = _plain_experts(layer, found[path + end])
            width = layer.moe_config.intermediate_size_per_partition  # the kernel may have added rows or columns to it
            if end == ".w2_weight":
                found[path + end] = plain[:, :, :width]
            else:
                found[path + end] = torch.cat([part[:, :width] for part in plain.chunk(2, dim=1)], dim=1)
    return found


def _plain_experts(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """The experts [n, out, in] in the order in which they were loaded."""
    kernel = layer.quant_method.moe_kernel.fused_experts
    if weight.device.type != "cpu" or getattr(kernel, "_use_zentorch", False):
        return weight
    from vllm._custom_ops import cpu_prepack_moe_weight

    number = torch.arange(weight[0].numel()).view(1, *weight.shape[1:])
    order = torch.zeros_like(number)
    for power in (1, 1 << 8, 1 << 16, 1 << 24):  # digits below 256 are exact in every dtype
        digits = (number // power % 256).to(weight.dtype)
        order += cpu_prepack_moe_weight(digits, kernel.isa).long() * power
    plain = torch.empty_like(weight).flatten(1)
    plain[:, order.flatten()] = weight.flatten(1)
    return plain.view_as(weight)


def digests(model: torch.nn.Module) -> dict[str, tuple[list[int], int]]:
    """Shape and xxh3_64 of the bytes of each of `effective_weights`; minus zero counts as zero."""
    return {
        name: (list(tensor.shape), xxhash.xxh3_64_intdigest((tensor + 0.0).contiguous().view(torch.uint8).numpy().data))
        for name, tensor in effective_weights(model).items()
    }


def model_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of the matrices. Norms may have a wider one."""
    dtype: torch.dtype = next(parameter.dtype for parameter in model.parameters() if parameter.dim() == 2)
    return dtype


def input_width(layer: torch.nn.Module) -> int | None:
    """A layer's input size on this rank; None unless it is linear or an embedding."""
    for attribute in ("input_size_per_partition", "input_size", "embedding_dim"):
        if isinstance(size := getattr(layer, attribute, None), int):
            return size
    return None


def hf_names(model: torch.nn.Module) -> set[str]:
    """Hugging Face names of the tensors of a vLLM model, without aliases."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    parts = {
        f".{fused}.": [f".{part}." for part in packed] for fused, packed in getattr(model, "packed_modules_mapping", {}).items()
    }
    names = {name for path, layer in expert_layers(model).items() for name in _expert_names(path, layer, model)}
    for path, _ in model.named_parameters():
        name = path.replace(".base_layer.", ".")  # a layer that may have adapters
        if name.endswith(EXPERT_WEIGHTS):
            continue
        if tied and name.startswith("lm_head."):
            continue
        fused = next((fused for fused in parts if fused in name), None)
        names.update(name.replace(fused, part) for part in parts[fused]) if fused else names.add(name)
    return names


def _expert_names(path: str, layer: Any, model: torch.nn.Module) -> set[str]:
    """Hugging Face names of the experts' matrices, of which vLLM's mapping holds `experts.NUMBER.MATRIX.`"""
    mapped: Any = (
        layer if hasattr(layer, "get_expert_mapping") else model
    )  # in older releases the model has the mapping of all layers
    block = path[: path.rindex(".experts") + 1]
    return {f"{block}{part}weight" for _, part, _, _ in mapped.get_expert_mapping()}
