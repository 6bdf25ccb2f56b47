"""The truth of a shell script's tests and conditions. It has three values: None is open.

Invariant: a test that reads files, or a value that the script does not have, is open. Pure.
"""

import operator
import re

from polyreme.import_config.reading.shell_words import Variables, is_open, joined, matches

Truth = bool | None


def both(*values: Truth) -> Truth:
    return False if False in values else None if None in values else True


def either(one: Truth, other: Truth) -> Truth:
    return True if True in (one, other) else None if None in (one, other) else False


def inverse(value: Truth) -> Truth:
    return None if value is None else not value


def chained(sign: str, before: Truth, result: Truth) -> Truth:
    return both(before, result) if sign == "&&" else either(before, result)


class NoTest:
    """The result of a command that is no test."""


NO_TEST = NoTest()


def tested(words: list[str], variables: Variables) -> Truth | NoTest:
    """The result of `[ ... ]`, `[[ ... ]]` and `test ...`. None: it is open."""
    if words[0] in ("true", "false"):
        return words[0] != "false"
    if words[0] not in ("[", "[[", "test"):
        return NO_TEST
    if words[0] == "test":
        return _holds(words[1:], variables, globs=False)
    return _holds(words[1:-1], variables, words[0] == "[[") if words[-1] == ("]" * len(words[0])) else None


def _holds(parts: list[str], variables: Variables, globs: bool) -> Truth:
    """The truth of what is tested. `globs`: as within `[[ ]]`."""
    for sign in ("||", "&&") if globs and "(" not in parts else ():
        if sign in parts:
            place = parts.index(sign)
            return chained(sign, *(_holds(each, variables, globs) for each in (parts[:place], parts[place + 1 :])))
    if parts[:1] == ["!"]:
        return inverse(_holds(parts[1:], variables, globs))
    plain = {**dict.fromkeys("123456789", ""), **variables}  # a plain start has no arguments
    values = [joined(part, plain) for part in parts]
    if any(is_open(value) for value in values):
        return None
    match values:
        case ["-z", text]:
            return text == ""
        case ["-n", text] | [text]:
            return text != ""
        case [text, "=" | "==" | "!=" as sign, other]:
            return (matches(text, other) if globs else text == other) == (sign != "!=")
        case [one, sign, other] if sign in _COMPARISONS and all(re.fullmatch(r"-?\d+", each) for each in (one, other)):
            return bool(_COMPARISONS[sign](int(one), int(other)))
    return None


_COMPARISONS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
