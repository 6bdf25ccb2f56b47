"""A Megatron checkpoint in the format `torch`: iter_*/mp_rank_*/model_optim_rng.pt, a file for each model-parallel rank.

Invariant: a directory is read only if it has all ranks of one layout and one model, and if copies that several ranks hold are equal.
Layers are numbered within their pipeline stage. A critic's head is `rm_head`, cut over the tensor ranks along its input.
"""

import argparse
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyreme.cli.progress_bar import counted
from polyreme.errors import ConfigError
from polyreme_trainer.convert import pickles
from polyreme_trainer.convert.names import CRITIC_BIAS, CRITIC_HEAD, OUTPUT_LAYER, check_shapes, engine_name, local_names
from polyreme_trainer.megatron import hf_mapping
from polyreme_trainer.megatron.families.base import EMBEDDING_ROW, VALUE_HEAD, Architecture, Shape
from polyreme_trainer.megatron.hf_mapping import Rank, Slice

FILE = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = 1
"""The iteration number of a converted checkpoint."""


def folder_of_iteration(source: Path, iteration: int | None) -> Path:
    """The directory of the ranks' files: `source` itself, the requested iteration in it, or the one that the tracker file names."""
    if any(source.glob("mp_rank_*")) or (source / ".metadata").is_file():
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


def file_slices(arch: Architecture, rank: Rank) -> Iterator[Slice]:
    """The slices of one rank's file."""
    for piece in hf_mapping.rank_slices(arch, rank):
        if piece.param != OUTPUT_LAYER or arch.head != "value":
            yield piece
            continue
        n = arch.hidden // rank.tp
        part = slice(rank.tp_rank * n, (rank.tp_rank + 1) * n)
        yield Slice(CRITIC_HEAD, VALUE_HEAD, (slice(0, 1), slice(0, n)), (slice(0, 1), part))


def file_shapes(arch: Architecture, rank: Rank) -> dict[str, Shape]:
    """The parameters of one rank's file."""
    shapes = hf_mapping.param_shapes(arch, rank)
    if arch.head == "value" and OUTPUT_LAYER in shapes:
        del shapes[OUTPUT_LAYER]
        shapes |= {CRITIC_HEAD: (1, arch.hidden // rank.tp), CRITIC_BIAS: (1,)}
    return shapes


@dataclass(frozen=True)
class TensorPart:
    """`tensor[piece.param_index]` is `hf[piece.hf_index]`."""

    tensor: Tensor
    piece: Slice
    where: str


class RankFiles(Mapping[str, Tensor]):
    """The Hugging Face tensors of a checkpoint, assembled when they are read. Raises ConfigError when they do not fit."""

    def __init__(self, folder: Path, arch: Architecture) -> None:
        self._shapes = hf_mapping.hf_shapes(arch)
        self._parts: dict[str, list[TensorPart]] = {name: [] for name in self._shapes}
        files = _files(folder)
        states = {indices: _weights(file) for indices, file in files.items()}
        _check_one_model(folder, states)
        for rank, indices in _ranks(folder, arch, states):
            state, where = states[indices], str(files[indices].parent.name)
            self._check(arch, rank, state, where)
            for piece in file_slices(arch, rank):
                self._parts[piece.hf_name].append(TensorPart(state[piece.param], piece, where))

    def __getitem__(self, name: str) -> Tensor:
        parts = sorted(self._parts[name], key=lambda part: not part.piece.primary)
        whole = torch.empty(self._shapes[name], dtype=parts[0].tensor.dtype)
        for part in parts:
            value, place = part.tensor[part.piece.param_index], whole[part.piece.hf_index]
            if part.piece.primary:
                place.copy_(value)
            elif not torch.equal(_bits(place), _bits(value)):
                raise ConfigError(
                    f"the same {name} on every rank that holds it", f"others in {part.where}", "Restore the checkpoint."
                )
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @staticmethod
    def _check(arch: Architecture, rank: Rank, state: dict[str, Tensor], where: str) -> None:
        expected = file_shapes(arch, rank)
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        last = rank.pp_rank == rank.pp - 1
        if arch.head == "value" and last:
            if CRITIC_BIAS not in found:
                expected.pop(CRITIC_BIAS)
            elif state[CRITIC_BIAS].any():
                raise ConfigError(
                    f"{CRITIC_BIAS} of zero in {where}", "another number", "Convert a critic whose head has no bias."
                )
            found.pop(OUTPUT_LAYER, None)  # the language model's head, which a critic may keep and never uses
        for name in (EMBEDDING_ROW.param, OUTPUT_LAYER):  # the padding may differ from the expected one
            rows = found.get(name, (0,))[0]
            if name in expected and min(arch.vocab - rank.tp_rank * rank.vocab_multiple, rank.vocab_multiple) <= rows:
                expected[name] = (rows, *expected[name][1:])
        check_shapes(expected, found, where)


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor. In bytes, a NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def write(target: Path, arch: Architecture, tensors: Mapping[str, Tensor], layout: Rank, *, engine: bool) -> None:
    """Fills an empty directory with the checkpoint of a model.

    Args:
        layout: the numbers of ranks, and the padding of the vocabulary.
        engine: whether to name the parameters as Transformer Engine's layers do.
    """
    folder = target / f"iter_{ITERATION:07d}"
    for rank in counted(every_rank(layout), "converting", layout.tp * layout.pp * layout.ep):
        state: dict[str, Tensor] = {}
        for piece in file_slices(arch, rank):
            tensor = tensors[piece.hf_name]
            if piece.param not in state:
                state[piece.param] = torch.zeros(file_shapes(arch, rank)[piece.param], dtype=tensor.dtype)
            state[piece.param][piece.param_index] = tensor[piece.hf_index]
        for name, shape in file_shapes(
            arch, rank
        ).items():  # a rank may have only padding, and a critic's head has a bias of zero
            state.setdefault(name, torch.zeros(shape, dtype=next(iter(state.values())).dtype))
        file = folder / directory_name(rank) / FILE
        file.parent.mkdir(parents=True)
        named = {engine_name(name): value for name, value in state.items()} if engine else state
        torch.save({"args": arguments(arch, rank), "checkpoint_version": 3.0, "iteration": ITERATION, "model": named}, file)
    (target / TRACKER).write_text(str(ITERATION))


def every_rank(layout: Rank) -> Iterator[Rank]:
    """All ranks of a layout."""
    for tp, pp, ep in itertools.product(range(layout.tp), range(layout.pp), range(layout.ep)):
        yield replace(layout, tp_rank=tp, pp_rank=pp, ep_rank=ep)


def directory_name(rank: Rank) -> str:
    """The name of a rank's directory: tensor rank, then pipeline rank and expert rank if there are several."""
    name = f"mp_rank_{rank.tp_rank:02d}"
    for number, count in ((rank.pp_rank, rank.pp), (rank.ep_rank, rank.ep)):
        if count > 1:
            name += f"_{number:03d}"
    return name


def arguments(arch: Architecture, rank: Rank) -> argparse.Namespace:
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
        padded_vocab_size=hf_mapping.padded_vocab(arch, rank.tp, rank.vocab_multiple),
        tensor_model_parallel_size=rank.tp,
        pipeline_model_parallel_size=rank.pp,
        expert_model_parallel_size=rank.ep,
        iteration=ITERATION,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )


def _files(folder: Path) -> dict[tuple[int, ...], Path]:
    """The ranks' files by the numbers in their directories' names."""
    files = {}
    for directory in sorted(folder.glob("mp_rank_*")):
        numbers = directory.name.removeprefix("mp_rank_").split("_")
        if not all(number.isdecimal() for number in numbers) or not (directory / FILE).is_file():
            raise ConfigError(f"mp_rank_TP[_PP][_EP]/{FILE} in {folder}", directory.name, "Restore the checkpoint.")
        files[tuple(map(int, numbers))] = directory / FILE
    if len({len(indices) for indices in files}) != 1:
        raise ConfigError(
            f"the files of one layout in {folder}",
            f"{sorted(file.parent.name for file in files.values())}",
            "Restore the checkpoint.",
        )
    return files


def _weights(file: Path) -> dict[str, Tensor]:
    content = pickles.load(file)
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not model:
        virtual = isinstance(content, dict) and "model0" in content
        found = "the models of several virtual stages" if virtual else "no such entry"
        raise ConfigError(f"an entry `model` with weights in {file}", found, "Save the checkpoint without virtual stages.")
    return {name: value for name, value in local_names(model).items() if isinstance(value, Tensor)}


def _check_one_model(folder: Path, states: Mapping[tuple[int, ...], Mapping[str, Any]]) -> None:
    """A trainer that saves actor and critic to one path leaves the newer one's files between the older one's."""
    heads = [{name for name in (OUTPUT_LAYER, CRITIC_HEAD) if name in state} for state in states.values()]
    finals = [state for state in states.values() if "decoder.final_layernorm.weight" in state]
    critics = [CRITIC_HEAD in state for state in finals]
    if any(critics) and not all(critics):
        raise ConfigError(
            f"the files of one model in {folder}",
            f"those of an actor and of a critic: {len(heads)} files, {sum(critics)} with {CRITIC_HEAD}",
            "Save actor and critic to separate paths.",
        )


def _ranks(
    folder: Path, arch: Architecture, states: Mapping[tuple[int, ...], Mapping[str, Tensor]]
) -> Iterator[tuple[Rank, tuple[int, ...]]]:
    """The rank of each file."""
    sizes = tuple(1 + max(numbers) for numbers in zip(*states, strict=True))
    absent = [indices for indices in itertools.product(*map(range, sizes)) if indices not in states]
    if absent:
        missing = ", ".join("mp_rank_" + "_".join(map(str, indices)) for indices in absent[:8])
        raise ConfigError(f"the files of all ranks in {folder}", f"without {missing}", "Complete the checkpoint.")
    first = states[(0,) * len(sizes)]
    local = sum(".layers.0.mlp.experts." in name and name.endswith("linear_fc2.weight") for name in first)
    tp, pp, ep = sizes[0], 1, 1
    if len(sizes) == 3:
        pp, ep = sizes[1:]
    elif len(sizes) == 2:
        pp, ep = (1, sizes[1]) if local and local < arch.experts else (sizes[1], 1)
    if arch.layers % pp or max(arch.experts, 1) % ep:
        raise ConfigError(
            f"{arch.layers} layers and {arch.experts} experts that divide over the ranks in {folder}",
            f"{pp} pipeline and {ep} expert ranks",
            "Give the config.json that belongs to these weights.",
        )
    embedding = first.get(EMBEDDING_ROW.param)
    rows = embedding.shape[0] if embedding is not None else hf_mapping.VOCAB_MULTIPLE
    layout = Rank(tp=tp, pp=pp, ep=ep, vocab_multiple=rows)
    try:
        hf_mapping.check(arch, tp)
    except ValueError as error:
        raise ConfigError(f"a model that divides over {tp} tensor ranks", str(error), "Give its own config.json.") from None
    for rank in every_rank(layout):
        numbers = (rank.tp_rank, *(rank.pp_rank,) * (pp > 1 or len(sizes) == 3), *(rank.ep_rank,) * (ep > 1 or len(sizes) == 3))
        yield rank, numbers[: len(sizes)] if len(numbers) >= len(sizes) else (*numbers, *(0,) * (len(sizes) - len(numbers)))
