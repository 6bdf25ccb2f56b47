"""Divides the text of a shell script into commands and their words, as written.

Invariant: pure, and every construct ends at the text's end at the latest. Nothing is executed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_BREAKS = ("&&", "||", ";;", "|&", ";", "|", "\n", "&", "(", ")")


@dataclass(frozen=True)
class ShellCommand:
    """A command.

    Attributes:
        words: its words with their quotes and `$`, without comments, redirections and continued lines.
        before: the sign between the previous command and this one, such as `&&`.
        after: the sign behind it.
        document: the text of its here-document; None: it has none.
        literal: whether the here-document has no expansions.
    """

    words: tuple[str, ...]
    before: str
    after: str
    document: str | None = None
    literal: bool = False


def skip(text: str, start: int, quoted: bool = False) -> int:
    """The place after the character, quotation or expansion at `start`; `quoted`: within double quotes."""
    sign = text[start]
    if sign == "\\":
        return start + 2
    if sign == "'" and not quoted:
        return _after(text, "'", start + 1)
    if sign == "`":
        return _after(text, "`", start + 1)
    if sign == '"' and not quoted:
        place = start + 1
        while place < len(text) and text[place] != '"':
            place = skip(text, place, quoted=True)
        return place + 1
    if text.startswith("$(", start):
        return _balanced(text, start + 2, ")")
    if text.startswith("${", start):
        return _balanced(text, start + 2, "}", quoted)
    return start + 1


def _after(text: str, sign: str, start: int) -> int:
    place = text.find(sign, start)
    return len(text) if place < 0 else place + 1


def _balanced(text: str, place: int, close: str, quoted: bool = False) -> int:
    """The place after the bracket that closes at the level of `place`. Comments between round brackets are skipped."""
    while place < len(text) and text[place] != close:
        if close == ")" and text[place] == "(":
            place = _balanced(text, place + 1, ")")
        elif close == ")" and text[place] == "#" and text[place - 1] in " \t\n(":
            place = _after(text, "\n", place)
        else:
            place = skip(text, place, quoted)
    return place + 1


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0
        self.words: list[str] = []
        self.word = ""
        self.before = "\n"
        self.redirects = False  # the next word is the file of a redirection
        self.pending: tuple[str, bool] | None = None  # delimiter of a here-document, and whether its lines lose their tabs
        self.delimiter: bool | None = None  # the next word is the delimiter of a here-document
        self.line: list[ShellCommand] = []  # commands that wait for a here-document
        self.of_document = -1  # which of them has it

    def end_word(self) -> None:
        if self.word and self.delimiter is not None:
            self.pending, self.delimiter, self.of_document = (self.word, self.delimiter), None, len(self.line)
        elif self.word and self.redirects:
            self.redirects = False
        elif self.word:
            self.words.append(self.word)
        self.word = ""

    def commands(self) -> Iterator[ShellCommand]:
        while self.place < len(self.text):
            sign = self._sign()
            if sign:
                yield from self._end(sign)
        self.end_word()
        yield from self._end("\n")

    def _sign(self) -> str:
        """Reads one element and returns the sign if it ends a command."""
        text, place = self.text, self.place
        if text.startswith("\\\n", place):
            self.place += 2
        elif text[place] in " \t\r":
            self.end_word()
            self.place += 1
        elif text[place] == "#" and not self.word:
            self.place = len(text) if (end := text.find("\n", place)) < 0 else end
        elif text[place] == "(" and not self.redirects and (_ARRAY.fullmatch(self.word) or text.startswith("((", place)):
            self._take(_balanced(text, place + 1, ")"))
        elif text.startswith("()", place) and (self.word or self.words):
            self.word = self.word or self.words.pop()  # of `name ()`
            self._take(place + 2)
        elif text[place] in "&|()<>" and "[[" in self.words and "]]" not in (*self.words, self.word):
            self._take(place + 1)
        elif text[place] in "<>" or text.startswith("&>", place):
            self._redirect()
        else:
            for sign in _BREAKS:
                if text.startswith(sign, place):
                    self.end_word()
                    self.place += len(sign)
                    return sign
            self._take(skip(text, place))
        return ""

    def _take(self, end: int) -> None:
        self.word += self.text[self.place : end]
        self.place = end

    def _redirect(self) -> None:
        text, place = self.text, self.place
        if text[place] in "<>" and text.startswith("(", place + 1):  # a process substitution is a word that stays open
            self._take(_balanced(text, place + 2, ")"))
            return
        if self.word.isdigit():  # a file descriptor
            self.word = ""
        self.end_word()
        if text.startswith("<<<", place):
            self.place, self.redirects = place + 3, True
        elif text.startswith("<<", place):
            tabs = text.startswith("<<-", place)
            self.place, self.delimiter = place + 2 + tabs, tabs
        else:
            signs = re.compile(r"&?[<>]+[&|]?").match(text, place)
            self.place, self.redirects = signs.end() if signs else place + 1, True

    def _end(self, sign: str) -> Iterator[ShellCommand]:
        """The commands complete with this sign. A here-document follows the line, so its command waits for the line's end."""
        if self.words or sign in (")", ";;"):
            self.line.append(ShellCommand(tuple(self.words), self.before, sign))
        if self.words or sign != "\n":
            self.before = sign
        self.words = []
        if self.pending is None:
            yield from self._complete(None, False)
        elif sign == "\n":
            (delimiter, tabs), self.pending = self.pending, None
            literal = delimiter != (name := re.sub(r"[\"'\\]", "", delimiter))
            yield from self._complete(self._document(name, tabs), literal)
        if sign == "\n":
            self.redirects = False

    def _complete(self, document: str | None, literal: bool) -> Iterator[ShellCommand]:
        for place, command in enumerate(self.line):
            yield replace(command, document=document, literal=literal) if place == self.of_document else command
        self.line, self.of_document = [], -1

    def _document(self, name: str, tabs: bool) -> str:
        lines: list[str] = []
        while self.place < len(self.text):
            end = _after(self.text, "\n", self.place)
            line, self.place = self.text[self.place : end].removesuffix("\n"), end
            line = line.lstrip("\t") if tabs else line
            if line == name:
                break
            lines.append(line)
        return "\n".join(lines)


def commands(text: str) -> Iterator[ShellCommand]:
    """The commands of a script in their order. Keywords such as `if` and `then` are the first words of commands."""
    return _Lexer(text).commands()
