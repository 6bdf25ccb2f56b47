r"""Which left sides of an equation only name the value on the right.

Invariant: a left side is dropped only if it is a name (a symbol, a function's value, words) or has no variables. Every other
equation states a relation, so its right side alone is not its meaning: x - 2y + 3 = 0 is not 0.
"""

import re

from polyreme_reward.rules.spelling import words
from polyreme_reward.rules.units import simple

_GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|upsilon|phi"
    "|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega|ell|hbar"
)
FUNCTIONS = words("sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln lg exp sqrt max min gcd lcm mod det abs")
_ACCENT = r"\\(?:hat|bar|tilde|vec|overline|widehat|overrightarrow|dot|ddot)"
_INDEX = r"(?:_\s*(?:\{[^{}]*\}|\w))?"
_LETTER = rf"(?:[A-Za-z\u0391-\u03c9]|\\(?:{_GREEK})(?![a-zA-Z])|{_ACCENT}\s*(?:\{{\s*\\?[A-Za-z]+\s*\}}|[A-Za-z]))"
SYMBOL = re.compile(rf"{_LETTER}{_INDEX}(?:'{{1,3}}|\^\s*\{{?\s*(?:\*|\\(?:prime|ast|star))\s*\}}?)?")
_FUNCTION = re.compile(
    rf"(?P<name>(?:{_LETTER}|\\mathbb\s*\{{\s*[A-Z]\s*\}}"
    rf"|\\(?:Pr|Re|Im|deg|dim|arg|det|gcd|lcm|max|min)|[A-Za-z]{{2,8}}){_INDEX})"
    r"\s*(?:'{1,3}|\^\s*\{[^{}]*\}|\^\s*\d|\^\s*\\prime)?\s*(?P<open>[(\[]|\\\{)(?P<argument>.*)(?:[)\]]|\\\})",
    re.DOTALL,
)
_GEOMETRY = re.compile(
    r"[A-Z]{2,4}'?|\|\s*[A-Z]{2}\s*\||\[\s*[A-Z]{3,6}\s*\]"
    r"|(?:m\s*)?\\(?:overline|overrightarrow|vec|angle|triangle|measuredangle|widehat|arc)"
    r"\s*\{?\s*[A-Z]{1,4}\s*\}?|(?:m\s*)?\u2220\s*[A-Z]{1,3}|\\frac\s*\{\s*d\s*\w\s*\}\s*\{\s*d\s*\w\s*\}"
)
_RUN = re.compile(r"\\?[^\W\d_]+(?:[-'][^\W\d_]{2,})*")
_SHORT = words("is it he we so of in to at by on or as an my us if be do no up go the")
_MEASURED = re.compile(r"[-+]?[\d.,/ ]+\s*([A-Za-z\u00b5]+)(?:\^?\{?[23]\}?)?")
_CONSTANTS = words("e i pi \u03c0 frac cdot times div binom infty circ degrees degree percent")
_ORDER = r"[<>]=?|[\u2264\u2265\u2260]|\\(?:le|ge|leq|geq|leqslant|geqslant|ne|neq|lt|gt)(?![a-zA-Z])"
_ARGUMENT = re.compile(
    r"(?:(?:\b[a-zA-Z]|\b(?:log|ln|lg|sin|cos|tan|exp|sqrt))(?:_\s*\{?|\()"
    r"|\\sqrt\s*\(|\\(?:log|ln|lg|sin|cos|tan|exp)\s*[({]?\s*)$"
)
_BOUND = re.compile(
    rf"(?:(?<![-=])(?:{_ORDER})|\\pm|(?:\d\s*[$%]?[\s,\uff0c]*(?:\b(?:and/or|or|and|oder|und|ou|et|o|y|plus|minus|times|mod|by|in"
    r"|of)\b|[\u6216\u548c\u4e0e\u53ca\u3068\uacfc\uc640]\u8005?|\s-\s|\u5c0f\u65f6"
    r"|[\u4e07\u842c\u4ebf\u5104\u5343\u767e\u5143\u89d2\u65f6\u6642\u70b9\u9ede\u5206\u5e74\u6708'])"
    r"|\b(?:half|third|quarter|twice|double|root|square|cube|log|ln|sin|cos|tan)(?: of)?|[\[({][^\[\](){}\n]{1,60}[,;]"
    r"|\A\W*(?:from )?[\d.,]*\d (?:[a-z]+ )?(?:to|bis|\u00e0))(?!\s*\n)"
    rf"|\bbetween\s+(?:\\?\$)?[-\d.,]+\s*(?:[a-z]+\s+)?\band\b)\s*\\?[$({{]?\s*$"
)
_TAG = re.compile(r"(?:<[/a-zA-Z|!][^<>\n]*|(?:^|\n)[ \t]*(?:>[ \t]*)*)>\s*[$({]?\s*$")  # <answer>5, or a quotation in Markdown
_ABOVE = re.compile(rf"\s*\$?\s*(?:{_ORDER})\s*[\w\\]|(?:[abknpqrxMB]|\s?(?:[xyz]{{2,3}}|[yz]|abc?|ac|bc))(?![a-zA-Z])")
_BEGUN_TAG = re.compile(r"\s*<\s*/?[a-zA-Z|!][^<>\n]*>")
_LONGEST = 300


def names(left: str) -> bool:
    """Whether a left side names its value. `left` is the result of `spelling.plain`, without an equals sign."""
    left = left[-_LONGEST:].strip(" $*_:.")
    if not left or SYMBOL.fullmatch(left) or _GEOMETRY.fullmatch(left) or _is_value_of_function(left):
        return True
    if (measured := _MEASURED.fullmatch(left)) and simple(measured[1]) is not None:  # 3 m = 300 cm
        return True
    rest, count = _without_words(left)
    rest = rest.strip(" $*_:.{}")
    if not _variables(rest):
        return True
    return count > 0 and (
        SYMBOL.fullmatch(rest) is not None or _GEOMETRY.fullmatch(rest) is not None or _is_value_of_function(rest)
    )


def symbol(left: str) -> str:
    """The symbol that the left side consists of, or ''."""
    left = left.strip(" $*")
    return re.sub(r"[{}\s]", "", left) if SYMBOL.fullmatch(left) else ""


def parts(text: str) -> list[str]:
    """The sides of an equation or of a chain of equations. One part if the text has another relation or none."""
    if "=" not in text or re.search(
        r"[<>!:]=|=[<>]|[<>\u2264\u2265\u2260]|\\(?:le|ge|leq|geq|ne|neq|lt|gt|approx|equiv)(?![a-zA-Z])", text
    ):
        return [text]
    return re.split(r"={1,2}", text)


def states_relation(before: str) -> bool:
    """Whether a number in prose is one side of an equation with variables, or part of an expression. `before`: text before it."""
    if _ARGUMENT.search(before) or (_BOUND.search(before) and not _TAG.search(before)):
        return True
    before = before[-_LONGEST:].rstrip(" $({\\")
    if re.search(r"[\w)}\]]\s*\+$|(?:\b[a-z]|\d[a-z]|[)}\]])-$|\^$|[a-z)}\]]\s*/$", before):
        return True
    if not before.endswith("=") or before.endswith(("<=", ">=", "!=")):
        return False
    sides = re.split(r"[\n,;:$]|[.!?]\s|\\\(|\\\[|\b(?:and|or|so|then|thus|hence|but|where|with)\b", before[:-1])[-1].split("=")
    return not all(map(names, sides))


def is_compared(behind: str) -> bool:
    """Whether a number in prose is the left side of an inequality, or a factor of letters. `behind` is the text behind it."""
    return _ABOVE.match(behind) is not None and _BEGUN_TAG.match(behind) is None


def _is_value_of_function(text: str) -> bool:
    """Whether the text is the value of a function such as f(3), P(A | B) or E[X]. A letter before a sum is a factor: x(x + 1)."""
    match = _FUNCTION.fullmatch(text)
    if match is None or match["name"].lstrip("\\") in FUNCTIONS - {"max", "min", "gcd", "lcm", "det"}:
        return False
    argument = match["argument"].strip()
    depth = 0
    for char in argument:
        depth += (char in "([") - (char in ")]")
        if depth < 0:
            return False
    name = match["name"].lstrip("\\").partition("_")[0]
    if name[:1].isupper() or name in "fgh" or len(name) > 1 or match["open"] == "[":
        return True
    return re.fullmatch(r"-?\d+(?:\.\d+)?|[a-z]", argument) is not None and name != argument


def _without_words(text: str) -> tuple[str, int]:
    """The text without its words, and their number. Function names and single letters stay."""
    count = 0

    def shorten(run: re.Match[str]) -> str:
        nonlocal count
        word = run[0]
        if word.startswith("\\") or word.lower() in FUNCTIONS or not _is_word(word, text, run.end()):
            return word
        count += 1
        return " "

    return re.sub(r"\s+", " ", _RUN.sub(shorten, text)), count


def _is_word(word: str, text: str, end: int) -> bool:
    if not word.isascii():
        return len(word) > 1 or not "\u0391" <= word <= "\u03c9"
    if len(word) == 1:
        return word in "aAI" and re.match(r"\s+[a-zA-Z]{3}", text[end : end + 8]) is not None
    if len(word) == 2:
        return word.lower() in _SHORT or simple(word) is not None
    return len(word) > 3 or word.lower() in _SHORT or (word.lower() != "abc" and any(char in "aeiou" for char in word.lower()))


def _variables(text: str) -> bool:
    """Whether an expression has letters other than units, constants and functions. An x between numbers is a times sign."""
    for run in _RUN.finditer(text):
        word = run[0].lstrip("\\")
        if word == "x" and re.search(r"[\d)}]\s*$", text[: run.start()]) and re.match(r"\s*[-\d($\\]", text[run.end() :]):
            continue
        if word.lower() not in FUNCTIONS and word not in _CONSTANTS:
            return True
    return False
