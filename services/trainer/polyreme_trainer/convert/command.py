"""`polyreme convert`: finds out what the source is, and writes the other kind.

Invariant: the target appears whole or not at all, and never replaces an existing file or directory.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from polyreme.errors import ConfigError
from polyreme_trainer.convert import hf_directory, rank_files, state_dict, torch_dist, torch_dist_writer
from polyreme_trainer.convert.adapter import with_adapter
from polyreme_trainer.megatron import hf_mapping
from polyreme_trainer.megatron.atomic import new_directory
from polyreme_trainer.megatron.critic import critic_architecture
from polyreme_trainer.megatron.families import load_architecture
from polyreme_trainer.megatron.families.base import Architecture
from polyreme_trainer.megatron.hf_files import open_tensors
from polyreme_trainer.megatron.hf_mapping import Rank

VOCAB_MULTIPLE = 128
"""The default of Megatron's `make-vocab-size-divisible-by`."""


class CheckpointFormat(StrEnum):
    """How a Megatron checkpoint is stored."""

    torch = "torch"
    torch_dist = "torch_dist"


class Layers(StrEnum):
    """The layers whose parameter names are used."""

    local = "local"
    transformer_engine = "transformer_engine"


def convert(
    source: Annotated[Path, typer.Argument(help="A Hugging Face directory, a Megatron checkpoint, or a file with a state dict.")],
    target: Annotated[Path, typer.Argument(help="The directory to make.")],
    config: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face directory with config.json and tokenizer, for a source that has none.", show_default=False
        ),
    ] = None,
    orm: Annotated[
        bool, typer.Option("--orm", "--critic", help="The model is a critic or reward model, with one output.")
    ] = False,
    adapter: Annotated[
        Path | None, typer.Option(help="Directory of a LoRA adapter (PEFT) to merge into the weights.", show_default=False)
    ] = None,
    iteration: Annotated[
        int | None, typer.Option(min=0, help="Of a Megatron checkpoint; none: the newest.", show_default=False)
    ] = None,
    file_format: Annotated[
        CheckpointFormat,
        typer.Option(
            "--format", help="Of the Megatron checkpoint to write: a file for each rank, or one checkpoint for every layout."
        ),
    ] = CheckpointFormat.torch,
    tensor: Annotated[int, typer.Option(min=1, help="Tensor ranks of the Megatron checkpoint to write.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Its pipeline ranks.")] = 1,
    expert: Annotated[int, typer.Option(min=1, help="Its expert ranks.")] = 1,
    vocab_multiple: Annotated[
        int, typer.Option(min=1, help="Its embedding is padded to a multiple of this for each tensor rank.")
    ] = VOCAB_MULTIPLE,
    layers: Annotated[Layers, typer.Option(help="Whose names its parameters have.")] = Layers.local,
) -> None:
    """Convert weights between Hugging Face directories, Megatron checkpoints and state dicts, bit for bit.

    With --adapter, a Hugging Face directory becomes one with the adapter merged into its weights.
    """
    if target.exists():
        raise ConfigError(
            f"no {target} yet",
            "it exists",
            "Name a new directory. Actor and critic have files of equal names, so each needs its own directory.",
        )
    to_megatron = adapter is None and config is None and (source / "config.json").is_file()
    described = source if config is None else config
    arch = load_architecture(described)
    arch = critic_architecture(arch) if orm else arch
    layout = Rank(tp=tensor, pp=pipeline, ep=expert, vocab_multiple=vocab_multiple)
    if to_megatron:
        check_layout(arch, layout, layers, file_format)
    elif adapter is not None:
        check_no_layout(layout, layers, file_format)
    with ExitStack() as stack:
        tensors = read(stack, source, arch, iteration)
        if adapter is not None:
            tensors = with_adapter(tensors, adapter, hf_mapping.hf_shapes(arch))
        folder = stack.enter_context(new_directory(target))
        if to_megatron and file_format is CheckpointFormat.torch_dist:
            torch_dist_writer.write(folder, arch, tensors, vocab_multiple, engine=layers is Layers.transformer_engine)
        elif to_megatron:
            rank_files.write(folder, arch, tensors, layout, engine=layers is Layers.transformer_engine)
        else:
            hf_directory.write(folder, tensors, described, critic=orm)
    print(f"{target}: {arch.parameters:,} parameters of {arch.family.name}" + (", a critic" if orm else ""))


def read(stack: ExitStack, source: Path, arch: Architecture, iteration: int | None) -> Mapping[str, Tensor]:
    """The source's tensors by Hugging Face's names, checked. Raises ConfigError."""
    if source.is_file():
        return state_dict.read(source, arch)
    if (source / "config.json").is_file():
        opened = stack.enter_context(open_tensors(source))
        opened.check(hf_mapping.hf_shapes(arch), hf_mapping.hf_aliases(arch))
        return opened
    if not source.is_dir():
        raise ConfigError("a file or directory to convert", f"no {source}", "Give one that is there.")
    folder = rank_files.folder_of_iteration(source, iteration)
    if (folder / torch_dist.INDEX).is_file():
        return torch_dist.TorchDist(folder, arch)
    return rank_files.RankFiles(folder, arch)


def check_no_layout(layout: Rank, layers: Layers, file_format: CheckpointFormat) -> None:
    """Raises ConfigError for options of a Megatron checkpoint, which is not written with an adapter."""
    plain = Rank(vocab_multiple=VOCAB_MULTIPLE)
    given = {
        "--tensor": (layout.tp, plain.tp),
        "--pipeline": (layout.pp, plain.pp),
        "--expert": (layout.ep, plain.ep),
        "--vocab-multiple": (layout.vocab_multiple, plain.vocab_multiple),
        "--layers": (layers.value, Layers.local.value),
        "--format": (file_format.value, CheckpointFormat.torch.value),
    }
    if changed := [f"{option} {value}" for option, (value, default) in given.items() if value != default]:
        raise ConfigError(
            "no layout together with --adapter, which writes a Hugging Face directory",
            ", ".join(changed),
            "Merge the adapter first, then convert the merged directory.",
        )


def check_layout(arch: Architecture, layout: Rank, layers: Layers, file_format: CheckpointFormat) -> None:
    """Raises ConfigError when the model does not divide over the layout, or the format does not support it."""
    if file_format is CheckpointFormat.torch_dist:
        if (layout.tp, layout.pp, layout.ep) != (1, 1, 1):
            raise ConfigError(
                "no --tensor, --pipeline and --expert with --format torch_dist",
                f"{layout.tp}, {layout.pp} and {layout.ep}",
                "Leave them out: every layout loads the same checkpoint.",
            )
        return
    try:
        hf_mapping.check(arch, layout.tp)
        for rank in rank_files.every_rank(layout):
            list(hf_mapping.stage_rows(arch, rank))
        if layout.ep > 1 and not arch.experts:
            raise ValueError(f"{arch.family.name} has no experts")
        if arch.head == "value" and arch.hidden % layout.tp:
            raise ValueError(f"hidden size {arch.hidden} does not divide over {layout.tp} tensor ranks")
    except ValueError as error:
        raise ConfigError("a model that divides over the ranks", str(error), "Change --tensor, --pipeline or --expert.") from None
    if layers is Layers.transformer_engine and arch.experts:
        raise ConfigError(
            "--layers local for a model with experts", layers.value, "Transformer Engine names experts by its version; use local."
        )
