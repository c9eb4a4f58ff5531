"""EvalPlus's rules: the types of MBPP+'s inputs, when a result is right, and how long a program may take."""

from typing import Any

import numpy as np
import pytest

from mbd_core.evaluation.sandbox.plain_data import Value
from mbd_core.evaluation.tasks.kinds.evalplus_rules import (
    Comparison,
    Dataset,
    all_seconds,
    call_seconds,
    conversion,
    typed_inputs,
)


def value(given: Any) -> Value:
    return Value(given, type(given).__name__, 0.0)


def compare(
    out: Any, expected: Any, *, given: Any = (), dataset: Dataset = "mbpp", entry_point: str = "f", atol: float = 0.0
) -> bool:
    comparison = Comparison(
        dataset=dataset,
        entry_point=entry_point,
        inputs=[given],
        expected=[value(expected)],
        atol=atol,
    )
    return comparison.accept(0, value(out))


# -- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "given", "typed"),
    [
        (3, [[1, 2], "a"], [[1, 2], "a"]),
        (2, [[3, 4], [5]], [(3, 4), (5,)]),
        (63, [[[1, 2], [3, 4]]], [[(1, 2), (3, 4)]]),
        (75, [[[1, 2], [3, 4]], 2], [[(1, 2), (3, 4)], 2]),
        (106, [[5, 6], [9, 10]], [[5, 6], (9, 10)]),
        (115, [[[1, 2], [], 3]], [[{1, 2}, {}, {}]]),
        (124, [0, "1j"], [0.0, 1j]),
        (250, [[10, 8], 8], [(10, 8), 8]),
        (259, [[[1, 3], [4, 5]], [[6, 7], [3, 9]]], [((1, 3), (4, 5)), ((6, 7), (3, 9))]),
        (278, [[1, 5, [7, 8]]], [(1, 5, (7, 8))]),
        (307, [["a", [], 5], 1, 50], [("a", [], 5), 1, 50]),
        (722, [{"a": [6, 70]}, 6.0, 70], [{"a": (6, 70)}, 6.0, 70]),
        (252, ["1+2j"], [1 + 2j]),
        (580, [[4, [7, [1]], 3]], [(4, (7, (1,)), 3)]),
    ],
)
def test_inputs_have_the_types_that_the_problem_means(number: int, given: list[Any], typed: list[Any]) -> None:
    (found,) = typed_inputs(f"Mbpp/{number}", [given])
    assert found == typed
    assert [type(one) for one in found] == [type(one) for one in typed]


# -- results ----------------------------------------------------------------------------------------------------------


def test_without_a_tolerance_results_are_equal_and_equal_is_pythons() -> None:
    assert compare([1, 2], [1, 2]) and compare(1.0, 1) and compare(True, 1)
    assert not compare([1, 2], (1, 2)) and not compare([1, 3], [1, 2]) and not compare(None, 1)


def test_expected_floats_bring_a_tolerance_of_their_own() -> None:
    assert compare(0.1 + 0.2, 0.3) and compare([0.1 + 0.2, 1.0], [0.3, 1.0]) and compare((1.0,), (1.0 + 1e-7,))
    assert not compare(0.3001, 0.3)
    assert not compare(1, 1.0000001), "another type is right only if it is equal"
    assert not compare([0.3], [0.3, 0.3]) and not compare([0.30001, 1], [0.3, 1])


def test_a_tolerance_of_the_problem_holds_for_all_results() -> None:
    assert compare(5, 6, atol=1.0) and not compare(5, 6.0, atol=1.0) and not compare(5, 8, atol=1.0)
    assert compare(np.float64(1.0), np.float64(1.0 + 1e-8), atol=1e-6)


def test_a_tolerance_that_one_result_brings_stays_for_the_next() -> None:
    comparison = Comparison(
        dataset="mbpp", entry_point="f", inputs=[(), (), ()], expected=[value(1), value(1.5), value(2)], atol=0.0
    )
    near = value(2 + 1)
    assert not comparison.accept(2, near)
    assert comparison.accept(1, value(1.5 + 1e-7))
    assert not comparison.accept(2, near) and comparison.accept(0, value(1))
    later = Comparison(
        dataset="mbpp", entry_point="f", inputs=[(), ()], expected=[value(1.5), value([2.0, 1])], atol=0.0
    )
    assert not later.accept(1, value([2.0 + 1e-7, 1]))
    assert later.accept(0, value(1.5)) and later.accept(1, value([2.0 + 1e-7, 1]))


@pytest.mark.parametrize(
    ("entry_point", "given", "out", "right"),
    [
        ("are_equivalent", (36, 57), "anything", True),
        ("sum_div", (8,), 0, True),
        ("sum_div", (8,), 6, False),
        ("similar_elements", (), (5, 4, 5), True),
        ("similar_elements", (), (5, 6), False),
        ("surface_Area", (3, 4), 35, True),
        ("surface_Area", (3, 4), 34, False),
        ("digit_distance_nums", (23, 56), 6, True),
        ("digit_distance_nums", (123, 56), 7, True),
        ("digit_distance_nums", (123, 56), 8, False),
    ],
)
def test_the_oracle_s_exceptions(entry_point: str, given: tuple[Any, ...], out: Any, right: bool) -> None:
    """The canonical solution's result is no criterion there, or not the only one."""
    expected = (4, 5) if entry_point == "similar_elements" else -1
    assert compare(out, expected, given=given, entry_point=entry_point) == right
    if entry_point != "are_equivalent":
        assert not compare(out, expected, given=given, dataset="humaneval", entry_point=entry_point)


def test_a_root_is_judged_by_the_polynomial_there() -> None:
    polynomial = ([-6, 11, -6, 1],)  # (x - 1)(x - 2)(x - 3)
    for root in (1.0, 2.0, 3.0 + 1e-6):
        assert compare(root, 1.0, given=polynomial, dataset="humaneval", entry_point="find_zero", atol=1e-4)
    assert not compare(2.5, 2.5, given=polynomial, dataset="humaneval", entry_point="find_zero", atol=1e-4)
    assert not compare("2", 2.0, given=polynomial, dataset="humaneval", entry_point="find_zero", atol=1e-4)


@pytest.mark.parametrize("out", [None, "text", [1, [2]], {1: 2}, 1j, float("nan")])
def test_a_result_that_cannot_be_compared_is_wrong(out: Any) -> None:
    for expected in (1.5, [1.5, 2.5]):
        assert not compare(out, expected)
    assert not compare(out, (4, 5), entry_point="similar_elements")


def test_what_a_program_sends_depends_on_how_it_is_compared() -> None:
    assert conversion("mbpp", "similar_elements") == "set" and conversion("mbpp", "check_str") == "given"
    assert conversion("mbpp", "f") == "" and conversion("humaneval", "similar_elements") == ""


# -- time -------------------------------------------------------------------------------------------------------------


def test_an_input_has_four_times_the_canonical_time_and_at_least_a_second() -> None:
    assert (call_seconds(0.0), call_seconds(0.25), call_seconds(3.0)) == (1.0, 1.0, 12.0)
    assert all_seconds([1.0, 2.0]) == 5.0 and all_seconds([12.0] * 50) == 62.0
