r"""Reads numbers as people write them, with units.

Invariant: a text is read completely or not at all, and values are exact.

Supported are decimals, thousands separators (12,500 and 12 500), scientific notation (1e-05, 6.02 \times 10^{25}), fractions,
mixed numbers (3 1/2), repeating decimals, numbers in another base (101_2), scales in words (3 million), percent signs, currencies
and units (also 5 hours 30 minutes). Dates, times, ranges, pairs and powers are not numbers. A comma is a decimal comma only
behind points between thousands: 1.234,56. Elsewhere it separates values, so 3,14 is no number.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from polyreme_reward.rules import sides
from polyreme_reward.rules.spelling import plain, words
from polyreme_reward.rules.units import Unit, simple, unit

_DIGITS = 1000
"""Maximum digits of a value for arithmetic. Longer numbers are compared digit by digit."""

ROUNDED = 6
"""Minimum number of decimals, and of significant digits, of a value that may be rounded from an exact one."""

_END = 500
"""Number of characters at the end of a text that are searched first."""

_GROUPED = "|".join(rf"\d{{1,3}}(?:{mark}\d{{3}})+(?!\d)" for mark in ", '_") + r"|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)"
_WHOLE = rf"(?:{_GROUPED}|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d*)?|\.\d+)"
_POWER_OF_TEN = r"\^\s*(?:\{{\s*(?P<{0}>[+-]?\d{{1,4}})\s*\}}|(?P<{1}>[+-]?\d{{1,4}})(?![\d.]))"
_EXPONENT = r"(?:[eE](?P<e>[+-]?\d{1,4})(?!\d|\.\d)|\s*[xX*]\s*10\s*" + _POWER_OF_TEN.format("t", "u") + ")"
_BODY = (
    rf"(?:(?P<whole>{_WHOLE})\s+(?P<mixed>\d+\s*/\s*\d+)(?![\d/])"
    rf"|(?P<whole2>{_WHOLE})\s*\\frac\s*\{{\s*(?P<over2>\d+)\s*\}}\s*\{{\s*(?P<under2>\d+)\s*\}}"
    rf"|\\frac\s*\{{\s*(?P<over>[+-]?{_DECIMAL})\s*\}}\s*\{{\s*(?P<under>[+-]?{_DECIMAL})\s*\}}"
    rf"|(?P<top>{_DECIMAL})\s*/\s*(?P<bottom>{_DECIMAL})(?!\s*/\s*\d|\d)"
    rf"|10\s*{_POWER_OF_TEN.format('ten', 'ten2')}"
    rf"|(?P<based>\d+)_\s*(?:\{{\s*(?P<base>\d+)\s*\}}|(?P<base2>\d{{1,2}})(?!\d))"
    rf"|(?P<decimal>{_DECIMAL}){_EXPONENT}?)"
)
_CURRENCY = (
    r"(?:(?:US|USD|CA|AU|HK|NZ|[ACS])?\$|[\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd]|(?:USD|EUR|GBP|JPY|CNY|INR|CHF|Rs\.?) ?(?=\d))"
)
_UNIT = r"%|\u00a2|[^\W\d_](?:[^\W\d_]|[ ./'-])*(?:\s*\^?\{?[23\u00b2\u00b3]\}?)?"
_QUANTITY = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<currency>{_CURRENCY})?\s*(?P<sign2>[+-]?)\s*{_BODY}(?P<gap>\s*)(?P<unit>{_UNIT})?"
)
_REPEATING = re.compile(
    r"([+-]?)\s*(\d{0,100}\.\d{0,100})(?:\\(?:overline|bar|dot)\s*(?:\{\s*(\d{1,100})\s*\}|(\d))|\((\d{1,100})\)"
    r"|\\dot\s*(?:\{\s*(\d)\s*\}|(\d))(\d{0,100})\\dot\s*(?:\{\s*(\d)\s*\}|(\d)))"
)
_CONTINUED = re.compile(
    r"([+-]?)\s*(\d{1,100}\.\d{0,20}?)((\d)\4{2,40}|(\d{2,5})\5{2,9}|(\d{6,12})\6{1,9})(?:\.{3}|\u2026|\\l?dots)"
)
_EUROPEAN = re.compile(
    r"(?<![\d.,])(\d{1,3}(?:\.\d{3})+),(\d{1,2}|\d{4,})(?![\d,]|\.\d)|(?<![\d.,])(\d{1,3}(?:\.\d{3}){2,})(?![\d.,])"
)
_HALF = re.compile(r"(?:\A|[^\d,. ]|[^\d] )[.]?\d+(?:[. ]\d+)*,\Z|\d,\d{3},\Z")
"""What stands before the decimals behind a decimal comma. In a list of three numbers it stands before none: 1,2,3."""
_PART = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3}){1,30}|\d{1,99}(?:\.\d{1,99})?)\s*([a-zA-Z]+)\.?(?:\s*,)?(?:\s+and)?\s*")
_SEVERAL = re.compile(r"[,;]|\b(?:or|and)\b")
MONTH = r"\b(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}\.?"
_INTEGER_POWER = r"\^\s*(?:\{\s*[+-]?\d{1,4}\s*\}|[+-]?\d{1,4}(?![\d.]))"
_IN_PROSE = re.compile(
    rf"(?P<other>\d{{1,4}}([-/])\d{{1,2}}\2\d{{1,4}}(?!\d)|\d+(?:(?::|\s:\s)\d+)+|\d{{4}}\u5e74\d{{1,2}}\u6708\d*"
    rf"|{MONTH}\s\d{{1,2}}(?:st|nd|rd|th)?,?\s\d{{4}}|\d{{1,2}}\.?\s{MONTH}\s\d{{4}}|\d+(?:\.\d+){{2,}}"
    rf"|\d[\d.,]{{0,30}}[-\u2013]\d[\d.,]*|\\sqrt\s*(?:\[[^\]]*\])?\s*(?:\{{[^{{}}]*\}}|\d)|[\u221a\u221b]\(?\d[\d.,]{{0,30}}"
    rf"|\d+h\d+|\d[\d.,]{{0,30}}!|\d[\d.,]{{0,30}}[eE][+-]?(?:\d{{5}}|\d+\.\d)[\d.]*"
    rf"|(?!10\s*{_INTEGER_POWER})\d[\d.,]{{0,30}}\s*\^\s*[{{(]?\s*[+-]?[\w.]+[)}}]?"
    rf"|\d[\d.,]{{0,30}}(?:(?:[+*]|\s+[x+*]\s+)(?!10\s*\^)\d[\d.,]{{0,30}})+)"
    rf"|(?P<number>(?:(?<![\d\w])[+-])?(?:{_CURRENCY}[+-]?)?{_BODY}"
    r"(?:\s*%|\s+(?!(?:[xyz]{2,3}|abc?|ac|bc)\b)[^\W\d_]+(?:/[^\W\d_]+)?(?:\^?\{?[23\u00b2\u00b3]\}?(?!\d))?)?)"
)
_OHM = re.compile(r"\s*([kM]?)\\Omega(?![a-zA-Z])\s*")
_SYMBOLS = frozenset("NJWVAKCF")
"""Symbols of units that are variables more often."""
_DENIED = re.compile(
    r"(?:\b(?:not|\w+n['\u2019]t|instead of|rather than|nicht|pas|\d+[%\s]*(?:[a-z]+ )?out of(?: the)?)\s+"
    r"|[\u4e0d\u975e]\u662f?\s*)(?:\\?\$)?$"
)
_EITHER = re.compile(r"(.{1,40}?)[\s,]*(?:\b(?:or|oder|ou|o)\b|\u6216\u8005?)\s*(.{1,40})")  # 1/2 or 0.5
_NO_UNIT = Unit("", Fraction(1))
_NO_UNITS = words(
    "and or over plus minus times mod choose x xy xz yz xyz ab ac bc abc i e pi sin cos tan log ln exp sqrt sec csc cot arcsin"
    " arccos arctan alpha beta gamma delta theta lambda sigma omega phi psi"
)


@dataclass(frozen=True)
class Quantity:
    """A number with an optional unit.

    Attributes:
        value: exact value without the unit, or a string of digits when there are more than _DIGITS.
        places: number of written decimals, or None for a fraction or a whole number.
        unit: what the number counts or measures, or None when that is not stated.
        name: the symbol that the number was assigned to, such as x, or ''.
        fraction: whether the number was written as a fraction or mixed number.
    """

    value: Fraction | str
    places: int | None = None
    unit: Unit | None = None
    name: str = ""
    fraction: bool = False

    def equals(self, other: "Quantity") -> bool:
        """Whether both mean the same. A unit or name that one of them omits is ignored. A decimal with six or more places and
        significant digits may be rounded from an exact value."""
        if self.name and other.name and self.name != other.name:
            return False
        one, two = self.unit or _NO_UNIT, other.unit or _NO_UNIT
        if _NO_UNIT in (one, two) and self._near(other, Fraction(1), Fraction(1)):
            return True
        comparable = one.dimension == two.dimension or {one.dimension, two.dimension} == {"", "%"}
        return comparable and self._near(other, one.factor, two.factor)

    def _near(self, other: "Quantity", factor: Fraction, other_factor: Fraction) -> bool:
        if isinstance(self.value, str) or isinstance(other.value, str):
            return self.value == other.value and factor == other_factor
        if self.value * factor == other.value * other_factor:
            return True
        rounded, exact = (self, other) if other.places is None else (other, self)
        if factor != other_factor or exact.places is not None:
            return False
        return abs(Fraction(rounded.value) - Fraction(exact.value)) <= tolerance(Fraction(rounded.value), rounded.places)


def tolerance(value: Fraction, places: int | None) -> Fraction:
    """How much a value with that many written decimals may differ from an exact one: half of its last decimal if it has ROUNDED
    decimals and as many significant digits, else nothing."""
    if places is None or places < ROUNDED or abs(value) * 10**places < 10 ** (ROUNDED - 1):
        return Fraction(0)
    return Fraction(1, 2) / 10**places


def read(text: str, letters: bool = False) -> Quantity | None:
    """The quantity that the whole text states, also as `x = 3` or `6 x 7 = 42`. None when it states none or several.

    Args:
        text: the result of `plain`.
        letters: read a letter that may be a variable or a unit as a unit: 5m, 10 N.
    """
    if either := _EITHER.fullmatch(text):
        one, other = (read(side, letters) for side in either.groups())
        return one if one is not None and other is not None and one.equals(other) else None
    *heads, text = sides.parts(text)
    if any(_SEVERAL.search(head) or not sides.names(head) for head in heads):
        return None
    name = sides.symbol(heads[0]) if heads else ""
    if (periodic := _repeating(text.strip())) is not None:
        return Quantity(periodic, name=name)
    text = _pointed(text).strip().removesuffix(".")
    if letters:
        text = _OHM.sub(r" \1ohm", text)
    if match := _QUANTITY.fullmatch(text):
        return _quantity(match, name, letters)
    larger = _PART.match(text)
    smaller = _QUANTITY.fullmatch(text, larger.end()) if larger else None
    return _joined(larger, _quantity(smaller, name)) if larger and smaller else None


def last_in(text: str) -> tuple[Quantity | None, int]:
    """The last number in prose, and its position, or -1 when there is none. The number is None for a date, a time, a range or a
    power. Numbers after "not" and "instead of" are skipped."""
    if len(text) > 2 * _END:  # the end suffices if it contains a complete number
        found, place = _last_in(plain(text[-_END:]))
        if place > _END // 2:
            return found, place
    return _last_in(plain(text))


def _last_in(text: str) -> tuple[Quantity | None, int]:
    last, text = None, _pointed(text)
    for match in _IN_PROSE.finditer(text):
        if not _DENIED.search(text, max(0, match.start() - 40), match.start()):
            last = match
    if last is None:
        return None, -1
    before = text[max(0, last.start() - _END) : last.start()]
    is_part = last["other"] is not None or sides.states_relation(before) or _HALF.search(before) is not None
    if is_part or sides.is_compared(text[last.end() : last.end() + _END]):
        return None, last.start()
    whole = _QUANTITY.fullmatch(last["number"].rstrip())
    named = simple(whole["unit"].strip()) if whole and whole["unit"] and whole["unit"] not in _SYMBOLS else None
    if whole is None or (whole["unit"] and named is None and "/" not in whole["unit"] and "^" not in whole["unit"]):
        shorter = re.sub(r"\s+[^\W\d_]\S*$", "", last["number"])  # drops the next word of the sentence
        whole = _QUANTITY.fullmatch(shorter)
    found = None if whole is None else _quantity(whole, "")
    for part in list(_PART.finditer(before))[-1:]:
        found = (_joined(part, found) if part.end() == len(before) else None) or found
    return found, last.start()


def _pointed(text: str) -> str:
    """The text with the English separators in numbers such as 1.234,56 and 1.234.567."""
    return _EUROPEAN.sub(lambda found: found[3].replace(".", "") if found[3] else f"{found[1].replace('.', '')}.{found[2]}", text)


def _repeating(text: str) -> Fraction | None:
    """The value of a decimal whose last digits repeat: 0.1\\overline{6}, 0.1\\dot{6}, 0.1(6), 0.1666..."""
    if match := _REPEATING.fullmatch(text):
        sign, digits, *cycle = match.groups("")
    elif match := _CONTINUED.fullmatch(text):
        sign, digits, _, *cycle = match.groups("")
    else:
        return None
    period = "".join(cycle)
    exact = Fraction(f"0{digits}") + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(digits.partition(".")[2]))
    return -exact if sign == "-" else exact


def _joined(larger: re.Match[str], smaller: Quantity | None) -> Quantity | None:
    """A quantity in two units of one dimension: 5 hours 30 minutes. None when the units are not of this kind."""
    over = simple(larger[2])
    if smaller is None or smaller.unit is None or over is None or isinstance(smaller.value, str):
        return None
    if over.dimension != smaller.unit.dimension or over.factor <= smaller.unit.factor:
        return None
    value = smaller.value + Fraction(_strip(larger[1])) * over.factor / smaller.unit.factor
    return Quantity(value, None, smaller.unit, smaller.name)


def _quantity(match: re.Match[str], name: str, letters: bool = False) -> Quantity | None:
    named = (match["unit"] or "").strip(" .")
    if named and not _is_unit(named, not match["gap"], letters):
        return None
    if named and match["currency"]:
        named = ""  # as in $5 dollars, $3 per hour
    measured = unit(match["currency"] or named) if match["currency"] or named else None
    value, places, fraction = _value(match)
    if value is None:
        return None
    if "-" in (match["sign"], match["sign2"]):
        value = -value if isinstance(value, Fraction) else f"-{value}"
    return Quantity(value, places, measured, name, fraction)


def _is_unit(text: str, adjacent: bool, letters: bool) -> bool:
    """Whether the text after a number may be a unit. A letter directly after the number is a variable: 3x, 2ab. With `letters` it
    is a unit if there is one of this name."""
    words = re.split(r"[\s/.^]+", text)
    if any(word.lower() in _NO_UNITS for word in words) or len(words) > 5:
        return False
    return (
        text == "%"
        or (simple(words[0]) is not None and (letters or len(words[0]) > 1 or not (adjacent or words[0] in _SYMBOLS)))
        or (not adjacent and len(words[0]) > 1)
    )


def _value(match: re.Match[str]) -> tuple[Fraction | str | None, int | None, bool]:
    """The value (None: undefined, a division by zero), the number of written decimals, and whether it is a fraction."""
    if match["mixed"] or match["whole2"]:
        over, under = match["mixed"].split("/") if match["mixed"] else (match["over2"], match["under2"])
        return _ratio(over, under, _strip(match["whole"] or match["whole2"])), None, True
    if match["over"] or match["top"]:
        return _ratio(match["over"] or match["top"], match["under"] or match["bottom"]), None, True
    if (power := match["ten"] or match["ten2"]) is not None:
        return Fraction(10) ** int(power), None, False
    if match["based"]:
        base = int(match["base"] or match["base2"])
        valid = 2 <= base <= 36 and len(match["based"]) <= _DIGITS and all(int(digit) < base for digit in match["based"])
        return (Fraction(int(match["based"], base)) if valid else None), None, False
    digits = _strip(match["decimal"])
    exponent = int(match["e"] or match["t"] or match["u"] or 0)
    places = len(digits.partition(".")[2]) - exponent
    if len(digits) + abs(exponent) > _DIGITS:
        return _canonical(digits, exponent), places, False
    return Fraction(digits if digits != "." else "0") * Fraction(10) ** exponent, places if places > 0 else None, False


def _strip(digits: str) -> str:
    return re.sub("[, '_]", "", digits)


def _ratio(over: str, under: str, whole: str = "0") -> Fraction | None:
    parts = [_strip(part) for part in (over, under, whole)]
    if max(map(len, parts)) > _DIGITS or not Fraction(parts[1]):
        return None
    return Fraction(parts[2]) + Fraction(parts[0]) / Fraction(parts[1])


def _canonical(digits: str, exponent: int) -> str:
    """A decimal in canonical form, so that equal numbers are equal strings."""
    whole, _, fraction = digits.partition(".")
    point, digits = len(whole) + exponent, whole + fraction
    digits, point = digits.rjust(len(digits) - min(point, 0), "0").ljust(point, "0"), max(point, 0)
    whole, fraction = digits[:point].lstrip("0") or "0", digits[point:].rstrip("0")
    return f"{whole}.{fraction}" if fraction else whole
