"""The one number of an answer, by each rule, and when two numbers are the same."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbd_core.evaluation.tasks.answers.marked_answers import (
    boxed,
    flexible_number,
    parse_number,
    same_number,
    strict_number,
)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 3 + 4 = 7.\n#### 7", "7", "7"),
        ("#### $1,234.\nand then 5 more", "$1,234.", "5"),
        ("#### 1\n#### 2", "1", "2"),
        ("#### -3.50", "-3.50", "-3.50"),
        ("It costs $0.75, not a cent more.", None, "$0.75"),
        ("#### none", None, None),
        ("", None, None),
    ],
)
def test_one_number_by_each_rule(text: str, strict: str | None, flexible: str | None) -> None:
    assert strict_number(text) == strict
    assert flexible_number(text) == flexible


def test_a_chain_of_thought_has_its_own_mark() -> None:
    text = "There were 15 + 6 = 21. The answer is $1,021.\nThe answer is 7. #### 9"
    assert strict_number(text, "The answer is") == "$1,021."
    assert strict_number(text) == "9"
    assert strict_number("The answer is unknown. The answer is 7.", "The answer is") == "7."


@given(st.integers(-(10**12), 10**12), st.integers(0, 3))
def test_a_number_is_the_same_however_it_is_written(value: int, zeros: int) -> None:
    tail = "." + "0" * zeros
    for written in (str(value), f"{value:,}", f"{value:,}{tail}", f"{value}{tail}"):
        assert parse_number(written) == Fraction(value)
        assert strict_number(f"x\n#### {written}") == written
        assert same_number(written, f"{value}")
        assert not same_number(written, f"{value + 1}")
        assert not same_number(written, f"{value}.0000000000000000001")


@pytest.mark.parametrize("written", [None, "", ".", "-", "1e3", "1/2", "1.2.3", "٣", "1_0", "7" * 5000])
def test_what_is_no_number_equals_nothing(written: str | None) -> None:
    assert parse_number(written) is None
    assert not same_number(written, written or "")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} or \boxed{\frac{1}{2}} at last", r"\frac{1}{2}"),
        (r"\fbox{3}", "3"),
        (r"\boxed 9.", "9."),
        (r"{ \boxed {\boxed{1}2}", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} and \boxed{cut", "1"),
        (r"\boxed{cut", None),
        ("none", None),
    ],
)
def test_the_last_box_that_is_closed(text: str, content: str | None) -> None:
    assert boxed(text) == content
