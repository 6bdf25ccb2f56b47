"""Converts prompts and conversations to token ids and back, for the whole trainer.

Invariant: the supervised stage and the orchestrator convert equal prompts to equal ids, because both use one `Template`, built
from the model files in the run's record. This module imports no torch.
"""

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from tokenizers import Encoding
from tokenizers.decoders import DecodeStream

from polyreme.config.data import TextConfig
from polyreme.dataset.chat import Answer, Chat, Message, PromptSource, for_template, render
from polyreme.dataset.columns import TokenIds
from polyreme.errors import ConfigError, DataError
from polyreme_trainer.data.tokenizer_files import find_stop_ids, load_tokenizer, read_embeddings

_SENTINEL = "a7"  # stands for the assistant's answer when a template is probed; any plain text would work


@dataclass(frozen=True)
class Conversation:
    """A rendered prompt followed by its answer. The first `prompt_length` characters are the prompt."""

    text: str
    prompt_length: int


class Template:
    """A tokenizer together with the run's prompt template.

    Args:
        files: the model directory's small files by name; `tokenizer.json` and `config.json` are required.
        data: the run's `data` section, of which `template`, `system` and `date` are used.

    Attributes:
        is_chat: whether prompts go through the chat template.
        stop_ids: ids that end a response, ascending: the tokenizer's end token and those of generation_config.json.
        end_id: the stop token that ends a supervised response.
        unstopped: special tokens, as text, that the chat template writes after an answer but that do not stop a rollout.
        embeddings: the rows of the model's embedding (`vocab_size` in config.json). Every id must be smaller.
        tokens: the embedding rows that the tokenizer needs: its highest id plus 1.
        digest: 16 hex digits over everything that determines a prompt's ids: tokenizer, template, mode, system message, and the
            day if the template shows it.

    Raises:
        ConfigError: there is no fast tokenizer, no end token, an end token without an embedding, no chat template, or a chat
            template that does not open the assistant's turn.
    """

    def __init__(self, files: Mapping[str, bytes], data: TextConfig) -> None:
        self._tokenizer = load_tokenizer(files)
        self.embeddings = read_embeddings(files)
        self.tokens = 1 + max(self._tokenizer.get_vocab().values())
        self.is_chat = data.template == "chat"
        self._system = data.system
        self._day = data.date or datetime.date.today()
        self.stop_ids = find_stop_ids(self._tokenizer, files, self.embeddings)
        if self.is_chat:
            self._check_chat_template()
        elif data.system is not None:
            raise ConfigError(
                "data.system together with data.template: chat",
                "data.template: none",
                "Write the system text into the prompts, or use the chat template.",
            )
        self.end_id, self.unstopped = self._find_end()
        self._end = self.decode([[self.end_id]], special=True)[0]
        self._lead = np.empty(0, np.int32) if self.is_chat else self._find_lead()
        parts = [files["tokenizer.json"].decode(), data.template, data.system, self._tokenizer.chat_template]
        parts += [self._day.isoformat()] if "strftime_now" in str(self._tokenizer.chat_template) else []
        self.digest = xxhash.xxh3_64_hexdigest(json.dumps(parts).encode())

    def render(self, prompts: Sequence[PromptSource]) -> list[str]:
        """The text before each response; tokens have their own text. Raises DataError when the template rejects a prompt."""
        if any(isinstance(prompt, TokenIds) for prompt in prompts):
            return [self._text(prompt) if isinstance(prompt, TokenIds) else self.render([prompt])[0] for prompt in prompts]
        if not self.is_chat:
            for prompt in prompts:
                if not isinstance(prompt, str):
                    raise DataError(
                        "text prompts under data.template: none",
                        "a list of chat messages",
                        "Use data.template: chat, or give the prompts as strings.",
                    )
            return [str(prompt) for prompt in prompts]
        return self.apply([self.fitted(prompt) for prompt in prompts], generation_prompt=True)

    def converse(self, prompts: Sequence[PromptSource], answers: Sequence[Answer]) -> list[Conversation]:
        """Each prompt with its answer, as the chat template renders the whole conversation.

        Some templates render a past answer differently from a generated one (DeepSeek-R1's removes the thoughts). Then a text is
        appended to the rendered prompt as it is, followed by the text that the template writes after an answer.

        Raises:
            DataError: the template rejects a prompt or an answer, or an answer contains the end token.
        """
        told = [self._without_end(answer) for answer in answers]
        texts = self.render(prompts)
        if not self.is_chat:
            return [Conversation(text + _text_of(answer), len(text)) for text, answer in zip(texts, told, strict=True)]
        chats = [self.fitted(prompt) for prompt in prompts]
        wholes = self.apply(list(map(_answered, chats, told)), generation_prompt=False)
        found = []
        for chat, answer, text, whole in zip(chats, told, texts, wholes, strict=True):
            if not whole.startswith(text):
                whole = text + _text_of(answer) + self._turn_parts(chat, text)[1]
            found.append(Conversation(whole, len(text)))
        return found

    def encode_conversations(self, conversations: Sequence[Conversation]) -> list[tuple[np.ndarray, int]]:
        """Each conversation as int32 ids [length], and the position of the response's first token.

        The text is encoded as a whole, so that a response gets the tokens that it has after its prompt. The ids end with one end
        token. A token that spans the end of the prompt and the start of the response belongs to the response.
        """
        prompts = self.encode_prompts([each.text[: each.prompt_length] for each in conversations])
        encodings = self._encodings([each.text for each in conversations])
        wholes = self._with_lead([np.array(encoding.ids, dtype=np.int32) for encoding in encodings])
        examples = []
        for each, prompt, encoding, whole in zip(conversations, prompts, encodings, wholes, strict=True):
            start = len(prompt)
            if not np.array_equal(whole[:start], prompt):
                inside = sum(end <= each.prompt_length for _, end in encoding.offsets)
                start = len(whole) - len(encoding.ids) + inside
            ends = np.flatnonzero(whole[start:] == self.end_id)
            ids = whole[: start + ends[0]] if len(ends) else whole
            examples.append((np.append(ids, np.int32(self.end_id)), start))
        return examples

    def encode_turns(self, conversations: Sequence[Chat]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each conversation as int32 ids [length], and a mask uint8 [length] that is 1 for tokens of the assistant's turns.

        A turn's tokens follow the prompt before it, up to its end token. The ids end with the last turn's end token.

        Raises:
            DataError: there is no chat template, it refuses the messages, or it formats an earlier answer unlike the last.
        """
        if not self.is_chat:
            raise DataError("data.template: chat for rows of messages", "none", "Use the chat template, or columns with texts.")
        chats = [self.fitted(each) for each in conversations]
        wholes = self.apply(chats, generation_prompt=False)
        return [self._mark_turns(*each) for each in zip(chats, wholes, self._encodings(wholes), strict=True)]

    def encode_whole(self, prompts: Sequence[PromptSource], answers: Sequence[Answer]) -> list[np.ndarray]:
        """Each conversation as int32 ids [length] for a reward model: all that the template writes, also after the end token.

        Under `template: none` it ends with the end token. Raises DataError as `converse`.
        """
        if not self.is_chat:
            return [ids for ids, _ in self.encode_conversations(self.converse(prompts, answers))]
        chats = [
            _answered(self.fitted(prompt), self._without_end(answer)) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return self.encode(self.apply(chats, generation_prompt=False))

    def encode_prompts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids [length] of each rendered prompt.

        A chat template writes the beginning of the model's input itself. A plain text gets the tokens that the tokenizer puts
        before a text (Llama's <|begin_of_text|>), unless it already begins with them.
        """
        return self._with_lead(self.encode(texts))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids [length] of each text, without added special tokens."""
        return [np.array(encoding.ids, dtype=np.int32) for encoding in self._encodings(texts)]

    def decode(self, ids: Iterable[Sequence[int]], *, special: bool) -> list[str]:
        """The text of each id list, with or without the special tokens."""
        return list(self._tokenizer.backend_tokenizer.decode_batch([list(i) for i in ids], skip_special_tokens=not special))

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each id, including special tokens; concatenated, they are the text of `ids`.

        A token that ends inside a character has an empty text, and the one that completes it has the whole character. If bytes
        within `ids` are not valid text, their decoding depends on all later bytes. Then the last token has the whole text.
        """
        whole, stream = self.decode([ids], special=True)[0], self.text_stream(special=True)
        texts = [stream(each) for each in ids]
        if not whole.startswith("".join(texts)):
            texts = [""] * len(ids)
        return [*texts[:-1], whole[sum(map(len, texts[:-1])) :]] if texts else []

    def text_stream(self, *, special: bool) -> Callable[[int], str]:
        """A function that gets a text's ids in turn and returns the text that each one completes, with or without special tokens.

        From bytes that are no text on, it returns nothing more.
        """
        stream, is_text = DecodeStream(skip_special_tokens=not special), True

        def step(id: int) -> str:
            nonlocal is_text
            try:
                return (is_text and stream.step(self._tokenizer.backend_tokenizer, int(id))) or ""
            except Exception:  # noqa: BLE001 tokenizers raises nothing narrower for bytes that are no text
                is_text = False
                return ""

        return step

    def _encodings(self, texts: Sequence[str]) -> list[Encoding]:
        tokenizer = self._tokenizer.backend_tokenizer
        if len(texts) == 1:  # a batch of one would be given to another thread
            return [tokenizer.encode(texts[0], add_special_tokens=False)]
        return list(tokenizer.encode_batch(list(texts), add_special_tokens=False))

    def _with_lead(self, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        lead, size = self._lead, len(self._lead)
        if not size:
            return list(ids)
        return [each if np.array_equal(each[:size], lead) else np.concatenate([lead, each]) for each in ids]

    def _text(self, ids: TokenIds) -> str:
        if ids and not 0 <= min(ids) <= max(ids) < self.tokens:
            raise DataError(
                f"token ids of the model's tokenizer, which has {self.tokens}",
                f"id {max(ids)}" if max(ids) >= self.tokens else f"id {min(ids)}",
                "Use the tokenizer that the data was written with.",
            )
        return self.decode([ids], special=True)[0]

    def _without_end(self, answer: Answer) -> Answer:
        """The answer without an end token at its end. Raises DataError when there is one elsewhere."""
        text = (answer if isinstance(answer, str) else str(answer["content"])).removesuffix(self._end)
        if self._end in text:
            raise DataError(
                f"a response without the end token {self._end} inside", "one with it", "Split the row, or remove the token."
            )
        return text if isinstance(answer, str) else {**answer, "content": text}

    def fitted(self, prompt: PromptSource) -> Chat:
        """The prompt as a conversation with the run's system message, in the form of this template."""
        if isinstance(prompt, TokenIds):
            raise DataError("a text or messages for a conversation", "token ids", "Use data with texts.")
        chat = self.in_form(Chat(({"role": "user", "content": prompt},)) if isinstance(prompt, str) else prompt)
        if self._system is not None and chat.messages[0]["role"] != "system":
            return Chat(({"role": "system", "content": self._system}, *chat.messages), chat.tools)
        return chat

    def in_form(self, chat: Chat) -> Chat:
        """A conversation in the form that this template reads."""
        tools = None if chat.tools is None else list(chat.tools)
        return for_template(chat, self._tokenizer.get_chat_template(tools=tools))

    def _mark_turns(self, chat: Chat, whole: str, encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a conversation, written as `whole`, and its mask. See `encode_turns`."""
        ids = np.array(encoding.ids, dtype=np.int32)
        ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
        mask, stop = np.zeros(len(ids), dtype=np.uint8), len(ids)
        turns = [place for place, message in enumerate(chat.messages) if message["role"] == "assistant"]
        for place in turns:
            before = self.apply([Chat(chat.messages[:place], chat.tools)], generation_prompt=True)[0]
            after = self.apply([Chat(chat.messages[: place + 1], chat.tools)], generation_prompt=False)[0]
            if not whole.startswith(before) or not whole.startswith(after):
                raise DataError(
                    "a chat template that writes an answer in the same way whether it is the last one or not",
                    f"another text in message {place + 1} of {len(chat.messages)}",
                    "Make one row of each answer, with the prompt and response columns.",
                )
            start = int(np.searchsorted(ends, len(before), side="right"))
            stop = int(np.searchsorted(ends, len(after), side="right"))
            if len(closing := np.flatnonzero(ids[start:stop] == self.end_id)):
                stop = start + int(closing[0]) + 1
            mask[start:stop] = 1
        ids, mask = ids[:stop], mask[:stop]
        if stop and ids[-1] != self.end_id:
            return np.append(ids, np.int32(self.end_id)), np.append(mask, np.uint8(1))
        return ids, mask

    def apply(self, chats: Sequence[Chat], *, generation_prompt: bool) -> list[str]:
        """What the chat template writes for conversations in its form; `generation_prompt`: up to the beginning of an answer.

        Raises:
            DataError: the template refuses one.
        """
        return render(self._tokenizer, chats, opened=generation_prompt, day=self._day)

    def _check_chat_template(self) -> None:
        if not self._tokenizer.chat_template:
            raise ConfigError(
                "a chat template in the model directory (chat_template.jinja or tokenizer_config.json)",
                "none",
                "Add one, or set data.template: none for prompts that are complete texts.",
            )
        question = self.fitted("q")
        try:
            opened, bare = (self.apply([question], generation_prompt=flag)[0] for flag in (True, False))
        except DataError as error:
            asked = "a question" if self._system is None else "a question after data.system"
            raise ConfigError(
                f"a chat template that accepts {asked}", error.found, "Change the template, or remove data.system."
            ) from error
        # Some templates (Mistral's) need no opening: the answer directly follows the user's turn.
        if opened == bare and (gap := self._turn_parts(question, opened)[0].strip()):
            raise ConfigError(
                "a chat template that opens the assistant's turn under add_generation_prompt",
                f"one that writes the same prompt with and without it, and {gap!r} before an answer",
                "Add `{% if add_generation_prompt %}...{% endif %}` to the template.",
            )

    def _turn_parts(self, question: Chat, prompt: str) -> tuple[str, str]:
        """The text that the template writes before and after an assistant's answer, without the prompt's own text."""
        answered = self.apply([_answered(question, _SENTINEL)], generation_prompt=False)[0]
        before, _, after = answered.rpartition(_SENTINEL)
        return before.removeprefix(prompt), after

    def _find_lead(self) -> np.ndarray:
        """The ids that the tokenizer puts before a text, int32 [length]."""
        whole = self._tokenizer.backend_tokenizer.encode(_SENTINEL, add_special_tokens=True)
        return np.array(whole.ids[: whole.special_tokens_mask.index(0)], dtype=np.int32)

    def _find_end(self) -> tuple[int, tuple[str, ...]]:
        """The stop token that the template writes after an answer, otherwise the tokenizer's end token. When the template writes
        no stop token there, also returns the special tokens that it writes."""
        eos = self._tokenizer.eos_token_id
        default = int(eos) if eos is not None else self.stop_ids[0]
        if not self.is_chat:
            return default, ()
        written = [int(i) for i in self.encode([self._turn_parts(self.fitted("q"), "")[1]])[0]]
        if stops := [i for i in written if i in self.stop_ids]:
            return stops[0], ()
        special = self._tokenizer.added_tokens_decoder
        return default, tuple(special[i].content for i in written if i in special)


def _answered(chat: Chat, answer: Answer) -> Chat:
    message: Message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    return Chat((*chat.messages, message), chat.tools)


def _text_of(answer: Answer) -> str:
    """The text of an answer that is appended to a prompt. Raises DataError when it has more than a text."""
    if isinstance(answer, str):
        return answer
    more = ", ".join(sorted(answer.keys() - {"role", "content"}))
    raise DataError(
        "a chat template that writes the whole answer after its prompt", f"an answer with {more}", "Write the answer as a text."
    )
