"""A Hugging Face sequence classifier that scores texts.

Invariant: a text's score depends on its batch only by rounding. No text is truncated, and no weight is randomly initialised.

Only a model's process imports this module.
"""

import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # texts are tokenized one at a time

import torch
import xxhash
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar, set_tqdm_hook

from polyreme.dataset.chat import Chat, read_prompt, render, shows_tools
from polyreme.dataset.strict_json import messages_of
from polyreme.errors import ConfigError, DataError
from polyreme.experience.loading import Loaded
from polyreme.rundir.start_day import day_of_export
from polyreme_reward.items import Item, Outcome, RewardError, Status, failed, outcome_of
from polyreme_reward.model.device import open_device

_UNBOUNDED = 1 << 24  # tokenizers without a limit report 1e30
_WEIGHTS = "Loading weights"
"""The title of the progress bar in `from_pretrained` that counts tensors."""
_FIX = "Fix the model's directory, or its options under reward.rewards."


class Classifier:
    """A loaded model that is ready to score.

    Args:
        path: directory written by `save_pretrained`, including the tokenizer.
        options: the fields of ModelOptions.
        report: called with the loaded fraction of the weights.

    Raises:
        ConfigError: the model does not load, lacks weights, has several outputs and no `label`, or fails to score a short text.
    """

    def __init__(self, path: str, options: Mapping[str, Any], report: Loaded = lambda fraction: None) -> None:
        disable_progress_bar()
        logging.getLogger("transformers").setLevel(logging.ERROR)
        self._chat, self._column = options["template"] == "chat", options["prompt_column"]
        self._day = day_of_export(Path(path))  # the template then writes what it wrote in training
        self._device = open_device(options["device"], options["threads"])
        with _reported(report):
            self._model, self._tokenizer = _load(path, options["dtype"])
        self._model.eval().to(self._device)
        self._text_config = self._model.config.get_text_config()
        self._embeddings = len(self._model.get_input_embeddings().get_parameter("weight"))
        self._longest = _longest(self._text_config, self._tokenizer, options["max_length"])
        self._most_chars = self._longest * max(map(len, self._tokenizer.get_vocab()))
        self._label = _label(self._model.config.num_labels or 1, options["label"])
        if self._chat and not self._tokenizer.chat_template:
            raise ConfigError(f"a chat template in {path}", "none", "Add chat_template.jinja, or set options.template: none.")
        self._probe(path)
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        kind = type(self._model).__name__
        self.version = f"{os.path.basename(path)}-{_digest(path, options)}"
        self.description = f"{kind}, {parameters / 1e6:.3g}M parameters, {options['dtype']} on {options['device']}"

    def encode(self, item: Item) -> list[int]:
        """Token ids of prompt and response. Raises RewardError when there are none or too many, or one has no embedding."""
        text = self._conversation(item) if self._chat else (item.seen + item.raw).removeprefix(self._tokenizer.bos_token or "")
        if len(text) > self._most_chars:  # avoids the memory of tokenizing it
            raise RewardError(f"expected prompt and response of at most {self._longest} tokens; found {len(text)} characters")
        try:
            ids: list[int] = self._tokenizer(text, add_special_tokens=not self._chat)[
                "input_ids"
            ]  # a chat template includes them
        except TypeError:  # lone surrogates
            raise RewardError(f"expected text that UTF-8 can encode; found {text[:200]!r}") from None
        if not 0 < len(ids) <= self._longest:
            raise RewardError(
                f"expected prompt and response of 1 to {self._longest} tokens of the reward model; found {len(ids)}. "
                "Texts are not truncated: limit the length of responses, or raise options.max_length if the model allows it"
            )
        if max(ids) >= self._embeddings:
            raise RewardError(f"expected token ids below the model's {self._embeddings} embeddings; found {max(ids)}")
        return ids

    def score(self, batch: Sequence[list[int]]) -> list[Outcome]:
        """One outcome per list of token ids. A batch that does not fit into memory is scored one text at a time."""
        try:
            return [outcome_of(value) for value in self._forward(batch)]
        except (RuntimeError, MemoryError) as error:
            if not _is_memory(error):
                raise
        if len(batch) > 1:
            return [outcome for ids in batch for outcome in self.score([ids])]
        return [failed(Status.ERROR, f"a text of {len(batch[0])} tokens does not fit into memory (reward.worker_memory_mib)")]

    @torch.inference_mode()
    def _forward(self, batch: Sequence[list[int]]) -> list[float]:
        pad = configured = self._text_config.pad_token_id
        if pad is None and len(batch) > 1:
            # The classifier finds a row's end by its padding, so the padding id must not occur in any row.
            used = set().union(*batch)
            pad = next((token for token in range(self._embeddings) if token not in used), None)
            if pad is None:
                return [value for ids in batch for value in self._forward([ids])]
        width = max(map(len, batch))
        # Padding on the right, whatever the tokenizer's default: positions then start at 0 for each text.
        rows = [ids + [pad or 0] * (width - len(ids)) for ids in batch]
        mask = [[1] * len(ids) + [0] * (width - len(ids)) for ids in batch]
        self._text_config.pad_token_id = pad
        try:
            logits = self._model(
                input_ids=torch.tensor(rows, device=self._device), attention_mask=torch.tensor(mask, device=self._device)
            ).logits
        finally:
            self._text_config.pad_token_id = configured
        values: list[float] = logits[:, self._label].float().tolist()
        return values

    def _prompt(self, item: Item) -> object:
        """The prompt as text, or the value of the row's prompt column."""
        if self._column is None:
            return item.prompt
        columns = item.metadata
        if self._column not in columns:
            raise RewardError(
                f"expected the prompt in the row's column {self._column!r}; found the columns {sorted(columns)}. "
                "Fix options.prompt_column; null takes the plain prompt of the request"
            )
        return columns[self._column]

    def _conversation(self, item: Item) -> str:
        """The prompt and the response as a stage's rows are rendered. Tools are left out by a template that shows none."""
        template = self._tokenizer.get_chat_template()
        try:
            tools = item.metadata.get("tools") if shows_tools(template) else None
            asked = self._prompt(item)
            what = f"{self._column or 'prompt'!r} of the item"
            asked = asked if asked == "" else read_prompt(messages_of(asked, what), what, tools)
            chat = asked if isinstance(asked, Chat) else Chat(({"role": "user", "content": asked},))
            answered = Chat((*chat.messages, {"role": "assistant", "content": item.response}), chat.tools)
            return render(self._tokenizer, [answered], opened=False, day=self._day)[0]
        except DataError as error:
            raise RewardError(f"expected {error.expected}; found {error.found}") from None

    def _probe(self, path: str) -> None:
        """Scores a short text, so that a model that cannot score fails at start. This also warms up an accelerator."""
        row = Item("", "Hi", "Hi", metadata_json=json.dumps({self._column: "Hi"}))
        try:
            (outcome,) = self.score([self.encode(row)])
        except RewardError as error:
            raise ConfigError(f"a model in {path} that scores a short text", str(error), _FIX) from None
        if outcome.status is not Status.OK:
            raise ConfigError(f"a model in {path} that scores a short text", outcome.message, _FIX)


@contextmanager
def _reported(report: Loaded) -> Iterator[None]:
    """Reports the loaded fraction of the weights that transformers loads in this block: its progress bar counts the tensors."""

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _counted(args[0], report) if kwargs.get("desc") == _WEIGHTS else factory(*args, **kwargs)

    previous = set_tqdm_hook(hook)
    try:
        yield
    finally:
        set_tqdm_hook(previous)


def _counted(tensors: Collection[object], report: Loaded) -> Iterator[object]:
    for done, tensor in enumerate(tensors, start=1):
        yield tensor
        report(done / len(tensors))


def _load(path: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # noqa: BLE001 transformers raises many types for a damaged file
        raise ConfigError(
            f"a sequence classifier and its tokenizer in {path}", f"{type(error).__name__}: {str(error)[:1000]}", _FIX
        ) from None
    wanted = list(tokenizer.vocab_files_names.values())
    if wanted and not any(Path(path, name).is_file() for name in wanted):  # transformers would create an empty tokenizer
        raise ConfigError(f"a tokenizer in {path} ({' or '.join(wanted)})", "none", "Save it there with save_pretrained.")
    if missing := sorted(loading["missing_keys"]):
        raise ConfigError(
            f"all weights of the classifier in {path}",
            f"no weights for {', '.join(missing[:5])}",
            "Use a trained reward model, not the language model that it is based on.",
        )
    return model, tokenizer


def _label(outputs: int, label: int | None) -> int:
    if label is None and outputs != 1:
        raise ConfigError(
            "a reward model with one output (num_labels 1)", f"{outputs} outputs", "Select the score with options.label."
        )
    if label is not None and label >= outputs:
        raise ConfigError(f"options.label below the model's {outputs} outputs", str(label), "Fix it; the first one is 0.")
    return label or 0


def _longest(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, asked: int | None) -> int:
    """Maximum number of tokens: the model's limit, or a lower one in the options."""
    known = [getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]
    most = min([int(limit) for limit in known if limit is not None and 0 < limit < _UNBOUNDED], default=_UNBOUNDED)
    if asked is not None and asked > most:
        raise ConfigError(f"options.max_length of at most the model's {most} tokens", str(asked), "Lower or remove it.")
    return asked or most


def _digest(path: str, options: Mapping[str, object]) -> str:
    """Digest (12 hexadecimal digits) of what decides scores: the files, and the options except those that only affect speed."""
    decides = sorted((name, value) for name, value in options.items() if name not in ("batch_tokens", "threads"))
    digest = xxhash.xxh3_64(repr(decides).encode())
    for file in sorted(Path(path).iterdir()):
        if file.is_file() and not file.name.startswith("."):
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                while block := stream.read(1 << 22):
                    digest.update(block)
    return str(digest.hexdigest()[:12])


def _is_memory(error: Exception) -> bool:
    """Whether memory ran out. torch reports that by a type for accelerators, and only by the message for the CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
