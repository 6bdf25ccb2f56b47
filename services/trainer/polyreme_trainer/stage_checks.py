"""The trainer's check of a stage before anything starts: model family, tokenizer, chat template, columns and labels of the data.

Invariant: the check imports no torch and does bounded work. Of a long file it checks only the first rows; the others are checked when the stage
reads them.
"""

from collections.abc import Iterator

from polyreme.cli.input_files import read_model_files
from polyreme.config.data import Sources
from polyreme.config.stage import StageConfig
from polyreme.dataset.source import name_of
from polyreme.errors import ConfigError, DataError, PolyremeError
from polyreme.process.machine import memory_limit
from polyreme_trainer.checks import check_template
from polyreme_trainer.data.template import Template
from polyreme_trainer.expert_checks import check_experts
from polyreme_trainer.megatron.families import load_architecture
from polyreme_trainer.memory_estimate import refuse
from polyreme_trainer.stages.table import TABLE

_ENCODED = 1_000
"""Number of rows of a file that are encoded with the template and the tokenizer."""


def check(config: StageConfig) -> Iterator[str | PolyremeError]:
    """Yields notices and errors about everything that a stage reads."""
    stage = TABLE[config.stage]
    try:
        model = load_architecture(config.model.path)
        if (reference := stage.reference(config)) is not None and load_architecture(reference).vocab < model.vocab:
            yield ConfigError(
                f"a reference with the model's {model.vocab} tokens",
                f"{load_architecture(reference).vocab}",
                "Use a reference with the model's tokenizer.",
            )
    except ConfigError as error:
        yield error
    else:
        yield from check_experts(config)
        yield from refuse(config, memory_limit() if config.device == "cpu" else None)
    template = Template(
        read_model_files(config.model.path), config.data
    )  # raises when there is none: nothing else can be checked then
    yield from check_template(template)
    for sources in config.data.given:
        yield from _check_rows(sources, config, template)


def _check_rows(sources: Sources, config: StageConfig, template: Template) -> Iterator[str | PolyremeError]:
    try:
        rows = TABLE[config.stage].read(sources, config, template, _ENCODED)
    except DataError as error:
        yield error
        return
    seen = len(rows) + sum(rows.left_out.values())
    for reason, count in rows.left_out.items():
        first = "the first " if seen == _ENCODED else ""
        yield f"{count} of {first}{seen} rows in {name_of(sources)} are left out: {reason}"
