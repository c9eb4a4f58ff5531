"""Whether two mathematical answers are the same: their form (list, tuple, interval, matrix, text), then their parts.

The two sides are a benchmark's answer and a model's, without the sentence around them. Parts that are numbers are
compared exactly (`exact_numbers.py`), all other mathematics by `SameExpression`, which is math-verify's in
`math_worker.py`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from mbd_core.evaluation.tasks.exact_numbers import THOUSANDS, plain_notation, read_quantity

SameExpression = Callable[[str, str], bool]

# A content without what changes no value.

MOST_LAYERS = 20  # that are taken off, one around the other
_SPACES = r"(?:\\[,;:!> ]|\\q?quad(?![A-Za-z])|[~\s])"
_EDGES = re.compile(rf"^(?:{_SPACES}|\\(?:display|text)style(?![A-Za-z]))+|{_SPACES}+$")
_COMMAS = re.compile(r"^(?:-|\\?\$)*\d{1,3}(?:,\d{3})+(?=(?:\\,|[^\d,])(?:\\,|[^,])*$)")
_DOLLAR_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{\\\$\}")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_FONTS = tuple(rf"\{name}{{" for name in ("mathbf", "boldsymbol", "bm", "pmb", "boxed", "fbox", "framebox"))
_NUMBER_IN_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([-+\d.,\s]*\d[-+\d.,\s]*)\}")
_ELLIPSIS = ("..", r"\.")


def undressed(content: str) -> str:
    """A content without spaces and marks of thousands, bold letters, a formula's delimiters or braces around all of
    it, and the sentence's last mark behind it."""
    content = _DOLLAR_TEXT.sub(r"\\$", THOUSANDS.sub("", content))
    for _ in range(MOST_LAYERS):
        content = _EDGES.sub("", content)
        if content.endswith((".", ",", ";", ":")) and not content.endswith(_ELLIPSIS):
            content = content[:-1]
        for opening, closing in _DELIMITERS:
            inner = content[len(opening) : -len(closing)]
            if (
                content.startswith(opening)
                and content.endswith(closing)
                and inner
                and opening not in inner.replace(r"\$", "")
            ):
                content = inner
        for opening in (*_FONTS, "{"):
            if content.startswith(opening) and _closes_at_end(content, len(opening)):
                content = content[len(opening) : -1]
        if match := _NUMBER_IN_TEXT.fullmatch(content):
            content = match[1]
    return _COMMAS.sub(lambda number: number[0].replace(",", ""), content)


def _closes_at_end(content: str, start: int) -> bool:
    """Whether the brace that was opened before `start` is closed by the last character."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", content[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return start + match.end() == len(content)
    return False


# The form of an answer.

FormKind = Literal["part", "list", "set", "brackets", "union", "matrix"]


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """An answer's parts. `ends` are the brackets around them, `[` and `)` for example; a matrix has rows of parts."""

    kind: FormKind
    parts: tuple[str, ...]
    ends: str = ""
    rows: int = 1


_TEXT = r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|mathrm|mathbf|mathit|mbox|operatorname|rm)\s*"
_BETWEEN = re.compile(rf"\s*(?:[,;]\s*)?(?:{_TEXT}\{{\s*(?:and|or)\s*\}}|\b(?:and|or)\b|\\(?:quad|lor|land|vee)\b)\s*")
_CUP = re.compile(r"\\(?:big)?cup(?![A-Za-z])")
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{(?:[pbvBV]?(?:small)?matrix|array)\}(?:\{[clr| ]*\})?(.*)\\end\{\w+\}\s*[)\]]?", re.DOTALL
)
_MEMBER = re.compile(
    rf"[A-Za-z](?:_\{{?\w+\}}?)?\s*\\in(?![A-Za-z])\s*(.*)|(?:{_TEXT}\{{[^{{}}]*\}}\s*)?\{{?([(\[].*)"
)
_ANGLES = re.compile(r"\\langle\s*(.*)\\rangle", re.DOTALL)
_OPENING, _CLOSING = "([{", ")]}"
_TOKEN = re.compile(
    r"\\begin\{\w+\}|\\end\{\w+\}|\\[A-Za-z]+|\\.|[()\[\]{},;=]|\b(?:and|or)\b|[^\\()\[\]{},;=ao]+|.", re.DOTALL
)


def split_outside(text: str, separators: str) -> list[str]:
    """The text between those separators that no bracket or environment holds."""
    parts, part, depth = list[str](), list[str](), 0
    for token in _TOKEN.findall(text):
        if depth == 0 and token in separators:
            parts.append("".join(part))
            part = []
            continue
        name = token.removeprefix("\\")
        if token.startswith(r"\begin") or name in ("(", "[", "{", "langle"):
            depth += 1
        elif token.startswith(r"\end") or name in (")", "]", "}", "rangle"):
            depth = max(0, depth - 1)
        part.append(token)
    return [piece.strip() for piece in [*parts, "".join(part)]]


def form_of(text: str) -> AnswerForm:
    """The form of an answer in plain notation."""
    if match := _MATRIX.fullmatch(text):
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr\b", match[1]) if row.strip()]
        return AnswerForm(kind="matrix", parts=tuple(c.strip() for r in rows for c in r.split("&")), rows=len(rows))
    if match := _ANGLES.fullmatch(text):
        return AnswerForm(kind="brackets", parts=tuple(split_outside(match[1], ",")), ends="()")
    if (parts := _CUP.split(text)) and len(parts) > 1:
        return AnswerForm(kind="union", parts=tuple(part.strip() for part in parts))
    if interval := _interval_of_relation(text):
        return interval
    if (match := _MEMBER.match(text)) and match[1]:
        return form_of(match[1].strip())
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return AnswerForm(kind="set", parts=_items(text[2:-2]))
    if text[:1] in tuple("([") and text[-1:] in tuple(")]"):
        inner = split_outside(text[1:-1], ",;")
        if len(inner) > 1 and _is_balanced(text[1:-1]):
            return AnswerForm(kind="brackets", parts=tuple(inner), ends=text[0] + text[-1])
    items = _items(text)
    if len(items) > 1:
        relations = [_interval_of_relation(item) for item in items]
        if all(relations):
            return AnswerForm(kind="union", parts=items)
        return AnswerForm(kind="list", parts=items)
    return AnswerForm(kind="part", parts=(text,))


def _is_balanced(text: str) -> bool:
    depth = 0
    for sign in text:
        depth += (sign in _OPENING) - (sign in _CLOSING)
        if depth < 0:
            return False
    return depth == 0


def _items(text: str) -> tuple[str, ...]:
    """The items of a list, whose commas no bracket holds; `a \\pm b` is two."""
    if read_quantity(text) is not None:
        return (text,)
    items = [item for item in split_outside(_BETWEEN.sub(" , ", text), ",;") if item.strip()]
    return tuple(signed for item in items for signed in _both_signs(item))


_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")


def _both_signs(item: str) -> list[str]:
    if not _PLUS_MINUS.search(item):
        return [item]
    pairs = (("+", "-"), ("-", "+"))
    return [_PLUS_MINUS.sub(lambda sign, p=p, m=m: p if sign[0] == r"\pm" else m, item) for p, m in pairs]  # type: ignore[misc]


_BELOW = r"(<|\\le(?:q|qslant)?(?![A-Za-z])|\\lt(?![A-Za-z])|<=)"
_ABOVE = r"(>|\\ge(?:q|qslant)?(?![A-Za-z])|\\gt(?![A-Za-z])|>=)"
_VARIABLE = r"\s*([a-zA-Z]|\\[a-z]+)\s*"
_WITHIN = re.compile(rf"([^<>]+?)\s*{_BELOW}{_VARIABLE}{_BELOW}\s*([^<>]+)")
_WITHIN_DOWN = re.compile(rf"([^<>]+?)\s*{_ABOVE}{_VARIABLE}{_ABOVE}\s*([^<>]+)")
_HALF = re.compile(rf"{_VARIABLE}(?:{_BELOW}|{_ABOVE})\s*([^<>a-zA-Z]*(?:\\[a-z]+[^<>a-zA-Z]*)*)")
_HALF_TURNED = re.compile(rf"([^<>a-zA-Z]*(?:\\(?!le|ge|lt|gt)[a-z]+[^<>a-zA-Z]*)*){_ABOVE}{_VARIABLE}")
_HALF_TURNED_UP = re.compile(rf"([^<>a-zA-Z]*(?:\\(?!le|ge|lt|gt)[a-z]+[^<>a-zA-Z]*)*){_BELOW}{_VARIABLE}")


def _interval_of_relation(text: str) -> AnswerForm | None:
    """`2 < x \\le 5` as (2, 5], and `x > 2` as (2, \\infty)."""
    if not re.search(r"[<>]|\\[lg][et]", text) or split_outside(text, ",;")[1:]:
        return None

    def is_strict(sign: str) -> bool:
        return sign in ("<", ">", r"\lt", r"\gt")

    def interval(low: str, high: str, *, low_open: bool, high_open: bool) -> AnswerForm:
        ends = ("(" if low_open else "[") + (")" if high_open else "]")
        return AnswerForm(kind="brackets", parts=(low.strip(), high.strip()), ends=ends)

    if match := _WITHIN.fullmatch(text):
        return interval(match[1], match[5], low_open=is_strict(match[2]), high_open=is_strict(match[4]))
    if match := _WITHIN_DOWN.fullmatch(text):
        return interval(match[5], match[1], low_open=is_strict(match[4]), high_open=is_strict(match[2]))
    if match := _HALF.fullmatch(text):
        if match[2]:
            return interval(r"-\infty", match[4], low_open=True, high_open=is_strict(match[2]))
        return interval(match[4], r"\infty", low_open=is_strict(match[3]), high_open=True)
    if match := _HALF_TURNED.fullmatch(text):
        return interval(r"-\infty", match[1], low_open=True, high_open=is_strict(match[2]))
    if match := _HALF_TURNED_UP.fullmatch(text):
        return interval(match[1], r"\infty", low_open=is_strict(match[2]), high_open=True)
    return None


# Comparing.

_WRAPPED = re.compile(rf"{_TEXT}\{{([^{{}}]*)\}}")
_LETTER = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice)\s+)?\(?\s*([A-Z])(?:[).:\s].*)?", re.DOTALL)
_CHOICE = re.compile(r"\(?([A-J])\)?")
_NAME = re.compile(
    rf"\(?(?:\\angle|\\triangle|\\overline|m|\||{_TEXT}|\{{|\\left)*\s*(?:[A-Za-z]+'*|\\[a-z]+)[\s\w|{{}}'^]*(?:\([^()]*\))?\)?"
    r"|\([A-Za-z, ]+\)"
)
_WORDS = re.compile(r"[^\W\d_][^\W\d_'’ .-]*(?:[ '’.-]+[^\W\d_]+)*\.?")
_SINGLE_LETTER = re.compile(r"(?<![A-Za-z'’])[B-Zb-z](?![A-Za-z])")
_ARTICLES = re.compile(r"^(?:the|a|an)\s+")
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})\s*(?:(?:\\(?:text|mathrm)\{)?\s*([ap])\.?\s*m\.?\s*\}?)?", re.I)
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq|doteq|thickapprox)(?![A-Za-z])")


def words_of(text: str) -> str | None:
    """The words of an answer that is text, like `\\text{Evelyn}`, in small letters; `None` for mathematics."""
    bare = _WRAPPED.sub(r"\1", text).strip().strip("\"'`")
    is_bare = bare == text.strip()
    if not _WORDS.fullmatch(bare) or (is_bare and (len(bare) < 3 or _SINGLE_LETTER.search(bare))):
        return None
    return _ARTICLES.sub("", re.sub(r"\s+", " ", bare.lower().rstrip("."))).strip()


def choice_of(text: str) -> str | None:
    """The letter of an answer that is a choice, like `\\text{(C)}`."""
    bare = _WRAPPED.sub(r"\1", text).strip()
    match = _CHOICE.fullmatch(bare)
    return match[1] if match and (bare != text.strip() or bare.startswith("(")) else None


def same_answer_form(gold: str, answer: str, same_expression: SameExpression) -> bool:
    """Whether the answer is the benchmark's: the same form with the same parts."""
    gold, answer = (plain_notation(undressed(text)) for text in (gold, answer))
    if not gold or not answer:
        return False
    if (letter := choice_of(gold)) is not None:
        match = _LETTER.fullmatch(_WRAPPED.sub(r"\1", answer).strip())
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
    if "part" in both and wanted.kind == "part" and given.kind in ("list", "set"):
        return all(_same(gold, part, same_expression) for part in given.parts)
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
    """Whether each part has its like on the other side."""

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
