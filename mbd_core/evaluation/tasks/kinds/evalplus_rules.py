"""EvalPlus's rules for HumanEval+ and MBPP+: its inputs, when two results are the same, and its time limits.

The rules are EvalPlus 0.3.1's. They are stated anew here, because EvalPlus runs a program, its inputs and the
comparison in one process, where a program can decide the comparison. Here the program's process gets the inputs only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mbd_core.evaluation.sandbox.plain_data import Value

Dataset = Literal["humaneval", "mbpp"]
SHORTEST_SECONDS = 1.0
TIME_FACTOR = 4.0
LONGEST_SECONDS = 60.0
RELATIVE_TOLERANCE = 1e-07
FLOAT_TOLERANCE = 1e-6
NUMBERS = (int, float, complex)

SET_ANSWERS = frozenset(
    (
        "similar_elements",
        "find_char_long",
        "common_in_nested_lists",
        "extract_singly",
        "larg_nnum",
        "intersection_array",
        "find_dissimilar",
        "Diff",
    )
)
GIVEN_ANSWERS = frozenset(("check_str", "text_match_three", "text_starta_endb"))

# How MBPP+'s inputs, which are JSON, become Python's types, by the problem's number
_PAIRS = {2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726, 740, 744, 809}
_LISTS_OF_TUPLES = {63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780}
_FIRST_LIST_OF_TUPLES = {75, 413, 444, 753}
_SECOND_TUPLE = {106, 750}
_FIRST_TUPLE = {250, 405, 446, 617, 720, 763, 808}
_TUPLES_OF_TUPLES = {259, 401, 445}
_ALL_TUPLES = {580, 615, 791}


def typed_inputs(task_id: str, inputs: Sequence[list[Any]]) -> list[list[Any]]:
    """The inputs of an MBPP+ problem in the types that its tests mean."""
    number = int(task_id.rpartition("/")[2])
    convert = next((rule for numbers, rule in _RULES if number in numbers), list)
    return [list(convert(arguments)) for arguments in inputs]


def _all_tuples(value: Any) -> Any:
    return tuple(map(_all_tuples, value)) if isinstance(value, list) else value


_RULES: tuple[tuple[set[int], Callable[[Any], Sequence[Any]]], ...] = (
    (_PAIRS, lambda arguments: [tuple(part) for part in arguments]),
    (_LISTS_OF_TUPLES, lambda arguments: [[tuple(item) for item in part] for part in arguments]),
    (_FIRST_LIST_OF_TUPLES, lambda arguments: [[tuple(item) for item in arguments[0]], arguments[1]]),
    (_SECOND_TUPLE, lambda arguments: [arguments[0], tuple(arguments[1])]),
    ({115}, lambda arguments: [[set(item) if isinstance(item, list) and item else {} for item in arguments[0]]]),
    ({124}, lambda arguments: [float(arguments[0]), complex(arguments[1])]),
    (_FIRST_TUPLE, lambda arguments: [tuple(arguments[0]), arguments[1]]),
    (_TUPLES_OF_TUPLES, lambda arguments: [tuple(tuple(item) for item in part) for part in arguments]),
    ({278}, lambda arguments: [tuple(tuple(item) if isinstance(item, list) else item for item in arguments[0])]),
    ({307}, lambda arguments: [tuple(arguments[0]), arguments[1], arguments[2]]),
    ({722}, lambda arguments: [{key: tuple(value) for key, value in arguments[0].items()}, *arguments[1:]]),
    ({252}, lambda arguments: [complex(arguments[0])]),
    (_ALL_TUPLES, lambda arguments: _all_tuples(arguments)),
)


@dataclass
class Comparison:
    """Judges results input by input, in their order: a tolerance that one input sets also holds for the next.

    expected     the canonical solution's results, and their types
    """

    dataset: Dataset
    entry_point: str
    inputs: Sequence[Sequence[Any]]
    expected: Sequence[Value]
    atol: float
    _atol: float = field(init=False)

    def __post_init__(self) -> None:
        self._atol = self.atol

    def accept(self, number: int, out: Value) -> bool:
        """Whether the result of an input is right. A result that cannot be compared is wrong."""
        try:
            return self._is_right(self.inputs[number], out, self.expected[number])
        except (ArithmeticError, TypeError, ValueError, AttributeError, RecursionError, MemoryError):
            return False

    def _is_right(self, arguments: Sequence[Any], out: Value, expected: Value) -> bool:
        if self.dataset == "humaneval" and self.entry_point == "find_zero":
            return bool(abs(_polynomial(arguments[0], out.value)) <= self.atol)
        exact = self._is_exact(arguments, out.value, expected.value)
        if self._atol == 0 and _is_floats(expected.value):
            self._atol = FLOAT_TOLERANCE
        if exact or self._atol == 0:
            return exact
        if out.type_name != expected.type_name or not _same_shape(out.value, expected.value, outermost=True):
            return False
        return bool(np.allclose(out.value, expected.value, rtol=RELATIVE_TOLERANCE, atol=self._atol))

    def _is_exact(self, arguments: Sequence[Any], out: Any, expected: Any) -> bool:
        exact = bool(out == expected)
        if self.dataset != "mbpp":
            return exact
        if self.entry_point == "are_equivalent":
            return True
        if self.entry_point == "sum_div":
            return exact or out == 0
        if self.entry_point == "surface_Area":
            return exact or abs(out - _surface_area(*arguments)) <= self._atol
        if self.entry_point == "digit_distance_nums":
            return exact or out == _digit_distance(*arguments)
        if self.entry_point in SET_ANSWERS:
            return set(out) == set(expected)
        return exact


def conversion(dataset: Dataset, entry_point: str) -> Literal["", "set", "given"]:
    """The conversion of a result before the program's process sends it."""
    if dataset == "mbpp" and entry_point in SET_ANSWERS:
        return "set"
    return "given" if dataset == "mbpp" and entry_point in GIVEN_ANSWERS else ""


def call_seconds(canonical_seconds: float) -> float:
    """The time limit of one input, from the canonical solution's time."""
    return max(SHORTEST_SECONDS, TIME_FACTOR * canonical_seconds)


def all_seconds(limits: Sequence[float]) -> float:
    """The time limit of all inputs together, with EvalPlus's two seconds for the start and the end."""
    return min(LONGEST_SECONDS, sum(limits)) + 2


def _is_floats(value: Any) -> bool:
    if isinstance(value, list | tuple) and value:
        return all(isinstance(item, float) for item in value)
    return isinstance(value, float)


def _same_shape(out: Any, expected: Any, *, outermost: bool = False) -> bool:
    """Whether two results are numbers, or lists of one shape. `allclose` alone broadcasts: to it, an empty list is
    close to any list.

    The outermost decoded types must be the same; the type's name beside a result is only the program's claim.
    """
    if outermost and type(out) is not type(expected):
        return False
    if isinstance(expected, list | tuple):
        if not isinstance(out, list | tuple) or len(out) != len(expected):
            return False
        return all(map(_same_shape, out, expected))
    return isinstance(out, NUMBERS) and isinstance(expected, NUMBERS)


def _polynomial(coefficients: Sequence[float], x: float) -> float:
    """HumanEval/32: a root of the polynomial is judged by its value there."""
    return sum(coefficient * math.pow(x, power) for power, coefficient in enumerate(coefficients))


def _surface_area(base_edge: float, height: float) -> int:
    """Mbpp/581, whose `height` may also mean the height of the pyramid."""
    slant = math.sqrt((base_edge / 2) ** 2 + height**2)
    return round(base_edge**2 + 2 * base_edge * slant)


def _digit_distance(first: int, second: int) -> int:
    """Mbpp/558, the digits aligned at the right."""
    texts = str(first), str(second)
    width = max(map(len, texts))
    return sum(abs(int(a) - int(b)) for a, b in zip(*(text.zfill(width) for text in texts), strict=True))
