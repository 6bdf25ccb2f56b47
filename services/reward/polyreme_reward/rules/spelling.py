r"""One spelling for characters and commands that look alike: spaces, signs, digits, powers, fractions and fonts.

Invariant: the value that a reader sees does not change, and the time is linear in the text.
"""

import re
import unicodedata

_INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u2064\ufeff"
_SAME = {
    "-": "\u2010\u2011\u2012\u2212\u2796\ufe63\uff0d",
    "+": "\u2795\ufe62",
    "/": "\u2044\u2215\u00f7",
    "*": "\u2217",
    "\u00b7": "\u2219\u22c5\u30fb",
    "\u00d7": "\u2715\u2716\u2a09",
    "'": "\u2018\u2019\u02bc\u2032",
    ".": "\u3002\uff61",
    ", ": "\u3001",
    " \\pm ": "\u00b1",
}
_SPACES = {code: " " for code in range(0x80, 0x3001) if unicodedata.category(chr(code)) == "Zs"}  # there is none beyond
_SPACES |= dict.fromkeys(map(ord, _INVISIBLE), "")


def _table() -> dict[int, str]:
    table = dict(_SPACES)
    for code in [*range(0xFF01, 0xFF5F), *range(0x1D400, 0x1D800)]:  # full-width forms, and mathematical fonts
        table[code] = unicodedata.normalize("NFKC", chr(code))
    for code in [0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F)]:
        over, _, under = unicodedata.normalize("NFKC", chr(code)).partition("\u2044")
        table[code] = f"\\frac{{{over}}}{{{under}}}"
    return table | {ord(char): plain for plain, chars in _SAME.items() for char in chars}


_CHARACTERS = _table()
_RAISED = {
    char: unicodedata.normalize("NFKC", char)
    for char in "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207f\u2071"
}
_RAISED["\u207b"] = "-"
_LOWERED = {chr(code): str(code - 0x2080) for code in range(0x2080, 0x208A)}
_POWER = re.compile(f"[{''.join(_RAISED)}]+")
_INDEX = re.compile(f"[{''.join(_LOWERED)}]+")


def unified(text: str) -> str:
    """The text with one character for each kind of space, sign, digit, quote, power and fraction. An en dash stays as it is,
    since it may be a minus sign or a dash."""
    if text.isascii():
        return text
    text = _POWER.sub(lambda run: "^{" + "".join(map(_RAISED.__getitem__, run[0])) + "}", text)
    text = _INDEX.sub(lambda run: "_{" + "".join(map(_LOWERED.__getitem__, run[0])) + "}", text)
    return text.translate(_CHARACTERS)


def readable(text: str) -> str:
    """The text in Unicode's composed form, with plain spaces and line ends and without invisible characters."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.isascii() else unicodedata.normalize("NFC", text).translate(_SPACES)


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


def command(*names: str) -> str:
    """A pattern for LaTeX commands. A command ends where its letters end: `\\times10` is `\\times` and 10."""
    return rf"\\(?:{'|'.join(names)})(?![a-zA-Z])"


_FONTS = r"text(?:bf|it|rm|sf|tt|up|sl|normal)?|math(?:rm|bf|it|sf|tt|up|bfit|normal)|mbox|operatorname\*?|boldsymbol|bm|emph"
_WRAPPED = re.compile(rf"\\(?:{_FONTS})\s*\{{([^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*)\}}")
_SWITCH = re.compile(
    command("rm", "bf", "it", "sf", "tt", "displaystyle", "textstyle", "left", "right", "[bB]igg?[lr]?", "limits")
)
_UPRIGHT = re.compile(
    rf"\\(?:{_FONTS})\s*(?:\{{\s*([A-Za-z])\s*\}}|\s([A-Za-z])(?![a-zA-Z]))|\{{\s*\\(?:rm|bf|it)\s+([A-Za-z])\s*\}}"
)
_DELIMITERS = re.compile(r"(?<!\\)(?:\$\$?|\\[()\[\]])")

_UNIT = "(?:[cdkm]?m|mi|[km]?g|lb|ft|[kM]?[JNWV]|s|min|hr?|mol|L|K|[a-z]{4,})"
_SPELLINGS = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        ("\u2013(?=\\s*[\\d.$])|(?<=\\d)\\s*[~\u2014\u5230\u81f3]\\s*(?=\\d)", "-"),
        (rf"(?<=\d)\s*\\(?:{_FONTS})\s*\{{\s*[eE]\s*\}}\s*(?=[+-]?\d)", "e"),
        (r"\{\s*,\s*\}|,\\!(?:\s*(?=\d{3}(?!\d)))?", ","),
        (r"\\!|(?<=\d)\{\}(?=\d)", ""),
        (rf"(?<!\\)\\[,;:> ]|~|{command('quad', 'qquad', 'thinspace', 'medspace', 'thickspace', 'enspace')}", " "),
        (rf"\\[dtc]frac(?![a-zA-Z])|{command('frac', 'cfrac')}", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (rf"\^\s*\{{?\s*{command('circ')}\s*\}}?|\u00b0|{command('degree')}", " degrees"),
        (r"\\%|(?<=\d)\s*(?:per cent|pour cent|por ciento|Prozent)\b", "%"),
        (rf"(?<=\d)\s*\\frac\s*\{{\s*({_UNIT}(?:\^\{{?[23]\}}?)?)\s*\}}\s*\{{\s*({_UNIT}(?:\^\{{?[23]\}}?)?)\s*\}}", r" \1/\2"),
        (rf"{command('cdot', 'times', 'ast')}|[\u00d7\u00b7]", " x "),
        (rf"(?<=[a-zA-Z])\s+(?:x\s+)?({_UNIT})\s*\^\s*\{{?\s*-\s*(?:1|([23]))\s*\}}?", r"/\1^\2"),
        (rf"(?<=/)({_UNIT})\^(?!\S)", r"\1"),
        (r"(?<=\d)\s*\*\*\s*(?=[\d(+-])", "^"),
        (r"\{\s*10\s*\}(?=\s*\^)", "10"),
        (r"(?<=10)\s*\^\s*\{?\s*[({]\s*([+-]?\s*\d{1,4})\s*[)}]\s*\}?", r"^{\1}"),
        (r"\^\s*\{\s*([+-])\s+(?=\d)", r"^{\1"),
        (r"(?:(?<![-\w])negative\s+|[\u8d1f\u8ca0]\s*)(?=[$\d])", "-"),
        (r"(\A|[=:(]|\b(?:is|are|be|equals|ist|est|es))(\s*)(?:minus|moins|menos)\s+(?=[$\d])", r"\1\2-"),
    )
]
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "millions": 6, "Millionen": 6, "millones": 6, "billion": 9, "trillion": 12}
_SCALES |= {"\u767e": 2, "\u5343": 3, "\u4e07": 4, "\u842c": 4, "\u767e\u4e07": 6, "\u5343\u4e07": 7, "\u4ebf": 8, "\u5104": 8}
_SCALED = re.compile(
    rf"((?<![\d.,'/^{{_])\d(?:[\d.,']*\d)?)\s*({'|'.join(sorted(_SCALES, key=len, reverse=True))})"
    r"(?![a-zA-Z\u7c73\u514b\u74e6\u5206])(?=(\d?))"
)


def undelimited(text: str) -> str:
    r"""The text without LaTeX delimiters and with $ for \$. A single dollar sign is a currency and stays."""
    text = text.replace("\\$", "\0")
    if len(_DELIMITERS.findall(text)) % 2 == 0:
        text = _DELIMITERS.sub("", text)
    return text.replace("\0", "$").strip(" \t\r\n*")


def plain(text: str) -> str:
    """The text with uniform signs, spaces, separators, fractions, powers, fonts and degrees, and without LaTeX delimiters."""
    text = undelimited(unified(text))
    for pattern, replacement in _SPELLINGS[:2]:  # before fonts are removed
        text = pattern.sub(replacement, text)
    for _ in range(3):  # fonts may be nested
        text = _WRAPPED.sub(r" \1", text)
    text = _SWITCH.sub("", text)
    for pattern, replacement in _SPELLINGS[2:]:
        text = pattern.sub(replacement, text)
    text = _SCALED.sub(lambda found: f"{found[1]} x 10^{{{_SCALES[found[2]]}}} {'+ ' if found[3] else ''}", text)
    return text.strip(" \t\r\n*")


def upright(text: str) -> str:
    r"""The text with single letters in the usual font: \mathrm{e}, \text{i} and \operatorname{d} are the letters alone."""
    return _UPRIGHT.sub(lambda found: f" {found[1] or found[2] or found[3]} ", text)
