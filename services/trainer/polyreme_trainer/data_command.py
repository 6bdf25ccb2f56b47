"""`polyreme data`: shows what data becomes in training, and rewrites data of other systems in our columns.

Invariant: `check` writes no file. `convert` writes its target whole or not at all, and never over a file that exists.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from polyreme.config.data import DataConfig, Sources
from polyreme.config.load import load_any
from polyreme.config.named_input import TRAINING
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.dataset.chat import Message
from polyreme.dataset.columns import TokenIds
from polyreme.dataset.formats import FORMATS, format_of, to_ours
from polyreme.dataset.reading import watched
from polyreme.dataset.source import bytes_of, files_of, name_of, read_objects
from polyreme.dataset.text_files import Row
from polyreme.errors import ConfigError, DataError
from polyreme.hub.resolve import resolve_names, resolve_path
from polyreme.rundir.input_files import read_model_files
from polyreme.terminal.completion import one_of
from polyreme.terminal.progress_bar import bar
from polyreme_trainer.data.prompts import Example
from polyreme_trainer.data.report import Report, are_examples, report_examples, report_prompts, report_rows
from polyreme_trainer.data.template import Template
from polyreme_trainer.stages.table import TABLE

_SHOWN = 3
"""Maximum number of repeated or shared rows that are named."""
_LONGEST_EXAMPLE = 400
"""Maximum number of tokens of an example that are printed."""

TOOLS_GROUP = "polyreme.declared_tools"
"""Entry points that take a section `environment` and return the schemas of its built-in tools, by name."""

data = typer.Typer(no_args_is_help=True, help="Check data as a run reads it, or convert data of other systems.")


@data.command("check")
def check(
    config: Annotated[Path, typer.Option(help="The YAML file of a run or a stage.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE] [KEY=VALUE]...",
            help="The data, if not data.train of the configuration; then overrides, such as data.prompt_key=question.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print rows, lengths, repeated rows, rows shared with each held-out set, and the first row's tokens."""
    file, overrides = file_and_overrides(words or [])
    resolved = resolve_names(load_any(config, overrides))
    file = None if file is None else resolve_path(file, TRAINING, "FILE")
    template = Template(read_model_files(resolved.model.path), resolved.data)

    def report(sources: Sources) -> Report:
        with bar(f"reading {name_of(sources)}", bytes_of(sources)) as count, watched(count):
            return report_of(sources)

    def report_of(sources: Sources) -> Report:
        if isinstance(resolved, StageConfig):
            return report_rows(sources, resolved, template, TABLE[resolved.stage].read)
        if sources == file and file.resolve() != resolved.data.train and are_examples(sources, resolved.data):
            return report_examples(sources, resolved, template)
        return report_prompts(sources, resolved, template, declared_tools(resolved))

    found = report(file or resolved.data.train)
    held_out: dict[str, Report | DataError] = {}
    for name, sources in held_out_sets(resolved).items():
        if file is None or sources != file.resolve():
            try:
                held_out[name] = report(sources)
            except DataError as error:
                if file is None:
                    raise
                held_out[name] = error  # another file may lack this file's columns
    console = Console(highlight=False, soft_wrap=True)
    for line in report_lines(found, held_out):
        console.print(line, markup=False)
    for example in found.example:
        console.print(tokens_text(example, template.token_texts(example.ids[:_LONGEST_EXAMPLE].tolist())))


def file_and_overrides(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The words of a command that takes an optional file before key=value overrides. A file whose name has a `=` must exist."""
    names_file = bool(words) and ("=" not in words[0] or Path(words[0]).exists())
    return (Path(words[0]), list(words[1:])) if names_file else (None, list(words))


@data.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(help="Data of any known format.")],
    target: Annotated[Path, typer.Argument(help="The JSON lines file to write.")],
    format: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(each.name for each in FORMATS)}; none: by the columns.",
            show_default=False,
            autocompletion=one_of(each.name for each in FORMATS),
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory whose tokenizer wrote the token ids of Megatron's files.")
    ] = None,
) -> None:
    """Rewrite data of another system as JSON lines with our columns."""
    source = resolve_path(source, TRAINING, "SOURCE")
    if target.exists():
        raise ConfigError(f"no file {target} yet", "one is there", "Choose another target, or remove the file.")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"a folder for {target}", "none", "Create it, or choose another target.")
    kinds = {each.name: each for each in FORMATS}
    if format is not None and format not in kinds:
        raise ConfigError(f"--format {', '.join(kinds)}", format, "Choose one of these.")
    rows = read_objects(source)
    if files_of(source)[0].suffix in (".idx", ".bin"):
        rows = map_tokens(rows, model)
    count, names = 0, dict[str, int]()
    with (
        bar(f"reading {source}", bytes_of(source)) as advance,
        watched(advance),
        tempfile.NamedTemporaryFile("w", dir=target.absolute().parent, suffix=".part", delete=False, encoding="utf-8") as file,
    ):
        try:
            for where, fields in rows:
                kind = format_of(fields) if format is None else kinds[format]
                file.write(json.dumps(to_ours(fields, kind, where), ensure_ascii=False) + "\n")
                count, names[kind.name] = count + 1, names.get(kind.name, 0) + 1
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
    print(f"{target}: {count} rows of the format {', '.join(names)}")


def map_tokens(rows: Iterator[Row], model: Path | None) -> Iterator[Row]:
    """Rows of token ids as texts: `input_ids` as the prompt, which is already templated, and `labels` as the answer."""
    if model is None:
        raise ConfigError("--model for token ids", "none", "Name the model whose tokenizer wrote them.")
    template = Template(read_model_files(model), DataConfig(train=model, template="none"))
    for where, fields in rows:
        if not isinstance(ids := fields.get("input_ids"), TokenIds):
            raise DataError(f"a column input_ids in {where}", f"columns {sorted(fields)}", "Name the files of the prompts.")
        texts: dict[str, object] = {"prompt": template.render([ids])[0]}
        if isinstance(labels := fields.get("labels"), TokenIds):
            texts["answer"] = template.decode([labels], special=False)[0]
        yield Row(where, texts)


def declared_tools(config: RunConfig) -> dict[str, Message] | None:
    """The built-in tools of a run as its environment service declares them, by name; None for a run without tools."""
    if config.environment is None or not config.environment.tools:
        return None
    found = [point.load()(config.environment) for point in entry_points(group=TOOLS_GROUP)]
    return {name: schema for each in found for name, schema in each.items()}


def held_out_sets(config: RunConfig | StageConfig) -> dict[str, Sources]:
    """The data of the configuration's evaluations, by name."""
    if isinstance(config, StageConfig):
        return {} if config.data.eval is None else {"data.eval": config.data.eval}
    return {f"the set {each.name}" if each.name else "data.eval": each.data for each in config.evaluation_sets}


def report_lines(found: Report, held_out: Mapping[str, Report | DataError]) -> Iterator[str]:
    """The report as lines of text. `held_out`: by name, the reports on data that must share no row with it, or their errors."""
    lengths = np.array(found.lengths)
    low, middle, high = (int(np.percentile(lengths, q)) for q in (5, 50, 95))
    yield f"rows        {len(lengths):,}"
    yield (
        f"tokens      {lengths.sum():,}; per row at least {lengths.min()}, 5% {low}, median {middle}, 95% {high}, "
        f"at most {lengths.max()}"
    )
    yield f"overlong    {found.overlong} of more than {found.limit} tokens"
    if found.tools is not None:
        yield (
            f"tools       {', '.join(found.tools) or 'none'} in the example, beside those of files and MCP servers, "
            "which declare them in a run"
        )
    for reason, count in found.left_out.items():
        yield f"left out    {count}: {reason}"
    if found.unlabelled is not None:
        yield f"unlabelled  {found.unlabelled} without a reference answer"
    yield f"duplicates  {len(found.repeated)}{_named(found.repeated)}"
    for name, other in held_out.items():
        if isinstance(other, DataError):
            yield f"leaks       not checked in {name}: {other}"
            continue
        shared = found.shared_with(other)
        yield f"leaks       {len(shared)} prompts are in {name}, too{_named(shared)}"


def _named(pairs: Sequence[tuple[str, str]]) -> str:
    some = "; ".join(f"{where} as {other}" for where, other in pairs[:_SHOWN])
    return f": {some}{', ...' if len(pairs) > _SHOWN else ''}" if pairs else ""


def tokens_text(example: Example, texts: Sequence[str]) -> Text:
    """A sequence with a background per token; tokens that are trained on are green. A bar separates tokens without colours."""
    shown = Text("example     " + (f"(the first {len(texts)} tokens) " if len(texts) < len(example.ids) else ""))
    for place, text in enumerate(texts):
        trained = bool(example.loss_mask[place])
        if place and bool(example.loss_mask[place - 1]) != trained:
            shown.append(" [trained:] " if trained else " [not trained:] ", style="dim")
        shown.append("|" if place else "", style="dim")
        shown.append(text, style=f"{'bold green' if trained else 'white'} on {('grey23', 'grey11')[place % 2]}")
    return shown
