"""Finds the program in a response with fenced code blocks.

Invariant: output, shell commands and examples in other languages are not run as the program, and the time is linear in the text.
"""

import ast
import re
from textwrap import dedent
from typing import NamedTuple

from polyreme_reward.rules.spelling import words

_OPENING = re.compile(r"(?P<before>(?:(?!```|~~~).)*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)")
_LABELLED = re.compile(r"(?:```|~~~)[ \t]*[^`~\s][^`\n]*")
_QUOTE = re.compile(r"^[ \t]*> ?")
_PYTHON = re.compile(r"(?:i?python|py|pypy|cpython)[ -]?(?:[23](?:\.\d+)*)?|sage", re.IGNORECASE)
_OTHER = words(
    "sh bash zsh shell console terminal powershell cmd bat text txt plaintext plain output stdout stdin input log result results"
    " json jsonl yaml yml xml html css sql js javascript jsx ts typescript tsx c cpp c++ cc h cs csharp java kotlin go golang"
    " rust rs ruby rb php perl r scala swift lua haskell hs julia matlab diff patch latex tex math csv tsv ini toml dockerfile"
    " makefile make pycon python-repl python-console pytb traceback mermaid graphviz dot pseudocode http"
)
_MARKDOWN = frozenset(["markdown", "md", ""])
_VALUES = (ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Attribute)


class Block(NamedTuple):
    """A fenced block: its language in lower case, or '', and its text."""

    language: str
    text: str


def program_of(response: str) -> str:
    """The last fenced block of Python that has code. Without a block that is labelled so, the last one without a known other
    language that can be a program, then any block; without fences the whole response."""
    found = blocks(response.replace("\r\n", "\n").replace("\r", "\n"))
    if not found:
        return response
    labelled = [block.text for block in found if _PYTHON.fullmatch(block.language) and _has_code(block.text)]
    if labelled:
        return labelled[-1]
    unknown = [block.text for block in found if block.language not in _OTHER and _has_code(block.text)]
    programs = [text for text in unknown if _computes(text)]
    return (programs or unknown or [block.text for block in found])[-1]


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a text. An unclosed one extends to the end. The fences of a Markdown block are blocks themselves."""
    found: list[Block] = []
    lines = text.split("\n")
    start = 0
    while start < len(lines):
        opening = _OPENING.fullmatch(lines[start])
        start += 1
        if opening is None:
            if inline := re.search(r"(`{3,})(?!`)(.+?)\1", lines[start - 1]):
                found.append(_inline(inline[2]))
            continue
        language = re.split(r"[\s{,:]", opening["info"].strip().lstrip("{.").rstrip("}").lower(), maxsplit=1)[0]
        fence, quoted = opening["fence"], _QUOTE.match(opening["before"]) is not None
        end, tail, following = _end(lines, start, fence, is_program=_PYTHON.fullmatch(language) is not None)
        body = [_QUOTE.sub("", line) if quoted else line for line in lines[start:end]] + tail
        start = following
        inner = dedent("\n".join(body))
        nested = blocks(inner) if language in _MARKDOWN and len(fence) > 3 else []
        found += nested or [Block(language, inner)]
    return found


def _end(lines: list[str], start: int, fence: str, is_program: bool) -> tuple[int, list[str], int]:
    """The line at which a block ends, the text before its fence if that is not alone on the line, and the line after the block. A
    block that is no program also ends where a labelled one begins, since its own fence was forgotten then."""
    beside = None
    for number in range(start, len(lines)):
        line = lines[number].strip(" \t>")
        if line.startswith(fence):
            if not line.strip(fence[0]):
                return number, [], number + 1
            if len(fence) == 3 and _LABELLED.fullmatch(line) and (beside is not None or not is_program):
                if beside is None:
                    return number, [], number
                break
        if beside is None and line.endswith(fence) and fence[0] == "`" and line.count(fence) == 1:
            beside = number
    if beside is None:
        return len(lines), [], len(lines)
    return beside, [lines[beside].rstrip().rstrip(fence[0])], beside + 1


def _inline(text: str) -> Block:
    """A block on one line: ```python print(1)```."""
    first, _, rest = text.strip().partition(" ")
    return Block("python", rest) if rest and _PYTHON.fullmatch(first) else Block("", text.strip())


def _has_code(text: str) -> bool:
    """Whether a text has a line that is neither empty nor a comment, and is no session of the interpreter."""
    lines = [line.strip() for line in text.split("\n")]
    return any(line and not line.startswith("#") for line in lines) and not next(filter(None, lines)).startswith(
        (">>>", "$ ", "In [")
    )


def _computes(text: str) -> bool:
    """Whether a text is Python and does more than state values, as the output of a program does."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return not all(isinstance(each, ast.Expr) and isinstance(each.value, _VALUES) for each in body)
