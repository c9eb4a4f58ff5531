"""Judges mathematical answers, one JSON line in, one out. Started by `math_judge.py`.

This project's rules find the answer's place, its form and its numbers (`stated_answers.py`, `same_answers.py`,
`exact_numbers.py`). Every other expression is read by math-verify, and its numbers are compared exactly too.

It is a process of its own because an answer like `9^{9^{9^9}}` can take any time and memory, inside one operation that
no signal interrupts.
"""

import json
import logging
import random
import re
import resource
import sys
from fractions import Fraction
from typing import Any

from mbd_core.evaluation.tasks.answers.exact_numbers import read_quantity
from mbd_core.evaluation.tasks.answers.same_answers import same_answer_form
from mbd_core.evaluation.tasks.answers.stated_answers import stated_answer

MEMORY_BYTES = 4 << 30
DIGITS = 60  # to which two constants in different notations are compared
NUM_POINTS = 3  # at which two expressions with variables are compared


def judge(gold: str, text: str) -> dict[str, Any]:
    """The last answer that the text states, and whether it equals the gold answer."""
    answer = stated_answer(text, gold=gold)
    if answer is None:
        return {"answer": None, "correct": False}
    quantity = read_quantity(answer)
    is_plain = quantity is not None and not quantity.percent and quantity.base is None
    shown = _as_written(quantity.value) if quantity and is_plain and _is_short(quantity.value) else answer
    return {"answer": shown[:200], "correct": same_answer_form(gold, answer, same_expression)}


def _is_short(value: Fraction) -> bool:
    return max(abs(value.numerator), value.denominator) < 10**100


def _as_written(value: Fraction) -> str:
    """A number as a decimal if that is short, else as a fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.12g}" if Fraction(f"{float(value):.12g}") == value else str(value)


# Expressions that are no plain numbers.


def same_expression(gold: str, answer: str) -> bool:
    """Whether two expressions, equations or sets are equal: by math-verify's reading of both, without tolerance."""
    wanted, given = _read(gold), _read(answer)
    if wanted is None or given is None:
        return False
    from sympy import Eq, Expr
    from sympy.core.relational import Relational

    if isinstance(wanted, Eq) and isinstance(given, Eq):
        return _same_equation(wanted, given)
    if isinstance(wanted, Expr) and isinstance(given, Expr):
        return _same_at_points(wanted, given)
    if isinstance(wanted, Relational) != isinstance(given, Relational):
        return False
    from math_verify import verify

    return bool(verify(_exact(wanted), _exact(given), timeout_seconds=None, raise_on_error=True))


_TRIGONOMETRY = re.compile(r"(?<![A-Za-z\\])\\?(sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES = re.compile(
    r"(\d+(?:\.\d+)?|\\frac\{[^{}]*\}\{[^{}]*\}|\([^()]*\)|(?<![A-Za-z])[a-z]|\\[a-z]+)"
    r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z]))"
)
# math-verify reads `2(73)` as the mixed number 2 + 73
PRODUCT = re.compile(r"((?<![\w.^_])(?<![_^]\{)[0-9]+(?:\.[0-9]+)?|\))\s*(?=\()")


def _read(latex: str) -> Any:
    """The sympy object of a LaTeX expression, by math-verify; `None` if it finds no expression.

    math-verify drops the sign of degrees, so the angles of trigonometric functions are converted to radians.
    """
    from math_verify import parse

    if _TRIGONOMETRY.search(latex):
        latex = _DEGREES.sub(r"\\left(\\frac{\\pi}{180} \\cdot \1\\right)", _TRIGONOMETRY.sub(r"\\\1", latex))
    latex = PRODUCT.sub(r"\1 \\cdot ", latex)
    found = parse(f"\\boxed{{{latex}}}", parsing_timeout=None, raise_on_error=True)
    return found[0] if found and not isinstance(found[0], str) else None


def _exact(value: Any) -> Any:
    """The object with fractions for its decimals, and the letter i as the imaginary unit."""
    from sympy import Float, I, Rational

    if not hasattr(value, "replace") or not hasattr(value, "free_symbols"):
        return value
    value = value.replace(lambda part: isinstance(part, Float), lambda part: Rational(str(part)))
    return value.subs({symbol: I for symbol in value.free_symbols if symbol.name == "i"})


def _same_at_points(wanted: Any, given: Any) -> bool:
    """Whether two expressions have the same value at some points; constants have a single value."""
    wanted, given = _exact(wanted), _exact(given)
    return wanted == given or all(_equal(_at(wanted, point), _at(given, point)) for point in _points(wanted, given))


def _same_equation(wanted: Any, given: Any) -> bool:
    """Whether two equations say the same: the one's difference of sides is a constant times the other's."""
    from sympy import fraction, together

    first, second = (fraction(together(_exact(side.lhs - side.rhs)))[0] for side in (wanted, given))
    if first == 0 or second == 0:
        return False
    ratios = [_at(first, point) / _at(second, point) for point in _points(first, second)]
    return all(_equal(ratio, ratios[0]) for ratio in ratios) and not _equal(ratios[0], 0 * ratios[0])


def _points(*expressions: Any) -> list[dict[str, Any]]:
    """Values for the variables of expressions, the same in each run: by name, because math-verify may give one letter
    two kinds of symbol."""
    from sympy import Rational

    draw = random.Random(0)
    names = sorted({symbol.name for expression in expressions for symbol in expression.free_symbols})
    return [
        {name: Rational(draw.randint(2, 10**6), 10**5) for name in names} for _ in range(NUM_POINTS if names else 1)
    ]


def _at(expression: Any, point: dict[str, Any]) -> Any:
    return expression.subs({symbol: point[symbol.name] for symbol in expression.free_symbols}).doit()


def _equal(first: Any, second: Any) -> bool:
    """Whether two constants are equal: rational constants exactly, others to `DIGITS` digits."""
    if first.is_Rational and second.is_Rational:
        return bool(first == second)
    from sympy import Abs, Float, Max, N

    values = [N(value, DIGITS) for value in (first, second)]
    if not all(value.is_finite for value in values):
        return bool(first == second)
    distance = Float(Abs(values[0] - values[1]), DIGITS)
    return bool(distance <= Max(*map(Abs, values)) * Float(10) ** (10 - DIGITS))


def main() -> None:
    """Answer until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        try:
            result = judge(**json.loads(line))
        except Exception as error:  # sympy raises any exception for texts that are no mathematics
            result = {"answer": None, "correct": False, "error": type(error).__name__}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
