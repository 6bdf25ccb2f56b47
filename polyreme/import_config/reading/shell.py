"""Follows the assignments and conditions of a shell script up to its commands, without executing anything.

Invariant: a variable has the value that bash would give it in a plain start of the script, or is open: what a condition, an
argument or the output of a command decides is never guessed.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from polyreme.import_config.reading.shell_lexer import ShellCommand, commands
from polyreme.import_config.reading.shell_truth import NoTest, both, chained, either, inverse, tested
from polyreme.import_config.reading.shell_words import Variables, document, elements, fields, is_open, joined, matches, opened

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=(.*)", re.DOTALL)
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_CONDITIONS = ("if", "elif", "while", "until")
_SHELLS = {"bash", "sh", "sbatch", "/bin/bash", "/bin/sh"}
_MAX_DEPTH = 8
_MOST_CALLS = 100  # of one function
_FUNCTION = re.compile(r"[^=$'\"]+\(\)")
_UNKNOWN = {sign: opened(f"${sign}") for sign in "@#123456789"}
"""The arguments of a function that the script does not call."""


@dataclass(frozen=True)
class Call:
    """A command with its words expanded. `certain`: it runs whatever the script's conditions decide."""

    words: tuple[str, ...]
    certain: bool


@dataclass
class _Block:
    """An `if`, a loop or a `case`. Truth has three values: None is unknown."""

    kind: str
    state: bool | None  # whether its current branch runs
    taken: bool | None = False  # whether an earlier branch ran
    reads_condition: bool = False
    subject: str = ""  # of a case


@dataclass
class _Walk:
    variables: Variables
    blocks: list[_Block] = field(default_factory=list)
    depth: int = 0
    last: bool | None = True  # the result of the previous command, for && and ||
    functions: dict[str, list[ShellCommand]] = field(default_factory=dict)
    called: Counter[str] = field(default_factory=Counter)
    defined: str = ""  # the function whose body is being read
    braces: int = 0


def calls(text: str) -> Iterator[Call]:
    """The commands that a plain start of the script may run, in their order."""
    walk = _Walk({"HOME": "~"})
    yield from _walk(commands(text), walk)
    for name, body in [*walk.functions.items()]:
        if name not in walk.called:  # another program may call it
            walk.variables.update(_UNKNOWN)
            yield from _enter(body, walk, certain=False)


def _walk(script: Iterable[ShellCommand], walk: _Walk) -> Iterator[Call]:
    for command in script:
        if not _define(command, walk):
            yield from _command(command, walk)


def _enter(script: Iterable[ShellCommand], walk: _Walk, certain: bool) -> Iterator[Call]:
    """The calls of a script or function within this one."""
    blocks = [] if certain else [_Block("call", None)]
    inner = _Walk(walk.variables, blocks, walk.depth + 1, functions=walk.functions, called=walk.called)
    if inner.depth <= _MAX_DEPTH:
        yield from _walk(script, inner)


def _define(command: ShellCommand, walk: _Walk) -> bool:
    """Keeps a command of a function's body for the function's calls. Returns whether the command was one."""
    words = [*command.words]
    if not walk.defined:
        header = words[1:2] if words[:1] == ["function"] else [word for word in words[:1] if _FUNCTION.fullmatch(word)]
        if not header:
            return False
        walk.defined, words = header[0].removesuffix("()"), words[words.index(header[0]) + 1 :]
        walk.functions[walk.defined], walk.braces = [], 0
    walk.functions[walk.defined].append(replace(command, words=tuple(words)))
    walk.braces += words.count("{") - words.count("}")
    if "}" in words and walk.braces <= 0:
        walk.defined = ""
    return True


def _command(command: ShellCommand, walk: _Walk) -> Iterator[Call]:
    words, blocks = list(command.words), walk.blocks
    while words and not _reads_pattern(words, blocks) and _keyword(words, walk):
        pass
    if _reads_pattern(words, blocks):
        _pattern(command, words, walk)
        return
    negated = words[:1] == ["!"]
    words = words[negated:]
    in_condition = bool(blocks) and blocks[-1].reads_condition
    runs = both(*(block.state for block in (blocks[:-1] if in_condition else blocks)))
    if command.before == "&&":
        runs = both(runs, walk.last)
    elif command.before == "||":
        runs = both(runs, inverse(walk.last))
    if words and runs is not False:
        result = tested(words, walk.variables)
        if isinstance(result, NoTest):
            yield from _simple(words, command, walk, runs is True)
            result = None if in_condition else True  # elsewhere, a script is written for commands that succeed
        result = inverse(result) if negated else result
        walk.last = result if command.before not in ("&&", "||") else chained(command.before, walk.last, result)
        if in_condition:
            blocks[-1].state = inverse(walk.last) if blocks[-1].kind == "until" else walk.last
    if command.after == ";;" and blocks and blocks[-1].kind == "case":
        blocks[-1].taken = either(blocks[-1].taken, blocks[-1].state)
        blocks[-1].state, blocks[-1].reads_condition = False, True


def _reads_pattern(words: list[str], blocks: list[_Block]) -> bool:
    """Whether a pattern of a `case` is expected."""
    return bool(blocks) and blocks[-1].kind == "case" and blocks[-1].reads_condition and words[:1] != ["esac"]


def _pattern(command: ShellCommand, words: list[str], walk: _Walk) -> None:
    """Reads a pattern of a `case`, one of several between `|`."""
    block = walk.blocks[-1]
    for word in words:
        pattern = joined(word, walk.variables)
        found = None if is_open(block.subject + pattern) else matches(block.subject, pattern)
        block.state = either(block.state, both(found, inverse(block.taken)))
    block.reads_condition = command.after != ")"


def _keyword(words: list[str], walk: _Walk) -> bool:
    """Removes a keyword from the front of the words and follows it. Returns whether there was one."""
    word, blocks = words[0], walk.blocks
    if word in ("{", "}", "time", "do"):
        del words[0]
        if word == "do" and blocks:
            blocks[-1].reads_condition = False
        return True
    if word in _CONDITIONS:
        del words[0]
        if word == "elif" and blocks:
            blocks[-1].taken = either(blocks[-1].taken, blocks[-1].state)
            blocks[-1].reads_condition = True
        else:
            blocks.append(_Block(word, None, reads_condition=True))
        return True
    if word in ("then", "else") and blocks:
        del words[0]
        block = blocks[-1]
        block.taken = either(block.taken, block.state) if word == "else" else block.taken
        block.state = inverse(block.taken) if word == "else" else both(block.state, inverse(block.taken))
        block.reads_condition = False
        return True
    if word in ("fi", "done", "esac") and blocks:
        del words[0]
        blocks.pop()
        return True
    if word == "case":
        blocks.append(_Block("case", False, reads_condition=True, subject=joined(" ".join(words[1:2]), walk.variables)))
        del words[:3]
    elif word in ("for", "select"):
        _loop(words, walk)
        words.clear()
    return False


def _loop(words: list[str], walk: _Walk) -> None:
    names = [field for word in words[3:] for field in fields(word, walk.variables)]
    single = len(names) == 1 and not is_open(names[0])
    if len(words) > 1 and words[1].isidentifier():
        walk.variables[words[1]] = names[0] if single else opened(f"${words[1]}")
    walk.blocks.append(_Block("for", True if names else None))


def _simple(words: list[str], command: ShellCommand, walk: _Walk, certain: bool) -> Iterator[Call]:
    """An assignment, or a command that a call may come from."""
    variables = walk.variables
    if words[0] in _DECLARATIONS:
        words = [word for word in words[1:] if not word.startswith("-")]
        for word in words:
            _assign(word, variables, certain)
        return
    if words[0].startswith("(("):
        for name in re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)", words[0]):
            variables[name] = opened(f"${name}")
        return
    if all(_ASSIGNMENT.fullmatch(word) for word in words):
        for word in words:
            _assign(word, variables, certain)
        return
    if words[0] in ("read", "mapfile", "readarray"):
        _read(words, command, variables, certain)
        return
    if words[0] == "shift" and isinstance(given := variables.get("@"), list):
        for name in _UNKNOWN:
            variables.pop(name, None)
        plain = certain and len(words) == 1
        variables.update(_arguments(given[1:]) if plain else _UNKNOWN)
        return
    if words[0] == "unset":
        for name in words[1:]:
            variables.pop(name, None)
        return
    while _ASSIGNMENT.fullmatch(words[0]):  # an environment of this command alone
        del words[0]
    found = [each for word in words for each in fields(word, variables)]
    if found and found[0] in walk.functions:
        yield from _call(found, walk, certain)
        return
    inner = _inner(found)
    if inner is None and command.document is not None and _SHELLS & set(found):
        inner = command.document if command.literal else document(command.document, variables)
    yield from [Call(tuple(found), certain)] if inner is None else _enter(commands(inner), walk, certain)


def _call(words: list[str], walk: _Walk, certain: bool) -> Iterator[Call]:
    """The calls of a function of the script with these arguments."""
    walk.called[words[0]] += 1
    if walk.called[words[0]] > _MOST_CALLS:
        return
    outer = {name: walk.variables.pop(name) for name in _UNKNOWN if name in walk.variables}
    walk.variables.update(_arguments(words[1:]))
    yield from _enter(walk.functions[words[0]], walk, certain)
    for name in _UNKNOWN:
        walk.variables.pop(name, None)
    walk.variables.update(outer)


def _arguments(words: list[str]) -> dict[str, str | list[str]]:
    return {"@": words, "#": str(len(words)), **{str(place): word for place, word in enumerate(words[:9], 1)}}


def _inner(words: list[str]) -> str | None:
    """The script that `eval` or `bash -c` runs."""
    if words[:1] == ["eval"]:
        return " ".join(words[1:])
    for place, word in enumerate(words[:-2]):
        if word.rpartition("/")[2] in ("bash", "sh") and re.fullmatch(r"-\w*c", words[place + 1]):
            return words[place + 2]
    return None


def _assign(word: str, variables: Variables, certain: bool) -> None:
    """`X=value`, `X+=value`, `X=(a b)`. Under a condition that is open, a variable that may change becomes open."""
    match = _ASSIGNMENT.fullmatch(word)
    if match is None:
        return
    name, index, more, text = match.groups()
    old = variables.get(name)
    new: str | list[str]
    if index is not None:
        new = opened(f"${name}")
    elif text.startswith("("):
        new = elements(text, variables)
        new = [*old, *new] if more and isinstance(old, list) else new
    elif isinstance(old, list):
        new = [joined(text, variables), *old[1:]]
    else:
        new = (old or "") + joined(text, variables) if more else joined(text, variables)
    if certain or new == old:
        variables[name] = new
    elif more and isinstance(old, list) and isinstance(new, list):
        variables[name] = [*old, opened(" ".join(new[len(old) :]))]
    elif more and isinstance(old, str) and isinstance(new, str):
        variables[name] = f"{old} {opened(new[len(old) :].strip())}"
    else:
        variables[name] = opened(f"${name}")


def _read(words: list[str], command: ShellCommand, variables: Variables, certain: bool) -> None:
    """`read -r -d '' NAME <<EOF` assigns the document; every other `read` leaves its variables open."""
    names = [word for word in words[1:] if word.isidentifier()]
    for name in names:
        variables[name] = opened(f"${name}")
    if len(names) == 1 and command.document is not None and certain and "-d" in words:
        text = command.document
        variables[names[0]] = text if command.literal else document(text, variables).strip()
