"""The trainer's check of a run or a stage before any process starts: model family, tokenizer, chat template, data.

Invariant: the check imports no torch and does bounded work. Of a long file it reads the first rows only; the others are checked
when the run reads them. A setting that does not apply to the model is an error and is never ignored.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from shutil import which

from polyreme.config.data import DataSource, Sources
from polyreme.config.notices import CommandConfig, ReceiverConfig
from polyreme.config.python_source import FUNCTIONS, parse, stand_in_for
from polyreme.config.recipes.algorithm import AlgorithmSource
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.dataset.source import as_sources, name_of
from polyreme.errors import AbsentError, ConfigError, DataError, PolyremeError, results
from polyreme.net import tls
from polyreme.process.machine import device_count, has_device, memory_limit
from polyreme.rundir.input_files import MODEL_FILES, is_there, read_model_files
from polyreme_trainer.data.prompts import LabelCount, encode_prompts, none_usable, read_rows
from polyreme_trainer.data.supervised import encode_examples, read_examples
from polyreme_trainer.data.template import Template
from polyreme_trainer.data.tokenizer_files import load_tokenizer
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.memory.memory_estimate import fit_errors
from polyreme_trainer.memory.placement import advice
from polyreme_trainer.observe.trackers.protocol import check_trackers
from polyreme_trainer.stages.table import TABLE

_PARSED = 20_000
"""Number of rows per file whose columns are checked."""
_ENCODED = 1_000
"""Number of rows per file that are encoded with the template and the tokenizer."""
SILENT_ENGINES = ("vllm",)
"""The engines of this distribution that report no routes. For any other engine, the replica checks this when it starts."""


def check(config: RunConfig | StageConfig) -> Iterator[str | PolyremeError]:
    """Yields notices and errors about what the trainer reads. A missing file is the core's error: what needs it is omitted."""
    yield from results(check_trackers(config.trackers), _check_notices(config.notices))
    yield from check_device(config.device)
    if isinstance(config, RunConfig) and config.device != "cpu":
        yield from advice(config, device_count(config.device))
    if (config.model.path / "config.json").is_file():
        yield from results(_check_model(config) if isinstance(config, RunConfig) else _check_stage_model(config))
    template = None
    if all((config.model.path / name).is_file() for name in MODEL_FILES):
        try:
            template = Template(read_model_files(config.model.path), config.data)
        except PolyremeError as error:
            yield error
    rows = _run_data(config, template) if isinstance(config, RunConfig) else _stage_data(config, template)
    yield from results(*([check_template(template)] if template else []), *rows)


def _run_data(config: RunConfig, template: Template | None) -> Iterator[Iterator[str | PolyremeError]]:
    """The checks of what a run reads besides its model."""
    yield from (_check_data(data, config, template) for data in config.prompt_data)
    yield from (_check_examples(data, config, template) for data in _supervised(config))
    yield _check_teacher(config)
    if config.algorithm.source is not None:
        yield _check_functions(config.algorithm.source)


def _stage_data(config: StageConfig, template: Template | None) -> Iterator[Iterator[str | PolyremeError]]:
    """The checks of a stage's rows, which are read with the template."""
    found = (tuple(filter(is_there, as_sources(data))) for data in config.data.given)
    yield from (_check_rows(sources, config, template) for sources in found if sources and template)


def check_device(kind: str, has: Callable[[str], bool] | None = None) -> Iterator[PolyremeError]:
    """Yields an error when this machine has no device of the kind. has: whether it has one; None: it is asked."""
    if kind != "cpu" and not (has or has_device)(kind):
        yield AbsentError(
            f"a {kind} device on this machine (device: {kind})",
            "none",
            "Train on a machine that has one, in a container pass it through, or use device: cpu.",
        )


def _check_model(config: RunConfig) -> Iterator[str | PolyremeError]:
    """What follows from config.json. Raises ConfigError for a model that is unknown."""
    arch, critic = load_architecture(config.model.path), config.trainer.critic.path if config.algorithm.has_critic else None
    checks = [_check_engine(arch, config), check_experts(config)]
    if critic is None or (critic / "config.json").is_file():
        checks.append(fit_errors(config, memory_limit() if config.device == "cpu" else None))
        longest = config.rollout.max_model_len
        checks += [] if critic is None else [_check_reader("critic", critic, config.model.path, longest)]
    yield from results(*checks)


def _supervised(config: RunConfig) -> Iterator[Sources]:
    """The data of supervised rows."""
    yield from (phase.data for phase in config.trainer.sft)
    if config.algorithm.ptx is not None:
        yield config.algorithm.ptx.data


def _check_teacher(config: RunConfig) -> Iterator[PolyremeError]:
    if config.teacher is not None and (security := config.teacher.security) is not None:
        tls.client_context(security)
        tls.token(security)
    yield from ()


def _check_engine(arch: Architecture, config: RunConfig) -> Iterator[PolyremeError]:
    """Yields an error when a pushed version would leave an output layer of the engine as it was."""
    if arch.head == "tied" and config.rollout.engine == "vllm" and not arch.family.vllm_ties:
        yield ConfigError(
            f"an engine that ties the output layer of {config.model.path} to its embeddings",
            f"rollout.engine: vllm, whose {arch.family.name} has a separate output layer",
            "Save the model with tie_word_embeddings: false and an lm_head.weight.",
        )


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


def _check_reader(role: str, path: Path, model: Path, positions: int) -> Iterator[PolyremeError]:
    """Yields an error unless the model at `path` reads every token of `model`, as the same text, and sequences of so many
    positions."""
    found, tokens = load_architecture(path), load_architecture(model).vocab
    do = f"Use a {role} with the model's tokenizer and a context as long, or none."
    if found.vocab < tokens or found.max_position < positions:
        yield ConfigError(
            f"a {role} that reads the model's {tokens} tokens and {positions} positions",
            f"vocab_size {found.vocab} and max_position_embeddings {found.max_position} in {path}",
            do,
        )
    files = [each / "tokenizer.json" for each in (model, path)]
    if path != model and all(file.is_file() for file in files):
        own, other = (load_tokenizer({file.name: file.read_bytes()}).backend_tokenizer for file in files)
        words, texts = own.get_vocab(False), {id: text for text, id in other.get_vocab(True).items()}
        # an id that it has no text for may be an added token of the model; it has a row of the embeddings
        if differing := sum(texts.get(id, "" if text in words else text) != text for text, id in own.get_vocab(True).items()):
            yield ConfigError(f"a {role} with the model's tokenizer", f"{differing} other tokens in {files[1]}", do)


def _check_data(sources: Sources, config: RunConfig, template: Template | None) -> Iterator[str | PolyremeError]:
    """The rows of each file, then the labels of all."""
    labels = LabelCount()
    for source in filter(is_there, as_sources(sources)):
        yield from _check_prompts((source,), config, template, labels)
    try:
        labels.check(sources, config.data)
    except DataError as error:
        yield error


def _check_prompts(
    sources: tuple[DataSource, ...], config: RunConfig, template: Template | None, labels: LabelCount
) -> Iterator[str | PolyremeError]:
    try:
        rows = list(islice(read_rows(sources, config.data), _PARSED))
        labels.add(rows)
        if template is None:
            return
        dataset = encode_prompts(rows[:_ENCODED], config.data, template)
    except DataError as error:
        yield error
        return
    if dataset.filtered and not dataset.prompts and len(rows) <= _ENCODED:
        yield none_usable(sources, config.data, dataset.filtered)
    elif dataset.filtered:
        seen = "" if len(rows) <= _ENCODED else "the first "
        yield (
            f"{dataset.filtered} of {seen}{len(rows[:_ENCODED])} prompts in {name_of(sources)} are longer than "
            f"data.max_prompt_tokens = {config.data.max_prompt_tokens} and are left out"
        )


def _check_examples(data: Sources, config: RunConfig, template: Template | None) -> Iterator[PolyremeError]:
    sources = tuple(filter(is_there, as_sources(data)))
    if not sources:
        return
    try:
        rows = list(islice(read_examples(sources, config.data), _PARSED))
        if template is not None:
            encode_examples(rows[:_ENCODED], template, config.rollout.max_model_len)
    except DataError as error:
        yield error


def _check_stage_model(config: StageConfig) -> Iterator[PolyremeError]:
    """What follows from config.json. Raises ConfigError for a model that is unknown."""
    reference = TABLE[config.stage].reference(config)
    yield from check_experts(config)
    if reference is not None and not (reference / "config.json").is_file():
        return
    if reference is not None:
        yield from _check_reader("reference", reference, config.model.path, config.data.max_tokens)
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


def check_experts(config: RunConfig | StageConfig) -> Iterator[PolyremeError]:
    """Yields an error for each setting that needs experts where the model has none. Raises ConfigError for an unknown model."""
    arch = load_architecture(config.model.path)
    replays = isinstance(config, RunConfig) and config.trainer.moe.replay_routes
    if (config.trainer.moe.is_set or replays) and not arch.experts:
        yield ConfigError("a model with experts, for trainer.moe", f"{arch.family.name}, which is dense", "Remove trainer.moe.")
    if config.trainer.moe.bias_update_rate and arch.experts and arch.family.scores != "sigmoid":
        yield ConfigError(
            "a model with an expert bias, for trainer.moe.bias_update_rate",
            f"{arch.family.name}, which has none",
            "Remove trainer.moe.bias_update_rate; trainer.moe.aux_loss_coef balances these experts.",
        )
    if config.trainer.moe.bias_update_rate and config.trainer.lora is not None:
        yield ConfigError(
            "trainer.moe.bias_update_rate: 0 with trainer.lora, whose base model is frozen with its expert biases",
            f"{config.trainer.moe.bias_update_rate:g}",
            "Remove one of the two.",
        )
    if isinstance(config, RunConfig) and replays and config.rollout.engine in SILENT_ENGINES:
        yield ConfigError(
            "an engine that reports the experts that it chooses, for trainer.moe.replay_routes",
            f"rollout.engine: {config.rollout.engine}, which does not",
            "Remove trainer.moe.replay_routes, or use an engine that reports its routes.",
        )
    if isinstance(config, RunConfig) and arch.experts and (config.device, config.placement) == ("npu", "colocated"):
        yield ConfigError(
            "placement: separate for a model with experts on npu",
            "placement: colocated",
            "Use separate devices: a wake in vllm-ascend transposes the experts, and a load would not fit them.",
        )
