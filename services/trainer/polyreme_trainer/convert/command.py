"""`polyreme convert`: detects the kind of the source, and writes the other kind.

Invariant: the target appears whole or not at all, and never replaces an existing file or directory. An option that the conversion
does not use is refused. Every tensor of an adapter changes one weight, or nothing is converted.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from polyreme.errors import ConfigError
from polyreme_trainer.convert import (
    grouped_experts,
    hf_directory,
    layout,
    rank_files,
    rank_files_writer,
    state_dict,
    torch_dist,
    torch_dist_writer,
)
from polyreme_trainer.convert.names import engine_names
from polyreme_trainer.megatron.atomic import new_directory
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_files import LazyTensors
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank
from polyreme_trainer.megatron.huggingface.peft_files import read_adapter

VOCAB_MULTIPLE = 128
"""The default of Megatron's `make-vocab-size-divisible-by`."""


class CheckpointFormat(StrEnum):
    """The format of a Megatron checkpoint."""

    torch = "torch"
    torch_dist = "torch_dist"


class Layers(StrEnum):
    """The layers whose parameter names are used. "grouped": local layers with the experts of a rank in two matrices."""

    local = "local"
    grouped = "grouped"
    transformer_engine = "transformer_engine"


class Kind(StrEnum):
    """The kind of a source."""

    state_dict = "a state dict"
    hf = "a Hugging Face directory"
    rank_files = "a Megatron checkpoint in the format torch"
    torch_dist = "a Megatron checkpoint in the format torch_dist"


STORED: dict[Layers, rank_files_writer.Stored] = {
    Layers.local: dict,
    Layers.grouped: grouped_experts.joined,
    Layers.transformer_engine: engine_names,
}
"""How each kind of layers stores the parameters of a file."""

RANKS = {
    "--tensor": "tensor_model_parallel_size",
    "--pipeline": "pipeline_model_parallel_size",
    "--virtual-pipeline": "virtual_pipeline_model_parallel_size",
    "--expert": "expert_model_parallel_size",
    "--expert-tensor": "expert_tensor_parallel_size",
}
"""The options of a layout, and the names of Megatron's arguments."""


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
    tensor: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tensor ranks of the Megatron checkpoint; none: 1 for one to write, those of the files for one to read.",
            show_default=False,
        ),
    ] = None,
    pipeline: Annotated[int | None, typer.Option(min=1, help="Its pipeline ranks.", show_default=False)] = None,
    virtual_pipeline: Annotated[
        int | None, typer.Option(min=1, help="Virtual stages of each pipeline rank.", show_default=False)
    ] = None,
    expert: Annotated[int | None, typer.Option(min=1, help="Its expert ranks.", show_default=False)] = None,
    expert_tensor: Annotated[
        int | None, typer.Option(min=1, help="Ranks that cut each expert; none: the tensor ranks do.", show_default=False)
    ] = None,
    vocab_multiple: Annotated[
        int, typer.Option(min=1, help="Its embedding is padded to a multiple of this for each tensor rank.")
    ] = VOCAB_MULTIPLE,
    layers: Annotated[
        Layers, typer.Option(help="Whose names its parameters have; grouped: local, with a rank's experts in two matrices.")
    ] = Layers.local,
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
    kind, path = kind_of(source, iteration)
    written = file_format if kind is Kind.hf and config is None and adapter is None else None
    counts = zip(RANKS, (tensor, pipeline, virtual_pipeline, expert, expert_tensor), strict=True)
    ranks = {option: count for option, count in counts if count is not None}
    other = {"--vocab-multiple": (vocab_multiple, VOCAB_MULTIPLE), "--layers": (layers, Layers.local)}
    other |= {"--format": (file_format, CheckpointFormat.torch), "--iteration": (iteration, None)}
    given = ranks | {option: value for option, (value, default) in other.items() if value != default}
    check_used(given, kind, written, merges=adapter is not None)
    described = source if config is None else config
    if not (described / "config.json").is_file():
        raise ConfigError(
            f"a config.json in {described}, which describes the model",
            "none",
            "Name a Hugging Face directory of the model with --config.",
        )
    arch = load_architecture(described)
    arch = arch.with_value_head() if orm else arch
    engine = layers is Layers.transformer_engine
    mesh = Rank(
        tp=tensor or 1,
        pp=pipeline or 1,
        ep=expert or 1,
        vocab_multiple=vocab_multiple,
        vpp=virtual_pipeline or 1,
        etp=0 if expert_tensor == (tensor or 1) else expert_tensor or 0,
    )
    if written is CheckpointFormat.torch:
        check_layout(arch, mesh, layers)
    elif written is CheckpointFormat.torch_dist and layers is Layers.grouped:
        raise ConfigError(
            "--layers local or transformer_engine for the format torch_dist", layers.value, "Use local: the files are the same."
        )
    with ExitStack() as stack:
        tensors = read(stack, kind, path, arch, {RANKS[option]: count for option, count in ranks.items()})
        if adapter is not None:
            tensors = with_adapter(tensors, adapter, hf_mapping.hf_shapes(arch))
        folder = stack.enter_context(new_directory(target))
        if written is CheckpointFormat.torch_dist:
            torch_dist_writer.write(folder, arch, tensors, vocab_multiple, engine=engine)
        elif written is CheckpointFormat.torch:
            rank_files_writer.write(folder, arch, tensors, mesh, STORED[layers])
        else:
            hf_directory.write(folder, tensors, described, critic=orm)
    print(f"{target}: {arch.parameters:,} parameters of {arch.family.name}" + (", a critic" if orm else ""))


def kind_of(source: Path, iteration: int | None) -> tuple[Kind, Path]:
    """The kind of the source, and the file or directory with its weights. Raises ConfigError."""
    if source.is_file():
        return Kind.state_dict, source
    if not source.is_dir():
        raise ConfigError("a file or directory to convert", f"no {source}", "Give one that is there.")
    if (source / "config.json").is_file() and not rank_files.is_checkpoint(source):
        return Kind.hf, source
    folder = rank_files.folder_of_iteration(source, iteration)
    return (Kind.torch_dist if (folder / torch_dist.INDEX).is_file() else Kind.rank_files), folder


def read(stack: ExitStack, kind: Kind, path: Path, arch: Architecture, ranks: Mapping[str, int]) -> Mapping[str, Tensor]:
    """The source's tensors by Hugging Face's names, checked. `ranks`: see `RankFiles`. Raises ConfigError."""
    match kind:
        case Kind.state_dict:
            return state_dict.read(path, arch)
        case Kind.hf:
            return stack.enter_context(hf_directory.read(path, arch))
        case Kind.torch_dist:
            return torch_dist.TorchDist(path, arch)
        case Kind.rank_files:
            return rank_files.RankFiles(path, arch, ranks)


def check_used(given: Mapping[str, object], kind: Kind, written: CheckpointFormat | None, *, merges: bool) -> None:
    """Raises ConfigError for options that a conversion does not use.

    Args:
        given: the options of Megatron checkpoints that differ from their defaults.
        written: the format of the Megatron checkpoint to write; None: a Hugging Face directory is written.
        merges: whether an adapter is merged.
    """
    used = set[str]()
    if written is not None:
        used |= {"--format", "--vocab-multiple", "--layers"}
    if written is CheckpointFormat.torch or kind is Kind.rank_files:
        used |= RANKS.keys()
    if kind in (Kind.rank_files, Kind.torch_dist):
        used.add("--iteration")
    unused = ", ".join(f"{option} {value}" for option, value in given.items() if option not in used)
    if not unused:
        return
    if written is CheckpointFormat.torch_dist or kind is Kind.torch_dist:
        raise ConfigError(
            "no layout for the format torch_dist", unused, "Leave them out: every layout loads the same checkpoint."
        )
    if merges:
        raise ConfigError(
            "no layout together with --adapter, which writes a Hugging Face directory",
            unused,
            "Merge the adapter first, then convert the merged directory.",
        )
    raise ConfigError(f"only options that the conversion of {kind} uses", unused, "Leave them out.")


def check_layout(arch: Architecture, mesh: Rank, layers: Layers) -> None:
    """Raises ConfigError when the model does not divide over the layout, or the files cannot have it."""
    try:
        layout.check(arch, mesh)
    except ValueError as error:
        raise ConfigError("a model that divides over the ranks", str(error), f"Change {', '.join(RANKS)}.") from None
    if layers is Layers.transformer_engine and arch.experts:
        raise ConfigError(
            "--layers local or grouped for a model with experts",
            layers.value,
            "Transformer Engine names experts by its version; use one of the others.",
        )
    if layers is Layers.grouped and not arch.experts:
        raise ConfigError("a model with experts for --layers grouped", arch.family.name, "Leave --layers out.")


def with_adapter(tensors: Mapping[str, Tensor], folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> LazyTensors:
    """A model's tensors with W + scale B A in place of each W that the adapter of a directory adapts: computed in float32 at
    access, in the dtype of W. `shapes`: the model's. Raises ConfigError unless the adapter fits."""
    adapter = read_adapter(folder)
    for name, (a, b) in adapter.pairs.items():
        if name not in shapes or (b.shape[0], a.shape[1]) != shapes[name] or a.shape[0] != b.shape[1]:
            raise ConfigError(
                f"an adapter in {folder} of the model's weights",
                f"A {tuple(a.shape)} and B {tuple(b.shape)} for {name}, which is {shapes.get(name, 'no weight of the model')}",
                "Give an adapter that was trained for this model.",
            )

    def read(name: str) -> Tensor:
        weight = tensors[name]
        if name not in adapter.pairs:
            return weight
        a, b = adapter.pairs[name]
        return weight.float().addmm(b.float(), a.float(), alpha=adapter.scale).to(weight.dtype)

    return LazyTensors(tensors, read)
