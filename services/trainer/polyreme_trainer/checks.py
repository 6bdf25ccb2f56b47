"""The trainer's check of a run before any process starts: model family, tokenizer, chat template, data.

Invariant: the check imports no torch and does bounded work. Of a long file it reads the first rows only; the others are checked when the
run reads them.
"""

import inspect
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import psutil  # type: ignore[import-untyped]

from polyreme.cli.input_files import read_model_files
from polyreme.config.algorithm import AlgorithmSource
from polyreme.config.notices import CommandConfig, ReceiverConfig
from polyreme.config.python_source import FUNCTIONS, parse, stand_in_for
from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError, DataError, PolyremeError
from polyreme.net import tls
from polyreme_trainer.data.prompts import all_too_long, encode_examples, encode_prompts, read_rows
from polyreme_trainer.data.template import Template
from polyreme_trainer.megatron.families import load_architecture

_PARSED = 20_000
"""How many rows of a file have their columns checked."""
_ENCODED = 1_000
"""How many rows of a file pass through the template and the tokenizer."""


def check(config: RunConfig) -> Iterator[str | PolyremeError]:
    """Yields notices and errors about everything that the trainer will read."""
    for tracker in config.trackers:
        if find_spec(tracker.module) is None:
            yield ConfigError(
                f"the package {tracker.package}, which the tracker {tracker.kind} needs",
                "none that Python finds here",
                f"Install it where the trainer runs: pip install {tracker.package}",
            )
    yield from _check_notices(config.notices)
    try:
        load_architecture(config.model.path)
    except ConfigError as error:
        yield error
    else:
        if config.device == "cpu":
            yield from _check_memory(config, psutil.virtual_memory().total)
    template = Template(
        read_model_files(config.model.path), config.data
    )  # raises when there is none: nothing else can be checked then
    yield from check_template(template)
    for path in filter(None, (config.data.train, config.data.eval)):
        yield from _check_prompts(path, config, template)
    for phase in config.trainer.sft:
        yield from _check_examples(phase.data, config, template)
    if config.teacher is not None and (security := config.teacher.security) is not None:
        tls.client_context(security)
        tls.token(security)
    if config.algorithm.ptx is not None:
        yield from _check_examples(config.algorithm.ptx.data, config, template)
    if config.algorithm.source is not None:
        yield from _check_functions(config.algorithm.source)
    if config.algorithm.has_critic and config.trainer.critic.path is not None:
        yield from _check_critic(config.trainer.critic.path, config)


def _check_notices(receivers: Sequence[ReceiverConfig]) -> Iterator[PolyremeError]:
    """Yields an error for each receiver that could never be reached."""
    for receiver in receivers:
        if isinstance(receiver, CommandConfig):
            if which(receiver.command[0]) is None:
                yield ConfigError(
                    f"a program {receiver.command[0]} for notices", "none on the PATH", "Fix the path in notices.command."
                )
        elif receiver.token_env is not None and not os.environ.get(receiver.token_env):
            yield ConfigError(
                f"a token in the environment variable {receiver.token_env}",
                "none",
                "Set it where the trainer runs, or remove notices.token_env.",
            )


def check_template(template: Template) -> Iterator[str | PolyremeError]:
    """Whether the tokenizer fits the embeddings, and the chat template the stop tokens."""
    if template.tokens > template.embeddings:
        yield ConfigError(
            f"a tokenizer of at most {template.embeddings} tokens, the model's embeddings (vocab_size in config.json)",
            f"one of {template.tokens}",
            "Use the tokenizer that belongs to the model, or resize the model's embeddings.",
        )
    if template.unstopped:
        end = template.decode([[template.end_id]], special=True)[0]
        yield (
            f"the chat template ends an answer with {' '.join(template.unstopped)}, which stops no rollout; {end} does."
            " Add its id to eos_token_id in generation_config.json if it should"
        )


def _check_functions(source: AlgorithmSource) -> Iterator[PolyremeError]:
    """Checks the source text only. The learner runs the functions on a synthetic batch before it trains."""
    where = str(source.path)
    bound = parse(source.code(), where)
    if not {"advantages", "loss", "*"} & bound.keys():
        yield ConfigError(f"a function `advantages` or `loss` in {where}", "neither", "Define one of them, or both.")
    for name in {"advantages", "loss"} & bound.keys():
        node = bound[name]
        if isinstance(node, FUNCTIONS) and not node.decorator_list:
            try:
                inspect.signature(stand_in_for(node)).bind(None)
            except TypeError as error:
                yield ConfigError(f"`{name}` in {where} to take one argument", str(error), "Fix its parameters.")


def _check_critic(path: Path, config: RunConfig) -> Iterator[PolyremeError]:
    actor, critic = load_architecture(config.model.path), load_architecture(path)
    if critic.vocab < actor.vocab or critic.max_position < config.rollout.max_model_len:
        yield ConfigError(
            f"a critic that reads the actor's {actor.vocab} tokens and {config.rollout.max_model_len} positions",
            f"vocab_size {critic.vocab} and max_position_embeddings {critic.max_position} in {path}",
            "Use a critic with the actor's tokenizer, or remove trainer.critic.path.",
        )


def _check_memory(config: RunConfig, total: int) -> Iterator[PolyremeError]:
    """Compares the memory of the learner's models with the `total` bytes of this machine. Activations, replicas and rewards need more."""
    parallel, width = config.trainer.parallel, 2 if config.model.dtype == "bfloat16" else 4
    trained = 16 + (width if width == 2 else 0)  # weights, gradients and two moments in float32, plus bfloat16 weights
    actor = load_architecture(config.model.path).parameters
    models = {"actor": (actor, trained)}
    if config.algorithm.has_critic:
        path = config.trainer.critic.path
        models["critic"] = (actor if path is None else load_architecture(path).parameters, trained)
    if config.recipe.kl is not None:
        models["reference"] = (actor, width)
    if config.trainer.ema_decay is not None:
        models["moving average"] = (actor, 4)
    copies = max(1, parallel.ranks_per_node // parallel.tensor)
    needed = copies * sum(parameters * each for parameters, each in models.values())
    if needed > total:
        terms = " + ".join(f"{name} {parameters:,} x {each} bytes" for name, (parameters, each) in models.items())
        yield ConfigError(
            f"a learner that fits the {total / 2**30:,.1f} GiB of this machine",
            f"{copies} x ({terms}) = {needed / 2**30:,.1f} GiB, before activations",
            "Use fewer data ranks, more machines (trainer.parallel), a smaller model, or an algorithm with fewer models.",
        )


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
            f" {config.data.max_prompt_tokens} and are left out"
        )


def _check_examples(path: Path, config: RunConfig, template: Template) -> Iterator[PolyremeError]:
    try:
        rows = read_rows(path, config.data, response_key="response", limit=_PARSED)
        encode_examples(rows[:_ENCODED], path, template, config.rollout.max_model_len)
    except DataError as error:
        yield error
