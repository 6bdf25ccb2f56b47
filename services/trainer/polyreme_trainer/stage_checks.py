"""The trainer's check of a stage before anything starts: model family, tokenizer, chat template, columns and labels of the data.

Invariant: the check imports no torch and does bounded work. Of a long file it checks only the first rows; the others are checked when the stage
reads them.
"""

from collections.abc import Iterator

from polyreme.config.data import DataSource
from polyreme.config.stage import StageConfig
from polyreme.dataset.source import as_sources, name_of
from polyreme.errors import ConfigError, DataError, PolyremeError, results
from polyreme.process.machine import memory_limit
from polyreme.rundir.input_files import MODEL_FILES, is_there, read_model_files
from polyreme_trainer.checks import check_device, check_template
from polyreme_trainer.data.template import Template
from polyreme_trainer.expert_checks import check_experts
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.memory.memory_estimate import fit_errors
from polyreme_trainer.stages.table import TABLE

_ENCODED = 1_000
"""Number of rows of a file that are encoded with the template and the tokenizer."""


def check(config: StageConfig) -> Iterator[str | PolyremeError]:
    """Yields notices and errors about everything that a stage reads. A missing file is an error of the core, so what needs it is left out
    here."""
    yield from check_device(config.device)
    if (config.model.path / "config.json").is_file():
        yield from results(_check_model(config))
    if not all((config.model.path / name).is_file() for name in MODEL_FILES):
        return  # rows are read with the template
    template = Template(read_model_files(config.model.path), config.data)
    found = (tuple(filter(is_there, as_sources(data))) for data in config.data.given)
    yield from results(check_template(template), *(_check_rows(sources, config, template) for sources in found if sources))


def _check_model(config: StageConfig) -> Iterator[PolyremeError]:
    """What follows from config.json. Raises ConfigError for a model that is unknown."""
    model, reference = load_architecture(config.model.path), TABLE[config.stage].reference(config)
    yield from check_experts(config)
    if reference is not None and not (reference / "config.json").is_file():
        return
    if reference is not None and (tokens := load_architecture(reference).vocab) < model.vocab:
        yield ConfigError(
            f"a reference with the model's {model.vocab} tokens", f"{tokens}", "Use a reference with the model's tokenizer."
        )
    yield from fit_errors(config, memory_limit() if config.device == "cpu" else None)


def _check_rows(sources: tuple[DataSource, ...], config: StageConfig, template: Template) -> Iterator[str | PolyremeError]:
    try:
        rows = TABLE[config.stage].read(sources, config, template, _ENCODED)
    except DataError as error:
        yield error
        return
    seen = len(rows) + sum(rows.left_out.values())
    for reason, count in rows.left_out.items():
        first = "the first " if seen == _ENCODED else ""
        yield f"{count} of {first}{seen} rows in {name_of(sources)} are left out: {reason}"
