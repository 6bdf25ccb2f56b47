"""The encoding of values between a test and a program."""

import math
import os
from collections import Counter, OrderedDict, deque, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.isolation.sandbox.inside.values import Unplain, decode, encode, receive, send

hashables = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
plain = st.recursive(
    hashables | st.complex_numbers(allow_nan=False) | st.dates() | st.datetimes() | st.times() | st.timedeltas() | st.fractions(),
    lambda each: (
        st.lists(each) | st.tuples(each, each) | st.dictionaries(hashables, each) | st.sets(hashables) | st.frozensets(hashables)
    ),
    max_leaves=20,
)


def refuse(value: object) -> int:
    raise Unplain(repr(value))


def exact(value: Any) -> Any:
    """The value with the types of all its parts."""
    if isinstance(value, list | tuple | deque):
        return type(value), [exact(each) for each in value]
    if isinstance(value, set | frozenset):
        return type(value), {exact(each) for each in value}
    if isinstance(value, dict):
        return type(value), {exact(key): exact(each) for key, each in value.items()}
    return type(value), value


@given(plain)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    read, write = os.pipe()
    try:
        os.set_blocking(write, False)
        send(write, encode(value, refuse))
        assert exact(decode(receive(read), refuse)) == exact(value)
    finally:
        os.close(read)
        os.close(write)


class Odd(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__

    def __repr__(self) -> str:
        return "3"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Odd(2), 2),
        (namedtuple("P", "x y")(1, 2), (1, 2)),  # type: ignore[call-arg, arg-type]
        (OrderedDict(a=1), {"a": 1}),
        (Counter("aa"), {"a": 2}),
        (deque([1]), deque([1])),
        (bytearray(b"x"), b"x"),
        pytest.param(10**5000, 10**5000, id="large"),
    ],
)
def test_what_is_derived_from_a_plain_type_becomes_plain(value: object, found: object) -> None:
    assert exact(decode(encode(value, refuse), refuse)) == exact(found)


def test_what_is_not_a_number_stays_so() -> None:
    assert math.isnan(decode(encode(float("nan"), refuse), refuse))


def test_anything_else_travels_by_number_or_not_at_all() -> None:
    assert decode(encode([object()], lambda _: 7), lambda number: ("object", number)) == [("object", 7)]
    with pytest.raises(Unplain):
        encode([object()], refuse)


@pytest.mark.parametrize(
    "data", [3, 1.5, [1], {}, {"int": "1", "str": "2"}, {"int": 3}, {"code": "x"}, {"set": [{"list": []}]}, {"dict": [[1]]}]
)
def test_an_invalid_value_is_refused(data: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode(data, refuse)
