"""Reads a Megatron checkpoint in the format `torch`: iter_*/mp_rank_*/model_optim_rng.pt, a file for each model-parallel rank.

Invariant: a directory is read only if it has all ranks of one layout and one model, and if copies that several ranks hold are
equal. A critic's head is `rm_head`, cut over the tensor ranks along its input.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from polyreme.errors import ConfigError
from polyreme_trainer.convert import found_layout
from polyreme_trainer.convert.found_layout import RankFile
from polyreme_trainer.convert.layout import TRACKER, place_in_file
from polyreme_trainer.convert.names import CRITIC_BIAS, CRITIC_HEAD, OUTPUT_LAYER, check_shapes
from polyreme_trainer.convert.parameters import file_shapes, file_slices
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families.base import EMBEDDING_ROW, FINAL_NORM_ROW, Architecture, Shape
from polyreme_trainer.megatron.huggingface.hf_files import LazyTensors
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank, Slice


def is_checkpoint(source: Path) -> bool:
    """Whether a directory is a Megatron checkpoint. Some converters add the model's config.json to it."""
    return (source / TRACKER).is_file() or _has_ranks(source)


def _has_ranks(folder: Path) -> bool:
    return any(folder.glob("mp_rank_*")) or (folder / ".metadata").is_file()


def folder_of_iteration(source: Path, iteration: int | None) -> Path:
    """The directory of the ranks' files: `source` itself, the requested iteration in it, or the one in the tracker file."""
    if _has_ranks(source):
        return source
    tracker = source / TRACKER
    if iteration is None and tracker.is_file():
        text = tracker.read_text().strip()
        if not text.isdecimal() and text != "release":
            raise ConfigError(f"a number or `release` in {tracker}", repr(text[:50]), "Choose one with --iteration.")
        folder = source / (text if text == "release" else f"iter_{int(text):07d}")
    elif iteration is not None:
        folder = source / f"iter_{iteration:07d}"
    else:
        raise ConfigError(f"{TRACKER}, iter_* or mp_rank_* in {source}", "none of them", "Give a checkpoint's directory.")
    if not folder.is_dir():
        raise ConfigError(f"a directory {folder}", "none", "Choose an existing iteration with --iteration.")
    return folder


@dataclass(frozen=True)
class TensorPart:
    """`tensor[piece.param_index]` is `hf[piece.hf_index]`."""

    tensor: Tensor
    piece: Slice
    where: str


class RankFiles(LazyTensors):
    """The Hugging Face tensors of a checkpoint, assembled when they are read. Raises ConfigError when they do not fit.

    Args:
        given: numbers of ranks that the files must have, see `found_layout.ranks`.
    """

    def __init__(self, folder: Path, arch: Architecture, given: Mapping[str, int]) -> None:
        self._shapes = hf_mapping.hf_shapes(arch)
        super().__init__(self._shapes, self._assembled)
        self._parts: dict[str, list[TensorPart]] = {name: [] for name in self._shapes}
        files = found_layout.open_files(folder)
        _check_one_model(folder, files.values())
        for rank, file in found_layout.ranks(folder, arch, files, given):
            _check(arch, rank, file)
            for piece in file_slices(arch, rank):
                stage, name = place_in_file(piece.param, arch, rank)
                self._parts[piece.hf_name].append(TensorPart(file.stages[stage][name], piece, file.where))

    def _assembled(self, name: str) -> Tensor:
        parts = sorted(self._parts[name], key=lambda part: not part.piece.primary)
        whole = torch.empty(self._shapes[name], dtype=parts[0].tensor.dtype)
        for part in parts:
            value, place = part.tensor[part.piece.param_index], whole[part.piece.hf_index]
            if value.dtype != whole.dtype:
                raise ConfigError(
                    f"{whole.dtype} in all parts of {name}", f"{value.dtype} in {part.where}", "Restore the checkpoint."
                )
            if part.piece.primary:
                place.copy_(value)
            elif not torch.equal(_bits(place), _bits(value)):
                raise ConfigError(
                    f"the same {name} on every rank that holds it", f"others in {part.where}", "Restore the checkpoint."
                )
        return whole


def _check(arch: Architecture, rank: Rank, file: RankFile) -> None:
    """Raises ConfigError unless each entry of a file has exactly the parameters of its virtual stage."""
    expected: list[dict[str, Shape]] = [{} for _ in file.stages]
    for param, shape in file_shapes(arch, rank).items():
        stage, name = place_in_file(param, arch, rank)
        expected[stage][name] = shape
    for number, (shapes, state) in enumerate(zip(expected, file.stages, strict=True)):
        where = f"{file.where}, model{number}" if rank.vpp > 1 else file.where
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if CRITIC_BIAS in shapes:
            if CRITIC_BIAS not in found:
                shapes.pop(CRITIC_BIAS)
            elif state[CRITIC_BIAS].any():
                raise ConfigError(
                    f"{CRITIC_BIAS} of zero in {where}", "another number", "Convert a critic whose head has no bias."
                )
            found.pop(OUTPUT_LAYER, None)  # the language model's head, which a critic may keep and never uses
        for name in (EMBEDDING_ROW.param, OUTPUT_LAYER):  # the padding may differ from the expected one
            rows = found.get(name, (0,))[0]
            if name in shapes and min(arch.vocab - rank.tp_rank * rank.vocab_multiple, rank.vocab_multiple) <= rows:
                shapes[name] = (rows, *shapes[name][1:])
        check_shapes(shapes, found, where)


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor. In bytes, a NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def _check_one_model(folder: Path, files: Iterable[RankFile]) -> None:
    """A trainer that saves actor and critic to one path leaves the newer one's files between the older one's."""
    lasts = [stage for file in files for stage in file.stages if FINAL_NORM_ROW.param in stage]
    critics = sum(CRITIC_HEAD in stage for stage in lasts)
    if 0 < critics < len(lasts):
        raise ConfigError(
            f"the files of one model in {folder}",
            f"those of an actor and of a critic: of {len(lasts)} files with an output layer, {critics} have {CRITIC_HEAD}",
            "Save actor and critic to separate paths.",
        )
