"""The mapping table of a model's adapters: which parameters of megatron-core's fused layers hold PEFT's `lora_A` and `lora_B` of
each projection.

The layer of a weight [out, in] also has the parameters `lora_a` and `lora_b`. `lora_a` has the A of each adapted projection,
[rank, in], one below the other. `lora_b` has one row of `rank` numbers for each row of the weight, the B of the row's projection,
so tensor ranks share it as they share the weight. Rows of a projection without an adapter are zero. Where tensor ranks split the
columns of the weight, they split those of `lora_a`, and all have the whole `lora_b`.

Invariant: adapters are a separate `Architecture`, so saving, resuming in another layout, export and the memory estimate handle
them through `hf_mapping` as they handle weights. The module is pure and imports no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from polyreme.config.trainer import LoraConfig, LoraTarget
from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families.base import Architecture, MappingRow

A, B = "lora_a", "lora_b"
"""Names of an adapter's parameters within its layer."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""PEFT's names, in place of `.weight`."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def adapter_architecture(arch: Architecture, lora: LoraConfig) -> Architecture:
    """The table of a model's adapters. Raises ConfigError for targets that the model does not have."""
    wanted = targets(arch, lora)
    layer, dense = (
        tuple(part for row in rows for part in _adapter_rows(row, wanted, lora.rank))
        for rows in (arch.family.layer, arch.family.dense_layer)
    )
    return replace(arch, family=replace(arch.family, layer=layer, dense_layer=dense, expert=()), adapter=True)


def targets(arch: Architecture, lora: LoraConfig) -> tuple[str, ...]:
    """The projections with an adapter, in the model's order. Raises ConfigError."""
    possible: Sequence[str] = _ATTENTION if arch.experts else get_args(LoraTarget)
    if impossible := [name for name in lora.targets or [] if name not in possible]:
        raise ConfigError(
            f"trainer.lora.targets of {', '.join(possible)} for {arch.family.name}, a model with experts",
            ", ".join(impossible),
            "Remove these: experts have no adapters.",
        )
    return tuple(name for name in possible if lora.targets is None or name in lora.targets)


def stacked_ranks(adapter: Architecture) -> int:
    """The number of values per token between A and B, summed over all adapters of one layer."""
    rows = [row for row in adapter.family.layer if row.param.endswith(A)]
    return sum(shape[0] for row in rows for shape in adapter.shapes(row).values())


def wide_numbers(adapter: Architecture) -> int:
    """The size of one layer's B as matrices for the stacked A, see `lora.Adapter.wide_b`, over all tensor ranks, in numbers. A B
    that already has this form counts as 0."""
    total = 0
    for row in adapter.family.layer:
        if row.param.endswith(B) and len(row.tensors) > 1:
            shapes = adapter.shapes(row)
            total += sum(rows for rows, _ in shapes.values()) * sum(
                rank for name, (_, rank) in shapes.items() if name not in row.absent
            )
    return total


def projection_of(hf_name: str) -> str:
    """The projection's name in a tensor's name: "q_proj" of "...self_attn.q_proj.weight"."""
    return hf_name.removesuffix(LORA_A).removesuffix(LORA_B).removesuffix(".weight").rpartition(".")[2]


def _adapter_rows(row: MappingRow, wanted: Sequence[str], rank: int) -> Iterator[MappingRow]:
    """The rows of A and B for a row of the model; none if it has no adapters."""
    modules = {name.removesuffix(".weight"): dims for name, dims in row.tensors.items() if name.endswith("_proj.weight")}
    adapted = {module: dims for module, dims in modules.items() if projection_of(module) in wanted}
    if not adapted:
        return
    split_columns = row.share == "columns"
    layer = row.param.removesuffix("weight")
    yield MappingRow(
        layer + A,
        "columns" if split_columns else "all",
        {module + LORA_A: (rank, columns) for module, (_, columns) in adapted.items()},
    )
    yield MappingRow(
        layer + B,
        "all" if split_columns else row.share,
        {module + LORA_B: (rows, rank) for module, (rows, _) in modules.items()},
        frozenset(module + LORA_B for module in modules if module not in adapted),
    )
