"""A number has one exact value, however it is written."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbd_core.evaluation.tasks.answers.exact_numbers import read_quantity


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1,234.50", "1234.5"),
        ("1{,}234", 1234),
        (r"11,\! 111,\! 111,\! 100", 11111111100),
        (r"70\,000", 70000),
        ("1 000 000", 10**6),
        (r"\frac43", "4/3"),
        (r"\frac 59", "5/9"),
        (r"\frac9{19}", "9/19"),
        (r"-\dfrac{35}{9}", "-35/9"),
        (r"\tfrac{1}{2}", "1/2"),
        (r"137 \frac{1}{2}", "275/2"),
        ("1½", "3/2"),
        ("2 1/4", "9/4"),
        ("\u22123", -3),
        ("\u20133", -3),
        ("- 5", -5),
        ("$-5", -5),
        ("-$5", -5),
        (r"\$18.90", "18.9"),
        (r"\text{\$}5", 5),
        ("20€", 20),
        (r"6.72\times 10^{-5}", "0.0000672"),
        ("6.02×10²³", 602 * 10**21),
        ("1e5", 10**5),
        ("10^{-3}", "1/1000"),
        (r"0.1\overline{6}", "1/6"),
        (r"\text{73 books}", 73),
        ("5.2 million", 5200000),
        ("60 miles per hour", 60),
        ("$20/hour", 20),
        (r"\frac{270}7\text{ degrees}", "270/7"),
        ("seventy-three apples", 73),
        ("two thousand five hundred and six", 2506),
        ("two and a half", "5/2"),
        ("three quarters", "3/4"),
    ],
)
def test_a_notation_has_its_value(written: str, value: str | int) -> None:
    quantity = read_quantity(written)
    assert quantity is not None and quantity.value == Fraction(value)


@pytest.mark.parametrize(
    "written",
    [
        *("", ".", "-", "--5", "2k", "5x", r"2\pi", "2pi", "3 + 4", "5^2", "5!", "1/0", "1.2.3", "12,34", "٣", "1_0"),
        *("5:30", r"12\text{ and }13", "one of them", r"\frac{1}{2}x", "7" * 1001, "x"),
    ],
)
def test_what_is_no_number_has_no_value(written: str) -> None:
    assert read_quantity(written) is None


@given(st.fractions(max_denominator=10**6), st.integers(6, 30))
def test_a_tiny_difference_is_a_difference(value: Fraction, power: int) -> None:
    number, other = (
        read_quantity(f"{part.numerator}/{part.denominator}") for part in (value, value + Fraction(1, 10**power))
    )
    assert number is not None and other is not None
    assert number.equals(number) and not number.equals(other)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("12.5", r"12.5\%", True),
        ("50", r"50\%", True),
        ("0.125", r"12.5\%", True),
        ("0.5", r"50\%", True),
        ("12.5", r"12.6\%", False),
        ("50", "0.5", False),
        (r"50\%", r"0.5\%", False),
        ("50", r"0.5\%", False),
        ("5.4 cents", "5.4", True),
        ("5.4 cents", r"\$5.4", False),
        (r"864\mbox{ inches}^2", "864 square inches", True),
        (r"864\mbox{ inches}^2", "864 cubic inches", False),
        ("2516_8", r"2516_{\text{8}}", True),
        ("2516_8", "2516", True),
        ("2516_8", "2516_9", False),
    ],
)
def test_percent_units_and_bases_count_on_both_sides_alike(first: str, second: str, same: bool) -> None:
    one, other = read_quantity(first), read_quantity(second)
    assert one is not None and other is not None
    assert one.equals(other) == other.equals(one) == same
