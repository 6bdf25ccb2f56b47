r"""Units of measurement and counted nouns.

Invariant: two units are comparable only when they have the same dimension.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple


class Unit(NamedTuple):
    """A dimension, and the number of base units in this unit. Each counted noun is its own dimension: `#apple`."""

    dimension: str
    factor: Fraction


_TABLE: dict[str, list[tuple[str, str]]] = {
    "length": [
        ("nm nanometer nanometre", "0.000000001"),
        ("mm millimeter millimetre", "0.001"),
        ("cm centimeter centimetre", "0.01"),
        ("dm", "0.1"),
        ("m meter metre", "1"),
        ("km kilometer kilometre", "1000"),
        ("in inch inches", "0.0254"),
        ("ft foot feet", "0.3048"),
        ("yd yard", "0.9144"),
        ("mi mile", "1609.344"),
    ],
    "mass": [
        ("mg milligram", "0.000001"),
        ("g gm gram", "0.001"),
        ("kg kilogram", "1"),
        ("oz ounce", "0.028349523125"),
        ("lb lbs", "0.45359237"),
        ("tonne", "1000"),
    ],
    "time": [
        ("ms millisecond", "0.001"),
        ("s sec second", "1"),
        ("min minute", "60"),
        ("h hr hour", "3600"),
        ("day", "86400"),
        ("week", "604800"),
    ],
    "volume": [("ml mL milliliter millilitre", "0.001"), ("l L liter litre", "1")],
    "angle": [("deg degree", "1")],
    "radian": [("rad radian", "1")],
    "force": [("N newton", "1"), ("kN kilonewton", "1000")],
    "energy": [("J joule", "1"), ("kJ kilojoule", "1000"), ("MJ megajoule", "1000000"), ("eV", "1.602176634e-19")],
    "power": [("mW milliwatt", "0.001"), ("W watt", "1"), ("kW kilowatt", "1000"), ("MW megawatt", "1000000")],
    "voltage": [("mV millivolt", "0.001"), ("V volt", "1"), ("kV kilovolt", "1000")],
    "current": [("mA milliampere milliamp", "0.001"), ("A ampere amp", "1")],
    "resistance": [("ohm", "1"), ("kohm", "1000"), ("Mohm", "1000000")],
    "frequency": [("Hz hertz", "1"), ("kHz", "1000"), ("MHz", "1000000"), ("GHz", "1000000000")],
    "pressure": [("Pa pascal", "1"), ("hPa", "100"), ("kPa", "1000"), ("MPa", "1000000")],
    "temperature": [("K kelvin", "1")],
    "celsius": [("C celsius", "1")],
    "fahrenheit": [("F fahrenheit", "1")],
    "amount of substance": [("mmol", "0.001"), ("mol mole", "1")],
    "dollar": [("$ usd USD dollar", "1"), ("cent \u00a2", "0.01")],
    "euro": [("\u20ac eur EUR euro", "1")],
    "pound sterling": [("\u00a3 gbp GBP", "1")],
    "%": [("% percent pct percentage", "0.01")],
}
_KNOWN = {
    name: Unit(dimension, Fraction(factor))
    for dimension, rows in _TABLE.items()
    for names, factor in rows
    for name in names.split()
}
_KNOWN |= {
    "mph": Unit("length/time", Fraction("1609.344") / 3600),
    "kmph": Unit("length/time", Fraction(1000, 3600)),
    "kmh": Unit("length/time", Fraction(1000, 3600)),
}
_POWER = re.compile(
    r"(?:(?P<word>square|sq\.?|cubic|cu\.?)\s+)?(?P<name>.+?)"
    r"(?:\s*\^?\{?(?P<power>[23\u00b2\u00b3])\}?|\s+(?P<said>squared|cubed))?"
)
_EXPONENTS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3, "2": 2, "3": 3, "\u00b2": 2, "\u00b3": 3}


@lru_cache(maxsize=4096)
def unit(text: str) -> Unit:
    """The unit that a text names: `km/h`, `square meters`, `apples`. An unknown unit is a counted noun."""
    over, slash, under = (part.strip() for part in re.sub(r"\s+per\s+", "/", text.strip()).partition("/"))
    if slash:
        a, b = unit(over), unit(under)
        return Unit(f"{a.dimension}/{b.dimension}", a.factor / b.factor)
    match = _POWER.fullmatch(over)
    if match is None:
        return Unit(f"#{over}", Fraction(1))
    known = simple(match["name"])
    written = match["word"] or match["power"] or match["said"]
    if known is None or not written:
        return known or Unit("#" + " ".join(_singular(word) for word in over.casefold().split()), Fraction(1))
    power = _EXPONENTS[written.rstrip(".")]
    return Unit(f"{known.dimension}^{power}", known.factor**power)


def simple(name: str) -> Unit | None:
    """The unit of a symbol, or of a word in singular or plural. None when it is unknown."""
    return _KNOWN.get(name) or _KNOWN.get(name.lower()) or _KNOWN.get(_singular(name.lower()))


def _singular(word: str) -> str:
    for plural, singular in (("ies", "y"), ("ses", "s"), ("xes", "x"), ("ches", "ch"), ("shes", "sh"), ("oes", "o")):
        if word.endswith(plural):
            return word.removesuffix(plural) + singular
    return word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") else word
