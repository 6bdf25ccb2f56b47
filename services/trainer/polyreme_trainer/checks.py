"""The trainer's check of a run before anything starts: model family, tokenizer, chat template, data.

Invariant: no torch, and bounded work: of long files, the first rows stand for the rest, which are checked when they are read.
"""

from collections.abc import Iterator
from pathlib import Path

from polyreme.cli.run_directory import read_model_files
from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError, DataError, PolyremeError
from polyreme_trainer.data.prompts import all_too_long, encode_examples, encode_prompts, read_rows
from polyreme_trainer.data.template import Template
from polyreme_trainer.megatron.families import load_architecture

_PARSED = 20_000
"""Rows of a file whose columns are checked."""
_ENCODED = 1_000
"""Rows of a file that go through template and tokenizer."""


def check(config: RunConfig) -> Iterator[str | PolyremeError]:
    """Notices and errors of what the trainer reads of a run."""
    try:
        load_architecture(config.model.path)
    except ConfigError as error:
        yield error
    template = Template(read_model_files(config.model.path), config.data)  # without one there is nothing else to check
    if template.tokens > template.embeddings:
        yield ConfigError(
            f"a tokenizer of at most {template.embeddings} tokens, the model's embeddings (vocab_size in config.json)",
            f"one of {template.tokens}",
            "Take the tokenizer that belongs to the model, or resize the model's embeddings.",
        )
    if template.unstopped:
        end = template.decode([[template.end_id]], special=True)[0]
        yield (
            f"the chat template ends an answer with {' '.join(template.unstopped)}, which stops no rollout; {end} does."
            " Add its id to eos_token_id in generation_config.json if it should"
        )
    for path in filter(None, (config.data.train, config.data.eval)):
        yield from _check_prompts(path, config, template)
    for phase in config.trainer.sft:
        yield from _check_examples(phase.data, config, template)


def _check_prompts(path: Path, config: RunConfig, template: Template) -> Iterator[str | PolyremeError]:
    try:
        rows = read_rows(path, config.data, limit=_PARSED)
        dataset = encode_prompts(rows[:_ENCODED], path, config.data, template)
    except DataError as error:
        yield error
        return
    if dataset.filtered and not dataset.prompts and len(rows) <= _ENCODED:
        yield all_too_long(dataset, path, config.data)
    elif dataset.filtered:
        seen = "" if len(rows) <= _ENCODED else "the first "
        yield (
            f"{dataset.filtered} of {seen}{len(rows[:_ENCODED])} prompts in {path} are longer than data.max_prompt_tokens ="
            f" {config.data.max_prompt_tokens} and left out"
        )


def _check_examples(path: Path, config: RunConfig, template: Template) -> Iterator[PolyremeError]:
    try:
        rows = read_rows(path, config.data, response_key="response", limit=_PARSED)
        encode_examples(rows[:_ENCODED], path, template, config.rollout.max_model_len)
    except DataError as error:
        yield error
