"""Expands the words of a shell script: quotes, variables, arrays, arithmetic of integers.

Invariant: an expansion whose value the script does not have stays in the text between two marks (`is_open`). Nothing is executed.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, MutableMapping

from polyreme.import_config.reading.shell_lexer import commands, skip

Variables = MutableMapping[str, str | list[str]]
_NO_ARGUMENTS: dict[str, str | list[str]] = {"#": "0", "@": []}
_START, _END = "\ue000", "\ue001"
_OPEN = re.compile(f"{_START}[^{_END}]*{_END}")
_SPACES = re.compile(f"[ \t\n]+(?![^{_START}{_END}]*{_END})")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_OPERATION = re.compile(r"(:?[-=+?]|//?|%%?|##?|\^\^?|,,?|:)(.*)", re.DOTALL)
_PART = re.compile(r"\s*(\d+)(?::\s*(\d+))?")
_ARITHMETIC: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def opened(text: str) -> str:
    """The text as an expansion that stays open."""
    return _START + text.translate({ord(_START): None, ord(_END): None}) + _END


def is_open(text: str) -> bool:
    """Whether an expansion in the text stays open."""
    return _START in text


def shown(text: str) -> str:
    """The text without the marks, in one line."""
    return " ".join(text.replace(_START, "").replace(_END, "").split())


def known_part(text: str) -> str:
    """The text without the expansions that stay open."""
    return _OPEN.sub("", text)


def fields(word: str, variables: Variables) -> list[str]:
    """The words that a word as written becomes: none, one or several. `X:=` assigns in `variables`."""
    found: list[str] = []
    current: str | None = None
    for values, divided in _pieces(word, variables, quoted=False):
        for place, value in enumerate(values):
            if place and current is not None:
                found.append(current)
                current = None
            if not divided:
                current = (current or "") + value
                continue
            first, *rest = _SPACES.split(value)
            current = (current or "") + first if first else current
            for part in rest:
                if current is not None:
                    found.append(current)
                current = part or None
    return found if current is None else [*found, current]


def joined(word: str, variables: Variables) -> str:
    """The text that a word becomes in an assignment, where nothing is divided."""
    return "".join(" ".join(values) for values, _ in _pieces(word, variables, quoted=False))


def document(text: str, variables: Variables) -> str:
    """The text of a here-document with its expansions."""
    return "".join(" ".join(values) for values, _ in _pieces(text.replace("\\\n", ""), variables, quoted=True))


def elements(word: str, variables: Variables) -> list[str]:
    """The elements of an array as written: `(a "b c" $d)`."""
    inner = word.strip()[1:-1]
    return [each for command in commands(inner) for part in command.words for each in fields(part, variables)]


def _pieces(text: str, variables: Variables, *, quoted: bool) -> Iterator[tuple[list[str], bool]]:
    """The pieces of a word: their values, and whether spaces divide them."""
    place = 0
    while place < len(text):
        sign, end = text[place], skip(text, place, quoted)
        if sign == "\\" and not quoted:
            yield [text[place + 1 : end]], False
        elif sign == "\\":
            following = text[place + 1 : end]
            yield [following if following and following in '$`"\\' else "" if following == "\n" else text[place:end]], False
        elif sign == "'" and not quoted:
            yield [text[place + 1 : end - 1]], False
        elif sign == '"' and not quoted:
            inner = text[place + 1 : end - 1]
            yield from _pieces(inner, variables, quoted=True) if inner else iter([([""], False)])
        elif sign == "`":
            yield [opened(text[place:end])], False
        elif sign == "$" and text.startswith("$'", place) and not quoted:
            end = skip(text, place + 1)
            yield [text[place + 2 : end - 1].replace("\\n", "\n").replace("\\t", "\t").replace("\\'", "'")], False
        elif sign == "$":
            end, values = _expansion(text, place, end, variables)
            yield values, not quoted
        else:
            yield [text[place:end]], False
        place = end


def _expansion(text: str, place: int, end: int, variables: Variables) -> tuple[int, list[str]]:
    """The place after the expansion at `place`, and its values."""
    if text.startswith("$((", place):
        return end, [arithmetic(text[place + 3 : end - 2], variables) or opened(text[place:end])]
    if text.startswith("$(", place):
        return end, [opened(text[place:end])]
    if text.startswith("${", place):
        return end, _parameter(text[place:end], variables)
    if name := _NAME.match(text, place + 1):
        return name.end(), _value(name[0], None, text[place : name.end()], variables)
    return place + 1, ["$"]


def _value(name: str, index: str | None, source: str, variables: Variables) -> list[str]:
    """The value of a variable; of an array, that of the index, or all with `@`."""
    if name in "@*":  # the arguments of a function; those of the script are not known
        name, index = "@", "@"
    value = variables.get(name, _NO_ARGUMENTS.get(name))
    if value is None:
        return [opened(source)]
    if isinstance(value, str):
        return [value]
    if index in ("@", "*"):
        return value
    place = arithmetic(index or "0", variables)
    return [value[int(place)]] if place is not None and -len(value) <= int(place) < len(value) else [opened(source)]


def _parameter(source: str, variables: Variables) -> list[str]:
    """`${...}` with its operations. Those that are not followed stay open."""
    match = _PARAMETER.fullmatch(source[2:-1])
    if match is None:
        return [opened(source)]
    prefix, name, index, rest = match.groups()
    values = _value(name, index, source, variables)
    unset = variables.get(name) is None and name not in "@*#"
    if prefix == "!" or (prefix == "#" and unset):
        return [opened(source)]
    if prefix == "#":
        return [str(len(values) if index in ("@", "*") else len(values[0]))]
    operation = _OPERATION.fullmatch(rest)
    if operation is None:
        return values if not rest else [opened(source)]
    sign, word = operation.groups()
    if sign.strip(":") in ("-", "=", "+", "?"):
        return _default(sign, name, word, values, unset, variables)
    pattern = joined(word, variables)
    if sign == ":" and (index or name) in ("@", "*"):
        bounds = _PART.fullmatch(pattern)
        if bounds is None:
            return [opened(source)]
        rest = values[max(0, int(bounds[1]) - (name in "@*")) :]  # the first argument has the number 1
        return rest[: int(bounds[2])] if bounds[2] else rest
    return [opened(source) if is_open(value + pattern) else _changed(value, sign, pattern, source) for value in values]


def _default(sign: str, name: str, word: str, values: list[str], unset: bool, variables: Variables) -> list[str]:
    """`${X:-word}` and its kin. What neither the script nor a default sets is open."""
    missing = unset or (":" in sign and values == [""]) or (not values)
    if sign.endswith("+"):
        return [] if missing else fields(word, variables)
    if not missing or sign.endswith("?"):
        return values
    found = joined(word, variables)
    if sign.endswith("=") and not name.isdigit():
        variables[name] = found
    return [found]


def _changed(value: str, sign: str, pattern: str, source: str) -> str:
    if sign in ("^^", ",,"):
        return value.upper() if sign == "^^" else value.lower()
    if sign == "//" or (sign == "/" and not pattern.startswith(("#", "%"))):
        old, _, new = pattern.partition("/")
        return re.sub(_glob(old), lambda _: new, value, count=int(sign == "/"))
    if sign in ("%", "%%"):
        places = range(len(value), -1, -1) if sign == "%" else range(len(value) + 1)
        return next((value[:place] for place in places if re.fullmatch(_glob(pattern), value[place:], re.DOTALL)), value)
    if sign in ("#", "##"):
        ends = range(len(value) + 1) if sign == "#" else range(len(value), -1, -1)
        return next((value[place:] for place in ends if re.fullmatch(_glob(pattern), value[:place], re.DOTALL)), value)
    if sign == ":" and (bounds := _PART.fullmatch(pattern)):
        return value[int(bounds[1]) :][: int(bounds[2]) if bounds[2] else None]
    return opened(source)


def _glob(pattern: str) -> str:
    return "".join({"*": "[\\s\\S]*", "?": "[\\s\\S]"}.get(sign, re.escape(sign)) for sign in pattern)


def matches(value: str, pattern: str) -> bool:
    """Whether a text matches a pattern with `*` and `?`."""
    return re.fullmatch(_glob(pattern), value) is not None


def arithmetic(text: str, variables: Variables) -> str | None:
    """The value of an expression of integers; None: it has unknown parts or other operations."""
    text = joined(text, variables)
    for _ in range(8):  # a variable's value may itself be an expression
        named = re.sub(r"[A-Za-z_]\w*", lambda name: _number(variables.get(name[0])), text)
        if named == text:
            break
        text = named
    try:
        return str(_evaluate(ast.parse(re.sub(r"(?<!/)/(?!/)", "//", text.strip()), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _number(value: str | list[str] | None) -> str:
    return f"({value})" if isinstance(value, str) and value.strip() and not is_open(value) and len(value) < 200 else "?"


def _evaluate(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, power = _evaluate(node.left), _evaluate(node.right)
        if 0 <= power <= 64 and abs(base) <= 1024:
            return int(base**power)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError(node)
