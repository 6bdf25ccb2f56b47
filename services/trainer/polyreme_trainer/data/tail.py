"""Continues a conversation token by token, with nothing but the model's own chat template.

Invariant: tokens that were sampled are never encoded again. What follows an answer depends only on the new messages: templates
that drop earlier thoughts, strip blanks or write arguments anew cannot change what stands before.

The rule: a stand-in for the conversation is rendered with the new messages behind it. What follows its last answer's end token
also follows that of the real one. That each new message is whole there is tried once per sequence of roles, with marks as texts.
"""

import hashlib
import json
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from polyreme.dataset.chat import Message, read_chat
from polyreme.errors import ConfigError, DataError
from polyreme_trainer.data.template import Template

Tools = list[Message] | None
_WHERE = "the messages of an episode"
_TOOL = "f"
_COUNTS = 256
_PROMPTS = 256


class Tail:
    """What a chat template writes before the first answer, and behind each.

    Raises:
        ConfigError: there is no chat template, or it writes no stop token behind an answer.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        self._ends: dict[str, int] = {}
        self._tried: set[str] = set()
        self._prompts: dict[bytes, np.ndarray] = {}  # by a digest of messages and tools, in the order of their first use
        if not template.is_chat:
            raise ConfigError("data.template: chat, for conversations", "data.template: none", "Use the model's chat template.")
        if not self._count_ends([], None):
            raise ConfigError(
                "a chat template that writes a stop token behind an answer, for conversations",
                f"none of the stop tokens {template.stop_ids}",
                "Add the token that the template writes to eos_token_id in generation_config.json.",
            )

    def begin(self, messages: Sequence[Message], tools: Tools = None) -> np.ndarray:
        """int32 [p], read-only: the prompt of a conversation's first messages. Raises DataError when the template refuses them.

        All episodes of a task begin with the same ones, so the newest prompts are kept.
        """
        key = hashlib.sha256(json.dumps([messages, tools]).encode()).digest()
        if (known := self._prompts.get(key)) is not None:
            return known
        chat = self._template.fitted(read_chat(list(messages), _WHERE, tools))
        (text,) = self._template.apply([chat], generation_prompt=True)
        prompt = self._template.encode_prompts([text])[0]
        prompt.setflags(write=False)
        if len(self._prompts) >= _PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        self._prompts[key] = prompt
        return prompt

    def after(self, exact: np.ndarray, messages: Sequence[Message], tools: Tools = None) -> np.ndarray:
        """int32 [k], what follows a conversation when new messages arrive, up to where the next answer begins.

        Args:
            exact: int32 [t], the conversation's tokens up to the last sampled one. An answer that was cut gets its end token.
            messages: at least one, none an answer. Results of the answer's tool calls are first; their `name` is the tool's.

        Raises:
            DataError: the template refuses the messages, leaves one out, or writes it elsewhere.
        """
        if not messages or any(message.get("role") == "assistant" for message in messages):
            raise DataError("new messages behind an answer", "none" if not messages else "an answer", "Fix the environment.")
        results = list(takewhile(lambda message: message.get("role") == "tool", messages))
        calls = [_call(place, str(result.get("name") or _TOOL)) for place, result in enumerate(results)]
        answered = [{**result, "tool_call_id": call["id"]} for result, call in zip(results, calls, strict=True)]
        new = [*answered, *messages[len(results) :]]
        whole = self._encode([*_stand_in(calls), *new], generation_prompt=True, tools=tools)
        ends, count = np.flatnonzero(whole == self._template.end_id), self._count_ends(calls, tools)
        if len(ends) < count:
            raise DataError(
                "a chat template that keeps earlier answers",
                "one that drops them",
                "Use another chat template for this environment.",
            )
        self._try_roles(calls, new, tools)
        behind = whole[ends[count - 1] + 1 :]
        is_cut = exact[-1] != self._template.end_id
        return np.concatenate([[self._template.end_id] if is_cut else [], behind]).astype(np.int32)

    def _try_roles(self, calls: list[Message], new: list[Message], tools: Tools) -> None:
        """Raises DataError unless the template writes messages of these roles behind the answer, and only there.

        (Marks, since templates strip texts and write them as JSON. As text, since a small vocabulary may not have them.)
        """
        marked = [{**message, "content": f"new{place:05d}"} for place, message in enumerate(new)]
        key = json.dumps([calls, marked, tools])
        if key in self._tried:
            return
        written = self._written([*_stand_in(calls), *marked], generation_prompt=True, tools=tools)
        (end,) = self._template.decode([[self._template.end_id]], special=True)
        parts, count = written.split(end), self._count_ends(calls, tools)
        before, behind = end.join(parts[:count]), end.join(parts[count:])
        for message in marked:
            if message["content"] in before or message["content"] not in behind:
                raise DataError(
                    "a chat template that writes new messages behind the answer before them",
                    f"one that leaves out a message of the role {message['role']!r} there, or writes it elsewhere",
                    "Give the message another role, or use another chat template for this environment.",
                )
        if len(self._tried) >= _COUNTS:
            self._tried.clear()
        self._tried.add(key)

    def _count_ends(self, calls: list[Message], tools: Tools) -> int:
        """The number of end tokens in the stand-in up to the end of its answer. (Its text may differ once messages follow.)"""
        key = json.dumps([calls, tools])
        if key not in self._ends:
            if len(self._ends) >= _COUNTS:  # the policy writes the names of tools
                self._ends.clear()
            ids = self._encode(_stand_in(calls), generation_prompt=False, tools=tools)
            self._ends[key] = int(np.count_nonzero(ids == self._template.end_id))
        return self._ends[key]

    def _encode(self, messages: list[Message], *, generation_prompt: bool, tools: Tools) -> np.ndarray:
        return self._template.encode([self._written(messages, generation_prompt=generation_prompt, tools=tools)])[0]

    def _written(self, messages: list[Message], *, generation_prompt: bool, tools: Tools) -> str:
        chat = self._template.in_form(read_chat(messages, _WHERE, tools))
        return self._template.apply([chat], generation_prompt=generation_prompt)[0]


def _call(place: int, name: str) -> Message:
    return {"id": f"call{place:05d}", "type": "function", "function": {"name": name, "arguments": {"a": 1}}}


def _stand_in(calls: list[Message]) -> list[Message]:
    """A question and an answer, which makes these tool calls."""
    made = {"tool_calls": calls} if calls else {}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", **made}]
