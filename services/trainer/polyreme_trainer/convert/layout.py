"""A Megatron checkpoint's layout: the ranks that have a file, the names of their directories, and the entries of a file.

A file is named by its tensor, pipeline and expert rank. The first ranks of each stage have all of its weights (`Rank.places`),
and each writes one file. A file has an entry with weights for each virtual stage of its rank; layers are numbered within it.

Invariant: two ranks with different weights never have the same file. The module is pure.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families.base import EMBEDDING_ROW, Architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank

FILE = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = 1
"""The iteration number of a converted checkpoint."""

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def every_rank(layout: Rank) -> Iterator[Rank]:
    """The ranks of a layout that have a file."""
    for stage, place in product(range(layout.pp), range(layout.places)):
        yield replace(layout, pp_rank=stage).at(place)


def directory_name(rank: Rank) -> str:
    """The name of a rank's directory: tensor rank, then pipeline rank and expert rank if there are several."""
    name = f"mp_rank_{rank.tp_rank:02d}"
    for number, count in ((rank.pp_rank, rank.pp), (rank.ep_rank, rank.ep)):
        if count > 1:
            name += f"_{number:03d}"
    return name


def entry_names(stages: int) -> list[str]:
    """The names of a file's entries with weights, in the order of the rank's virtual stages."""
    return ["model"] if stages == 1 else [f"model{stage}" for stage in range(stages)]


def place_in_file(param: str, arch: Architecture, rank: Rank) -> tuple[int, str]:
    """The number of the entry that has a parameter of the rank, and the parameter's name in it."""
    if layer := _LAYER.match(param):
        stage, number = divmod(int(layer[1]), arch.layers // (rank.pp * rank.vpp))
        return stage, f"decoder.layers.{number}.{param[layer.end() :]}"
    return (0 if param == EMBEDDING_ROW.param else rank.vpp - 1), param


def check(arch: Architecture, layout: Rank) -> None:
    """Raises ValueError when the model does not divide over the layout, or the files cannot have it."""
    hf_mapping.check(arch, layout.tp, layout.expert_cut.tp)
    list(hf_mapping.stage_rows(arch, layout))
    if arch.head == "value" and arch.hidden % layout.tp:
        raise ValueError(f"hidden size {arch.hidden} does not divide over {layout.tp} tensor ranks")
    if layout.vpp > 1 and layout.pp == 1:
        raise ValueError(f"{layout.vpp} virtual stages need several pipeline ranks")
    few, many = sorted((layout.tp, layout.expert_places))
    if many % few or layout.expert_cut.tp > layout.tp:
        raise ValueError(
            f"{layout.ep} expert ranks with {layout.expert_cut.tp} ranks that cut each expert, and {layout.tp} tensor ranks: "
            "Megatron's files have no number for the ranks that cut experts, so there are at most as many as tensor ranks, and "
            "the product of the first two divides the third or is a multiple of it"
        )


def sizes(layout: Rank) -> dict[str, int]:
    """The layout by the names of Megatron's arguments."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_cut.tp,
    }


def arguments(arch: Architecture, layout: Rank) -> argparse.Namespace:
    """The arguments that Megatron compares with its own command line."""
    return argparse.Namespace(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=arch.ffn,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        group_query_attention=arch.kv_heads != arch.heads,
        kv_channels=arch.head_dim,
        max_position_embeddings=arch.max_position,
        norm_epsilon=arch.norm_eps,
        normalization="RMSNorm",
        swiglu=arch.family.activation == "silu",
        untie_embeddings_and_output_weights=arch.head != "tied",
        num_experts=arch.experts or None,
        padded_vocab_size=hf_mapping.padded_vocab(arch, layout.tp, layout.vocab_multiple),
        **{
            **sizes(layout),
            "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            "num_layers_per_virtual_pipeline_stage": arch.layers // (layout.pp * layout.vpp) if layout.vpp > 1 else None,
        },
        iteration=ITERATION,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )
