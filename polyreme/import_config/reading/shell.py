"""Follows the assignments and conditions of a shell script up to its commands, without executing anything.

Invariant: a variable has the value that bash would give it in a plain start of the script, or is open: what a condition, an
argument or the output of a command decides is never guessed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from polyreme.import_config.reading.shell_lexer import ShellCommand, commands
from polyreme.import_config.reading.shell_words import (
    Variables,
    document,
    elements,
    fields,
    is_open,
    joined,
    matches,
    opened,
)

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=(.*)", re.DOTALL)
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_CONDITIONS = ("if", "elif", "while", "until")
_SHELLS = {"bash", "sh", "sbatch", "/bin/bash", "/bin/sh"}
_MAX_DEPTH = 8


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


def calls(text: str) -> Iterator[Call]:
    """The commands that a plain start of the script may run, in their order."""
    yield from _walk(text, _Walk({"HOME": "~"}))


def _walk(text: str, walk: _Walk) -> Iterator[Call]:
    for command in commands(text):
        yield from _command(command, walk)


def _and(*values: bool | None) -> bool | None:
    return False if False in values else None if None in values else True


def _or(one: bool | None, other: bool | None) -> bool | None:
    return True if True in (one, other) else None if None in (one, other) else False


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _command(command: ShellCommand, walk: _Walk) -> Iterator[Call]:
    words, blocks = list(command.words), walk.blocks
    if blocks and blocks[-1].kind == "case" and (command.after == ")" or command.after == ";;") and _arm(command, words, walk):
        return
    while words and _keyword(words, walk):
        pass
    outer = blocks[:-1] if blocks and blocks[-1].reads_condition else blocks
    runs = _and(*(block.state for block in outer))
    if command.before == "&&":
        runs = _and(runs, walk.last)
    elif command.before == "||":
        runs = _and(runs, _not(walk.last))
    if words and runs is not False:
        result = _test(words, walk.variables)
        if result is _NO_TEST:
            yield from _simple(words, command, walk, runs is True)
            result = True
        assert not isinstance(result, _NoTest)
        walk.last = result if command.before not in ("&&", "||") else _chained(command.before, walk.last, result)
        if blocks and blocks[-1].reads_condition:
            blocks[-1].state = walk.last
    if command.after == ";;" and blocks and blocks[-1].kind == "case":
        blocks[-1].taken = _or(blocks[-1].taken, blocks[-1].state)
        blocks[-1].state = False


def _chained(sign: str, before: bool | None, result: bool | None) -> bool | None:
    return _and(before, result) if sign == "&&" else _or(before, result)


def _arm(command: ShellCommand, words: list[str], walk: _Walk) -> bool:
    """Reads a pattern of a `case`. Returns whether the command was one."""
    block = walk.blocks[-1]
    if words[:1] == ["esac"] or command.after != ")" or len(words) != 1:
        return False
    pattern = joined(words[0], walk.variables)
    found = None if is_open(block.subject + pattern) else matches(block.subject, pattern)
    block.state = _or(block.state, found) if command.before == "|" else _and(found, _not(block.taken))
    return True


def _keyword(words: list[str], walk: _Walk) -> bool:
    """Removes a keyword from the front of the words and follows it. Returns whether there was one."""
    word, blocks = words[0], walk.blocks
    if word in ("{", "}", "!", "time", "do") or word.endswith("()"):
        del words[0]
        if word == "do" and blocks:
            blocks[-1].reads_condition = False
        return word != "!" or bool(words)
    if word == "function":
        del words[:2]
        return True
    if word in _CONDITIONS:
        del words[0]
        if word == "elif" and blocks:
            blocks[-1].taken = _or(blocks[-1].taken, blocks[-1].state)
            blocks[-1].reads_condition = True
        else:
            blocks.append(_Block(word, None, reads_condition=True))
        return True
    if word in ("then", "else") and blocks:
        del words[0]
        block = blocks[-1]
        block.taken = _or(block.taken, block.state) if word == "else" else block.taken
        block.state = _not(block.taken) if word == "else" else _and(block.state, _not(block.taken))
        block.reads_condition = False
        return True
    if word in ("fi", "done", "esac") and blocks:
        del words[0]
        blocks.pop()
        return True
    if word in ("for", "case", "select"):
        _open_block(words, walk)
        words.clear()
    return False


def _open_block(words: list[str], walk: _Walk) -> None:
    if words[0] == "case":
        walk.blocks.append(_Block("case", False, subject=joined(words[1], walk.variables) if len(words) > 1 else ""))
        return
    names = [field for word in words[3:] for field in fields(word, walk.variables)]
    single = len(names) == 1 and not is_open(names[0])
    if len(words) > 1 and words[1].isidentifier():
        walk.variables[words[1]] = names[0] if single else opened(f"${words[1]}")
    walk.blocks.append(_Block("for", True if names else None))


class _NoTest:
    pass


_NO_TEST = _NoTest()


def _test(words: list[str], variables: Variables) -> bool | _NoTest | None:
    """The result of `[ ... ]`, `[[ ... ]]` and `test ...`. None: it is open."""
    if words[0] in ("true", "false"):
        return words[0] != "false"
    if words[0] not in ("[", "[[", "test"):
        return _NO_TEST
    parts = words[1:-1] if words[0] != "test" else words[1:]
    negated = parts[:1] == ["!"]
    plain = {**variables, **dict.fromkeys("123456789", "")}  # a plain start has no arguments
    values = [joined(part, plain) for part in parts[negated:]]
    result: bool | None = None
    if any(is_open(value) for value in values):
        result = None
    elif len(values) == 2 and values[0] in ("-z", "-n"):
        result = (values[1] == "") == (values[0] == "-z")
    elif len(values) == 3 and values[1] in ("=", "==", "!="):
        equal = matches(values[0], values[2]) if words[0] == "[[" else values[0] == values[2]
        result = equal == (values[1] != "!=")
    elif len(values) == 3 and values[1] in _COMPARISONS and all(re.fullmatch(r"-?\d+", values[place]) for place in (0, 2)):
        difference = int(values[0]) - int(values[2])
        result = _COMPARISONS[values[1]](difference)
    elif len(values) == 1:
        result = values[0] != ""
    return _not(result) if negated else result


_COMPARISONS = {
    "-eq": lambda difference: difference == 0,
    "-ne": lambda difference: difference != 0,
    "-lt": lambda difference: difference < 0,
    "-le": lambda difference: difference <= 0,
    "-gt": lambda difference: difference > 0,
    "-ge": lambda difference: difference >= 0,
}


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
    if words[0] == "unset":
        for name in words[1:]:
            variables.pop(name, None)
        return
    while _ASSIGNMENT.fullmatch(words[0]):  # an environment of this command alone
        del words[0]
    found = [each for word in words for each in fields(word, variables)]
    inner = _inner(found)
    if inner is None and command.document is not None and _SHELLS & set(found):
        inner = command.document if command.literal else document(command.document, variables)
    if inner is None:
        yield Call(tuple(found), certain)
    elif walk.depth < _MAX_DEPTH:
        deeper = _Walk(variables, depth=walk.depth + 1)
        yield from (Call(call.words, call.certain and certain) for call in _walk(inner, deeper))


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
