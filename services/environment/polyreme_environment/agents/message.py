"""An answer of the policy as the message that a client gets: thought, text and tool calls apart.

Invariant: nothing of an answer is left out. What only looks like a call stays in the text. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from polyreme_environment.tool_calls import ParsedCall, find_calls

_THOUGHT_BEGINS, _THOUGHT_ENDS, _CALL_BEGINS = "<think>", "</think>", "<tool_call>"


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


def spoken(text: str, raw: str, parser: str | None) -> Spoken:
    """Reads an answer.

    Args:
        text: without special tokens.
        raw: with them, but without the stop token.
        parser: see `find_calls`; None: the request has no tools, so there are no calls.
    """
    before, mark, said = text.rpartition(_THOUGHT_ENDS)
    if not mark and text.lstrip().startswith(_THOUGHT_BEGINS):
        before, said = text, ""  # cut within the thought
    thought, content = before.strip().removeprefix(_THOUGHT_BEGINS).strip(), said.lstrip("\n") if before else said
    found = find_calls(raw, parser) if parser else []
    calls = tuple(each for each in found if isinstance(each, ParsedCall))
    if not calls or len(calls) < len(found):
        return Spoken(content, thought)
    return Spoken(content.partition(_CALL_BEGINS)[0].strip() if _CALL_BEGINS in content else "", thought, calls)
