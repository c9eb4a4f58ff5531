"""Values that leave a candidate's process: what arrives is what was sent, and nothing that pretends."""

import math
import string
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbd_core.evaluation.sandbox.plain_data import Opaque, decode, encode

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=20)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(keys)
        | st.frozensets(keys)
    ),
)


def shape(value: Any) -> Any:
    """The types at every level, which `==` alone does not compare (`1 == True`)."""
    if isinstance(value, list | tuple):
        return type(value), [shape(item) for item in value]
    return type(value), [shape(item) for item in value.values()] if isinstance(value, dict) else None


@given(values)
def test_plain_data_arrives_as_it_was_with_its_type(value: Any) -> None:
    found = decode(encode(value, 0.5))
    assert found.value == value and shape(found.value) == shape(value)
    assert (found.type_name, found.seconds) == (type(value).__name__, 0.5)


@pytest.mark.parametrize("items", [[1, -2.5], [math.inf, 1.0], [10**5000], [True, 2], ["é\n", "\U0001f600"]])
def test_long_lists_arrive_too(items: list[Any]) -> None:
    found = decode(encode(items * 20)).value
    assert found == items * 20 and shape(found) == shape(items * 20)
    assert math.isnan(decode(encode([math.nan] * 20)).value[19])


class Chameleon(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__

    def __index__(self) -> int:
        return 8


class Anything:
    __class__ = int  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_an_equality_of_its_own_stays_behind() -> None:
    found = decode(encode(Chameleon(7)))
    assert found.value == 7 and found.value != 8 and found.type_name == "Chameleon"
    assert type(decode(encode(Anything())).value) is Opaque
    assert decode(encode([Anything()])).value != [1]
    assert type(decode(encode(string.Template("x"))).value) is Opaque


def test_numbers_of_numpy_are_numbers_and_its_arrays_are_not() -> None:
    assert [decode(encode(v)).value for v in (np.int64(3), np.float32(0.5), np.bool_(True))] == [3, 0.5, True]
    assert type(decode(encode(np.zeros(2))).value) is Opaque
    assert decode(encode(Fraction(1, 3))).value == Fraction(1, 3)


def test_nested_without_end_is_opaque_inside() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert isinstance(decode(encode(endless)).value, list)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"1",
        b"[1,2]",
        b'["int",1]',
        b"[1,1,0.0]",
        b'["x",{"import":"os"},0.0]',
        b'["x",{"int":"g"},0.0]',
        b'["x",{"dict":[[[1],2]]},0.0]',
        b"[" * 100_000,
        b'["x",{"Decimal":"1e999999999"},0.0]',
        b"\xff",
    ],
)
def test_what_a_candidate_makes_up_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line)
