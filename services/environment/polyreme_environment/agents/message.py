"""An answer of the policy as the message that a client gets: thought, text and tool calls apart.

Invariant: nothing of an answer is left out. What only looks like a call stays in the text. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from polyreme_environment.tool_calls import ParsedCall, before_calls, beginning, find_calls

_THOUGHT_BEGINS, _THOUGHT_ENDS = "<think>", "</think>"


@dataclass(frozen=True)
class Spoken:
    """A message: its text, its thought ("": none), and its calls."""

    content: str
    thought: str = ""
    calls: tuple[ParsedCall, ...] = ()


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first of the texts that end an answer, and which one that is; (all of it, None) without one."""
    found = min(((text.find(each), each) for each in stop if each in text), default=None)
    return (text, None) if found is None else (text[: found[0]], found[1])


def spoken(text: str, raw: str, parser: str | None, in_thought: bool = False) -> Spoken:
    """Reads an answer.

    Args:
        text: without special tokens.
        raw: with them, but without the stop token.
        parser: see `find_calls`; None: the request has no tools, so there are no calls.
        in_thought: whether the answer begins within a thought.
    """
    thought, said = _divided(text, in_thought)
    if said is None:
        return Spoken("", thought)
    found = find_calls(raw, parser) if parser else []
    calls = tuple(each for each in found if isinstance(each, ParsedCall))
    if not parser or not calls or len(calls) < len(found):
        return Spoken(said, thought)
    return Spoken(before_calls(said, parser), thought, calls)


def spoken_so_far(text: str, stop: Sequence[str], parser: str | None, in_thought: bool = False) -> Spoken:
    """What is certain of an answer that goes on: the beginnings of its thought and text in `spoken`. Calls are told at the end.

    Args:
        text: its text so far, without special tokens.
        stop: texts that end it.
        parser, in_thought: see `spoken`.
    """
    text = beginning(text, stop)
    if _THOUGHT_BEGINS.startswith(text.strip()):
        return Spoken("")  # a thought may begin
    thought, said = _divided(beginning(text, [_THOUGHT_ENDS]) if _THOUGHT_ENDS not in text else text, in_thought)
    if said is None:
        return Spoken("", thought)
    return Spoken(before_calls(said, parser) if parser else said, thought)


def _divided(text: str, in_thought: bool) -> tuple[str, str | None]:
    """The thought at the beginning of a text, and what is said; None: the text ends within the thought."""
    if not in_thought and not text.lstrip().startswith(_THOUGHT_BEGINS):
        return "", text
    thought, ends, said = text.partition(_THOUGHT_ENDS)
    return thought.strip().removeprefix(_THOUGHT_BEGINS).strip(), said.lstrip("\n") if ends else None
