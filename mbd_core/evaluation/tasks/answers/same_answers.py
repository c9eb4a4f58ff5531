"""Whether two mathematical answers are the same: their form first, then their parts.

The two sides are a benchmark's answer and a model's, without the sentence around them. Parts that are numbers are
compared exactly (`exact_numbers.py`), all other mathematics by `SameExpression`, for which `math_worker.py` uses
math-verify.
"""

import re
from collections.abc import Callable, Sequence

from mbd_core.evaluation.tasks.answers.answer_forms import (
    WRAPPED,
    AnswerForm,
    choice_of,
    form_of,
    split_outside,
    undressed,
    words_of,
)
from mbd_core.evaluation.tasks.answers.exact_numbers import read_quantity
from mbd_core.evaluation.tasks.answers.notation import TEXT, plain_notation

SameExpression = Callable[[str, str], bool]

_LETTER = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice)\s+)?\(?\s*([A-Z])(?:[).:\s].*)?", re.DOTALL)
_NAME = re.compile(
    rf"\(?(?:\\angle|\\triangle|\\overline|m|\||{TEXT}|\{{|\\left)*\s*(?:[A-Za-z]+'*|\\[a-z]+)[\s\w|{{}}'^]*(?:\([^()]*\))?\)?"
    r"|\([A-Za-z, ]+\)"
)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})\s*(?:(?:\\(?:text|mathrm)\{)?\s*([ap])\.?\s*m\.?\s*\}?)?", re.I)
_DECIMAL_COMMA = re.compile(r"([-+]?\d+),(\d{1,2}|\d{4,})")  # before three digits a comma marks thousands
_EMPTY = r"\emptyset"
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq|doteq|thickapprox)(?![A-Za-z])")


def same_answer_form(gold: str, answer: str, same_expression: SameExpression) -> bool:
    """Whether the answer is the benchmark's: the same form with the same parts."""
    gold, answer = (plain_notation(undressed(text)) for text in (gold, answer))
    if not gold or not answer:
        return False
    if (letter := choice_of(gold)) is not None:
        match = _LETTER.fullmatch(WRAPPED.sub(r"\1", answer).strip())
        return match is not None and match[1] == letter
    if (words := words_of(gold)) is not None:
        return words == words_of(answer) or words == words_of(rf"\text{{{answer}}}")
    if (clock := _CLOCK.fullmatch(gold)) is not None:
        other = _CLOCK.fullmatch(answer)
        return other is not None and (
            (int(clock[1]), clock[2]) == (int(other[1]), other[2])
            and (not clock[3] or not other[3] or clock[3].lower() == other[3].lower())
        )
    return _same(gold, answer, same_expression)


def _same(gold: str, answer: str, same_expression: SameExpression) -> bool:
    wanted, given = form_of(gold), form_of(answer)
    if {wanted.kind, given.kind} == {"part"}:
        return _same_part(gold, answer, same_expression)
    wanted, given = (_without_name(form) for form in (wanted, given))
    both = {wanted.kind, given.kind}

    def same_in_order(first: Sequence[str], second: Sequence[str]) -> bool:
        return len(first) == len(second) and all(
            _same(one, other, same_expression) for one, other in zip(first, second, strict=True)
        )

    if both == {"brackets"}:
        return wanted.ends == given.ends and same_in_order(wanted.parts, given.parts)
    if both == {"matrix"}:
        return wanted.rows == given.rows and same_in_order(wanted.parts, given.parts)
    if both == {"matrix", "brackets"}:
        matrix, tuple_form = (wanted, given) if wanted.kind == "matrix" else (given, wanted)
        is_column = matrix.rows == len(matrix.parts) and tuple_form.ends == "()"
        return is_column and same_in_order(wanted.parts, given.parts)
    if wanted.kind == "brackets" and given.kind == "list":
        return wanted.ends == "()" and same_in_order(wanted.parts, given.parts)
    if given.kind == "brackets" and wanted.kind in ("list", "set"):
        is_list = given.ends == "()" or (given.ends == "[]" and len(given.parts) != 2)
        return is_list and _same_in_any_order(wanted.parts, given.parts, same_expression)
    if wanted.kind == "part" and given.kind in ("list", "set"):
        if not given.parts:
            return gold == _EMPTY
        decimal = _DECIMAL_COMMA.fullmatch(answer)
        if decimal is not None and _same(gold, f"{decimal[1]}.{decimal[2]}", same_expression):
            return True
        return all(_same(gold, part, same_expression) for part in given.parts)
    if given.kind == "part" and not wanted.parts:
        return answer == _EMPTY
    if both <= {"list", "set", "union", "part"}:
        if "union" in both and both != {"union"}:
            return same_expression(gold, answer)
        return _same_in_any_order(wanted.parts, given.parts, same_expression)
    return False


def _without_name(form: AnswerForm) -> AnswerForm:
    """The form of `(1,2)` for `(x,y) = (1,2)`."""
    sides = split_outside(form.parts[0], "=") if form.kind == "part" else []
    return form_of(sides[-1]) if len(sides) > 1 else form


def _same_in_any_order(wanted: Sequence[str], given: Sequence[str], same_expression: SameExpression) -> bool:
    """Whether each part of either side equals a part of the other side."""

    def are_in(parts: Sequence[str], others: Sequence[str], *, turned: bool) -> bool:
        return all(
            any(_same(*((other, part) if turned else (part, other)), same_expression) for other in others)
            for part in parts
        )

    if len(wanted) > 40 or len(given) > 40:
        return len(wanted) == len(given) and all(map(_same, wanted, given, [same_expression] * len(wanted)))
    return are_in(wanted, given, turned=False) and are_in(given, wanted, turned=True)


_SPACE_OF_NO_NUMBER = re.compile(r"(?<!\d) | (?!\d)")  # `1 8` is not 18


def _same_part(gold: str, answer: str, same_expression: SameExpression) -> bool:
    """Whether two answers without parts are the same: numbers, expressions and equations."""
    if _SPACE_OF_NO_NUMBER.sub("", gold) == _SPACE_OF_NO_NUMBER.sub("", answer):
        return True
    wanted, given = read_quantity(gold), read_quantity(answer)
    if wanted is not None and given is not None:
        return wanted.equals(given)
    if (approximate := _APPROXIMATELY.split(answer)) and len(approximate) > 1:
        sides = [side for part in approximate for side in [split_outside(part, "=")[-1]] if side]
        return any(_same(gold, side, same_expression) for side in sides)
    gold_sides, sides = split_outside(gold, "="), split_outside(answer, "=")
    if len(sides) > 1 and len(gold_sides) == 1:
        return bool(sides[-1]) and _same(gold, sides[-1], same_expression)
    if len(gold_sides) > 1:
        named = _NAME.fullmatch(gold_sides[0])
        if len(sides) == 1:
            return named is not None and _same(gold_sides[-1], answer, same_expression)
        if named and gold_sides[0].replace(" ", "") == sides[0].replace(" ", ""):
            return _same(gold_sides[-1], sides[-1], same_expression)
        if named and _NAME.fullmatch(sides[0]) and read_quantity(gold_sides[-1]) is not None:
            return False
    return same_expression(gold, answer)
