"""The tool calls in an answer, as the policy's chat template teaches it to write them.

Invariant: this is the only place that knows how a model writes a call. What looks like a call and is none is malformed, with the
reason, and never left out. A thought has no calls. Every reader of JSON can read the arguments of a call. Pure.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polyreme.dataset.strict_json import half_character, value_in, whole_value

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)
_THOUGHT_BEGINS, _THOUGHT_ENDS, _CALL_BEGINS = "<think>", "</think>", "<tool_call>"


@dataclass(frozen=True)
class ParsedCall:
    """A call. `arguments`: by name; `text`: their JSON text."""

    name: str
    arguments: dict[str, object]
    text: str


@dataclass(frozen=True)
class Malformed:
    """What the policy wrote in place of a call, and what is wrong with it."""

    text: str
    problem: str


Calls = list[ParsedCall | Malformed]


def find_calls(answer: str, parser: str, *, in_thought: bool = False) -> Calls:
    """The calls of an answer in their order.

    Args:
        answer: the answer with its special tokens, but without the stop token.
        parser: a key of PARSERS.
        in_thought: whether the answer begins within a thought.
    """
    _, thought_ends, said = answer.rpartition(_THOUGHT_ENDS)
    ends_in_thought = _THOUGHT_BEGINS in said or (in_thought and not thought_ends)
    return [] if ends_in_thought else PARSERS[parser](said)


def _hermes(said: str) -> Calls:
    """<tool_call> {"name": ..., "arguments": {...}} </tool_call>, as Qwen and Hermes write it. The last one may lack its end."""
    return [_read(closed or open_, "arguments") for closed, open_ in _HERMES.findall(said)]


def _llama3_json(said: str) -> Calls:
    """{"name": ..., "parameters": {...}}, as Llama 3 writes it; several are separated by semicolons. Other text is no call."""
    text = said.replace("<|python_tag|>", "").strip()
    if not text.startswith("{"):
        return []
    calls = Calls()
    while text:
        try:
            _, end = value_in(text, 0)
        except ValueError as error:
            return [*calls, Malformed(text, f"it is no JSON: {error}")]
        calls.append(_read(text[:end], "parameters"))
        rest = text[end:].lstrip()
        if rest and not rest.startswith(";"):
            return [*calls, Malformed(rest, "expected nothing but further calls behind a call, after a semicolon")]
        text = rest[1:].lstrip()
    return calls


PARSERS: Mapping[str, Callable[[str], Calls]] = {"hermes": _hermes, "llama3_json": _llama3_json}
"""The parsers, by the names that vLLM has for them."""


def before_calls(said: str, parser: str) -> str:
    """What of the beginning of a text is no part of a call, and of no blanks before one, whatever follows it.

    Args:
        said: the text behind any thought, without special tokens.
        parser: a key of PARSERS.
    """
    if parser == "hermes":
        return beginning(said, [_CALL_BEGINS]).rstrip()
    return "" if said.lstrip()[:1] in ("", "{") else said


def beginning(text: str, marks: Sequence[str]) -> str:
    """What of a text stands before the first of these marks, and before what may become one of them at its end."""
    found = min((place for mark in marks if (place := text.find(mark)) >= 0), default=len(text))
    open_ = max((size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])), default=0)
    return text[: min(found, len(text) - open_)]


def write_call(name: str, arguments: str, parser: str) -> str:
    """A call with JSON text as its arguments, in the form that the parser reads."""
    if parser == "hermes":
        return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
    return f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}'


def _read(text: str, key: str) -> ParsedCall | Malformed:
    try:
        value = whole_value(text)
    except ValueError as error:
        return Malformed(text, f"it is no JSON: {error}")
    if half := half_character(value):
        return Malformed(text, f"it has {half}, half of a surrogate pair")
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get(key) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Malformed(text, f'expected {{"name": ..., "{key}": {{...}}}}')
    return ParsedCall(name, arguments, json.dumps(arguments, ensure_ascii=False))
