"""From a dataset's prompt to token ids and back, the same way everywhere in the trainer.

Invariant: the SFT stage and the orchestrator turn equal prompts into equal ids, because both go through one `Template`, built from the
model files that the run record holds. Imports no torch.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import xxhash
from transformers import PreTrainedTokenizerFast

from polyreme.config.data import DataConfig
from polyreme.errors import ConfigError, DataError

PromptSource = str | tuple[dict[str, Any], ...]  # a text, or chat messages
_SENTINEL = "a7"  # what the assistant says in probes of a template; any plain text does


class Template:
    """A tokenizer with the run's way of writing a prompt.

    Args:
        files: the model directory's small files by name; `tokenizer.json` is required.
        data: the run's `data` section: `template` and `system` are used.

    Attributes:
        stop_ids: ascending ids that end a response: the tokenizer's end token and those of generation_config.json.
        end_id: the one of them that a supervised response is closed with.
        digest: 16 hex digits of what decides a prompt's ids: tokenizer, template, mode and system message.

    Raises:
        ConfigError: no fast tokenizer, no end token, no chat template, or one that opens no turn for the assistant.
    """

    def __init__(self, files: Mapping[str, bytes], data: DataConfig) -> None:
        self._tokenizer = _load_tokenizer(files)
        self._chat = data.template == "chat"
        self._system = data.system
        self.stop_ids = _stop_ids(self._tokenizer, files)
        if self._chat:
            self._check_chat_template()
        elif data.system is not None:
            raise ConfigError(
                "data.system together with data.template: chat",
                "data.template: none",
                "Write the system text into the prompts, or use the chat template.",
            )
        self.end_id = self._find_end_id()
        self._lead = np.empty(0, np.int32) if self._chat else self._find_lead()
        parts = [files["tokenizer.json"].decode(), data.template, data.system, self._tokenizer.chat_template]
        self.digest = xxhash.xxh3_64_hexdigest(json.dumps(parts).encode())

    def render(self, prompts: Sequence[PromptSource]) -> list[str]:
        """The text in front of each response. Raises DataError when the template refuses a prompt."""
        if not self._chat:
            for prompt in prompts:
                if not isinstance(prompt, str):
                    raise DataError(
                        "text prompts under data.template: none",
                        "a list of chat messages",
                        "Use data.template: chat, or give the prompts as strings.",
                    )
            return [str(prompt) for prompt in prompts]
        return self._apply([self._messages(prompt) for prompt in prompts], generation_prompt=True)

    def encode_prompts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids [length] of each rendered prompt.

        A chat template writes what a model's input begins with, a text as it is does not: it gets the tokens that the tokenizer puts in
        front of texts (a Llama's <|begin_of_text|>), unless it begins with them.
        """
        prompts = self.encode(texts)
        lead, size = self._lead, len(self._lead)
        return [ids if np.array_equal(ids[:size], lead) else np.concatenate([lead, ids]) for ids in prompts]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids [length] of each text, as it is."""
        encodings = self._tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[Sequence[int]], *, special: bool) -> list[str]:
        """The text of each id list, with or without the special tokens."""
        return list(self._tokenizer.backend_tokenizer.decode_batch([list(i) for i in ids], skip_special_tokens=not special))

    def _messages(self, prompt: PromptSource) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if self._system is not None and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": self._system})
        return messages

    def _apply(self, conversations: list[list[dict[str, Any]]], *, generation_prompt: bool) -> list[str]:
        try:
            return list(
                self._tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=generation_prompt)
            )
        except jinja2.TemplateError as error:
            raise DataError(
                "messages that the chat template accepts",
                f"{type(error).__name__}: {error}",
                "Change the messages, or the model's chat template.",
            ) from error

    def _check_chat_template(self) -> None:
        if not self._tokenizer.chat_template:
            raise ConfigError(
                "a chat template in the model directory (chat_template.jinja or tokenizer_config.json)",
                "none",
                "Add one, or set data.template: none for prompts that are complete texts.",
            )
        question = self._messages("q")
        opened, bare = (self._apply([question], generation_prompt=flag)[0] for flag in (True, False))
        # Some templates (Mistral's) need no opening: what they write for a user's turn is followed by the answer at once.
        if opened == bare and (gap := self._turn_parts(question, opened)[0].strip()):
            raise ConfigError(
                "a chat template that opens the assistant's turn under add_generation_prompt",
                f"one that writes the same prompt with and without it, and {gap!r} before an answer",
                "Add `{% if add_generation_prompt %}...{% endif %}` to the template.",
            )

    def _turn_parts(self, question: list[dict[str, Any]], prompt: str) -> tuple[str, str]:
        """What the template writes before and after an assistant's answer, the prompt's own text taken off."""
        answered = self._apply([[*question, {"role": "assistant", "content": _SENTINEL}]], generation_prompt=False)[0]
        before, _, after = answered.rpartition(_SENTINEL)
        return before.removeprefix(prompt), after

    def _find_lead(self) -> np.ndarray:
        """What the tokenizer puts in front of a text."""
        whole = self._tokenizer.backend_tokenizer.encode(_SENTINEL, add_special_tokens=True)
        return np.array(whole.ids[: whole.special_tokens_mask.index(0)], dtype=np.int32)

    def _find_end_id(self) -> int:
        """The stop token that the template writes behind an answer, else the tokenizer's end token."""
        if self._chat:
            question = self._messages("q")
            for token in self.encode([self._turn_parts(question, "")[1]])[0]:
                if int(token) in self.stop_ids:
                    return int(token)
        eos = self._tokenizer.eos_token_id
        return int(eos) if eos is not None else self.stop_ids[0]


def _load_tokenizer(files: Mapping[str, bytes]) -> PreTrainedTokenizerFast:
    if "tokenizer.json" not in files:
        raise ConfigError(
            "tokenizer.json in the model directory",
            ", ".join(sorted(files)) or "no files",
            "Save a fast tokenizer there: AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(...).",
        )
    with tempfile.TemporaryDirectory(prefix="polyreme-tokenizer-") as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers and tokenizers raise plain Exception on malformed files
            raise ConfigError(
                "tokenizer files that transformers loads", f"{type(error).__name__}: {error}", "Save the tokenizer again."
            ) from error
    # A tokenizer that was used to make batches has been saved with how it cut and filled them up.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _stop_ids(tokenizer: PreTrainedTokenizerFast, files: Mapping[str, bytes]) -> tuple[int, ...]:
    generation = json.loads(files.get("generation_config.json", b"{}")).get("eos_token_id")
    ids = generation if isinstance(generation, list) else [generation]
    stop = {int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None}
    if not stop:
        raise ConfigError(
            "an end token in tokenizer_config.json (eos_token) or generation_config.json (eos_token_id)",
            "none",
            "Name the token that ends a response.",
        )
    return tuple(sorted(stop))
