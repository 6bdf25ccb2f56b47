"""Writes a Megatron checkpoint in the format `torch`: iter_*/mp_rank_*/model_optim_rng.pt, a file for each model-parallel rank.

Invariant: one rank's parameters at a time are in memory.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from polyreme.terminal.progress_bar import counted
from polyreme_trainer.convert.layout import (
    FILE,
    ITERATION,
    TRACKER,
    arguments,
    directory_name,
    entry_names,
    every_rank,
    place_in_file,
)
from polyreme_trainer.convert.parameters import assembled, file_shapes, file_slices
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank, Slice

Stored = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""The form in which a kind of layers stores the parameters, which it gets by the names of megatron-core's local layers."""


def write(target: Path, arch: Architecture, tensors: Mapping[str, Tensor], layout: Rank, stored: Stored) -> None:
    """Fills an empty directory with the checkpoint of a model.

    Args:
        layout: the numbers of ranks, and the padding of the vocabulary.
        stored: the form of each entry's parameters.

    Raises:
        ConfigError: the tensors of one parameter have different dtypes.
    """
    folder = target / f"iter_{ITERATION:07d}"
    for rank in counted(every_rank(layout), "converting", layout.pp * layout.places):
        file = folder / directory_name(rank) / FILE
        file.parent.mkdir(parents=True)
        entries = dict(zip(entry_names(rank.vpp), map(stored, _stages(arch, tensors, rank)), strict=True))
        torch.save({"args": arguments(arch, rank), "checkpoint_version": 3.0, "iteration": ITERATION, **entries}, file)
    (target / TRACKER).write_text(str(ITERATION))


def _stages(arch: Architecture, tensors: Mapping[str, Tensor], rank: Rank) -> list[dict[str, Tensor]]:
    """The parameters of each virtual stage of a rank."""
    pieces: dict[str, list[Slice]] = {}
    for piece in file_slices(arch, rank):
        pieces.setdefault(piece.param, []).append(piece)
    stages: list[dict[str, Tensor]] = [{} for _ in range(rank.vpp)]
    dtype = tensors[next(iter(pieces.values()))[0].hf_name].dtype
    for param, shape in file_shapes(arch, rank).items():
        own = pieces.get(param, [])  # none for a rank with padding only, and for the bias of a critic's head
        dtype = tensors[own[0].hf_name].dtype if own else dtype
        stage, name = place_in_file(param, arch, rank)
        stages[stage][name] = assembled(param, shape, own, tensors, dtype)
    return stages
