"""The layout that the files of a Megatron checkpoint show, and the rank of each file.

The directories' names, the number of entries, and the numbers and widths of a file's experts determine the layout. The matrices
of several experts (`grouped_experts`) show only the product of two numbers, so the number of expert ranks comes from elsewhere.

Invariant: the files are those of all ranks of one layout, and of no other. Megatron's arguments in the files, and the numbers of
ranks that the caller gives, do not contradict it.
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from polyreme.errors import ConfigError
from polyreme_trainer.convert import grouped_experts, pickles
from polyreme_trainer.convert import layout as layouts
from polyreme_trainer.convert.layout import FILE
from polyreme_trainer.convert.names import local_names
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families.base import EMBEDDING_ROW, EXPERT, Architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank

_ENTRY = re.compile(r"model\d*")
_DOWN = re.compile(rf"decoder\.layers\.(\d+)\.{re.escape(EXPERT)}\d+\.linear_fc2\.weight")
_EXPERT_ARGUMENTS = ("expert_model_parallel_size", "expert_tensor_parallel_size")


@dataclass(frozen=True)
class RankFile:
    """The content of a rank's file.

    Attributes:
        where: the name of its directory.
        stages: for each virtual stage, the parameters by the names of megatron-core's local layers.
        arguments: Megatron's arguments; empty if the file has none.
    """

    where: str
    stages: list[dict[str, Tensor]]
    arguments: Mapping[str, Any]


Numbers = tuple[int, ...]


def open_files(folder: Path) -> dict[Numbers, RankFile]:
    """The files by the numbers in their directories' names. Tensors stay on disk until they are read. Raises ConfigError."""
    files: dict[Numbers, RankFile] = {}
    for directory in sorted(folder.glob("mp_rank_*")):
        numbers = directory.name.removeprefix("mp_rank_").split("_")
        if not (all(number.isdecimal() for number in numbers) and len(numbers) <= 3 and (directory / FILE).is_file()):
            raise ConfigError(f"mp_rank_TP[_PP][_EP]/{FILE} in {folder}", directory.name, "Restore the checkpoint.")
        files[tuple(map(int, numbers))] = _open(directory / FILE)
    names = [file.where for file in files.values()]
    if len({len(numbers) for numbers in files}) != 1:
        raise ConfigError(f"the files of one layout in {folder}", ", ".join(names), "Restore the checkpoint.")
    counts = {len(file.stages): file.where for file in files.values()}
    if len(counts) != 1:
        found = " and ".join(f"{count} in {where}" for count, where in counts.items())
        raise ConfigError(f"the same number of virtual stages in all files of {folder}", found, "Restore the checkpoint.")
    return files


def _open(file: Path) -> RankFile:
    content = pickles.load(file)
    entries = content if isinstance(content, dict) else {}
    found = [name for name in entries if isinstance(name, str) and _ENTRY.fullmatch(name)]
    names = layouts.entry_names(len(found))
    states = [entries[name] for name in names if isinstance(entries.get(name), dict) and entries[name]]
    if not states or len(states) != len(names):
        raise ConfigError(
            f"an entry `model` with weights in {file}, or `model0`, `model1` and so on for its virtual stages",
            f"{', '.join(sorted(found))}, or one of them without weights" if found else "no such entry",
            "Restore the checkpoint.",
        )
    stages = [{name: value for name, value in local_names(state).items() if isinstance(value, Tensor)} for state in states]
    arguments = entries.get("args")
    return RankFile(file.parent.name, stages, vars(arguments) if isinstance(arguments, argparse.Namespace) else {})


def ranks(
    folder: Path, arch: Architecture, files: Mapping[Numbers, RankFile], given: Mapping[str, int]
) -> Iterator[tuple[Rank, RankFile]]:
    """Every rank of the layout that has a file, with the file.

    Args:
        given: numbers of ranks that the layout must have, by the names of Megatron's arguments.

    Raises:
        ConfigError: the files are not those of one layout of the model.
    """
    files = _single_experts(folder, arch, files, given)
    first = next(iter(files.values()))
    experts, cut = _experts(folder, arch, files.values())
    by_rank = {_coordinates(numbers, experts): file for numbers, file in files.items()}
    tp, pp = (1 + max(numbers[axis] for numbers in by_rank) for axis in (0, 1))
    cut = cut or tp
    embedding = first.stages[0].get(EMBEDDING_ROW.param)
    layout = Rank(
        tp=tp,
        pp=pp,
        ep=experts,
        vocab_multiple=hf_mapping.VOCAB_MULTIPLE if embedding is None or not embedding.numel() else embedding.shape[0],
        vpp=len(first.stages),
        etp=0 if cut == tp else cut,
    )
    _agree(folder, layout, given, "the options")
    for file in files.values():
        claimed = {name: value for name, value in file.arguments.items() if type(value) is int}
        if not arch.experts or file.arguments.get("moe_tp_extend_ep"):  # with it, MindSpeed counts expert ranks per tensor rank
            claimed = {name: value for name, value in claimed.items() if name not in _EXPERT_ARGUMENTS}
        _agree(folder, layout, claimed, f"the args in {file.where}")
    try:
        layouts.check(arch, layout)
    except ValueError as error:
        raise ConfigError(
            f"a model that divides over the ranks of {folder}", str(error), "Give the config.json that belongs to these weights."
        ) from None
    expected = {(rank.tp_rank, rank.pp_rank, rank.ep_rank): rank for rank in layouts.every_rank(layout)}
    missing = [layouts.directory_name(rank) for numbers, rank in expected.items() if numbers not in by_rank]
    others = [file.where for numbers, file in by_rank.items() if numbers not in expected]
    if missing or others:
        raise ConfigError(
            f"the files of {_described(layout)} in {folder}",
            "; ".join(f"{kind} {', '.join(names[:8])}" for kind, names in (("no", missing), ("also", others)) if names),
            "Complete the checkpoint, or save it in the format torch_dist.",
        )
    for numbers, rank in expected.items():
        yield rank, by_rank[numbers]


def _single_experts(
    folder: Path, arch: Architecture, files: Mapping[Numbers, RankFile], given: Mapping[str, int]
) -> Mapping[Numbers, RankFile]:
    """The files with one weight for each expert and linear layer. Raises ConfigError."""
    if not arch.experts or not any(grouped_experts.found_in(stage) for file in files.values() for stage in file.stages):
        return files
    count = _expert_ranks(folder, arch, files, given)
    try:
        return {
            numbers: replace(
                file, stages=[grouped_experts.split(stage, arch.experts, count, arch.hidden) for stage in file.stages]
            )
            for numbers, file in files.items()
        }
    except ValueError as error:
        raise ConfigError(
            f"matrices of {arch.experts} experts with the hidden size {arch.hidden} on {count} expert ranks in {folder}",
            str(error),
            "Give the config.json that belongs to these weights, and the right --expert.",
        ) from None


def _expert_ranks(folder: Path, arch: Architecture, files: Mapping[Numbers, RankFile], given: Mapping[str, int]) -> int:
    """The number of expert ranks of files with matrices of several experts. Raises ConfigError if nothing tells it."""
    name = _EXPERT_ARGUMENTS[0]
    numbers, file = next(iter(files.items()))
    if file.arguments.get("moe_tp_extend_ep"):  # no rank cuts an expert, so the experts of a file are whole
        stages = (stage for each in files.values() for stage in each.stages)
        down = next(tensor for stage in stages for key, tensor in stage.items() if key.endswith(".experts.weight2"))
        return max(1, arch.experts * arch.expert_ffn // max(1, down.shape[0]))
    for claimed in (given, file.arguments):
        if type(claimed.get(name)) is int:
            return max(1, claimed[name])
    if len(numbers) != 2:  # two are of a pipeline rank or of an expert rank
        return 1 + max(each[2] for each in files) if len(numbers) == 3 else 1
    raise ConfigError(f"{name} in the args of {file.where} in {folder}", "none", "Give the number of expert ranks with --expert.")


def _experts(folder: Path, arch: Architecture, files: Iterable[RankFile]) -> tuple[int, int]:
    """The numbers of expert ranks and of ranks that cut each expert; 0: tensor ranks do. A rank may have no expert layers."""
    down, where = next((found for file in files for found in _one_layer(file)), ([], ""))
    if not down or not arch.experts:
        return 1, 0
    if arch.experts % len(down):
        raise ConfigError(
            f"{arch.experts} experts that divide over the ranks in {folder}",
            f"{len(down)} in {where}",
            "Give the config.json that belongs to these weights.",
        )
    # Another shape is reported later.
    width = down[0].shape[-1] if down[0].numel() and down[0].dim() == 2 else arch.expert_ffn + 1
    return arch.experts // len(down), 0 if arch.expert_ffn % width else arch.expert_ffn // width


def _one_layer(file: RankFile) -> Iterator[tuple[list[Tensor], str]]:
    """The last matrices of the experts of each layer of a file, with the file's name."""
    for stage in file.stages:
        layers: dict[str, list[Tensor]] = {}
        for name, tensor in stage.items():
            if layer := _DOWN.fullmatch(name):
                layers.setdefault(layer[1], []).append(tensor)
        for down in layers.values():
            yield down, file.where


def _coordinates(numbers: Numbers, experts: int) -> Numbers:
    """The tensor, pipeline and expert rank in a directory name. Without pipeline or expert ranks, their number may be absent."""
    if len(numbers) == 2 and experts > 1:
        return numbers[0], 0, numbers[1]
    return (*numbers, 0, 0)[:3]


def _agree(folder: Path, layout: Rank, claimed: Mapping[str, int], who: str) -> None:
    """Raises ConfigError if the layout of the files differs from the claimed one."""
    found = layouts.sizes(layout)
    if wrong := {name: claimed[name] for name in found if claimed.get(name, found[name]) != found[name]}:
        raise ConfigError(
            f"{', '.join(f'{name} {value}' for name, value in wrong.items())} in {folder}, according to {who}",
            f"files of {_described(layout)}",
            "Complete the checkpoint, or give the right options and the config.json that belongs to these weights.",
        )


def _described(layout: Rank) -> str:
    """For example "2 tensor and 4 pipeline ranks with 2 virtual stages"."""
    text = f"{layout.tp} tensor and {layout.pp} pipeline ranks" + (f" with {layout.vpp} virtual stages" if layout.vpp > 1 else "")
    cut = f", each expert cut over {layout.etp}" if layout.etp else ""
    return text + (f", {layout.ep} expert ranks" if layout.ep > 1 else "") + cut
