"""The form of a mathematical answer, undressed: a list, a tuple, an interval, a matrix, a text."""

import re
from dataclasses import dataclass
from typing import Literal

from mbd_core.evaluation.tasks.answers.exact_numbers import read_quantity
from mbd_core.evaluation.tasks.answers.notation import TEXT, THOUSANDS

MOST_LAYERS = 20  # nested marks around an answer that are removed, at most
_SPACES = r"(?:\\[,;:!> ]|\\q?quad(?![A-Za-z])|[~\s])"
_EDGES = re.compile(rf"^(?:{_SPACES}|\\(?:display|text)style(?![A-Za-z]))+|{_SPACES}+$")
_COMMAS = re.compile(r"^(?:-|\\?\$)*\d{1,3}(?:,\d{3})+(?=(?:\\,|[^\d,])(?:\\,|[^,])*$)")
_DOLLAR_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{\\\$\}")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_FONTS = tuple(rf"\{name}{{" for name in ("mathbf", "boldsymbol", "bm", "pmb", "boxed", "fbox", "framebox"))
_NUMBER_IN_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([-+\d.,\s]*\d[-+\d.,\s]*)\}")
_ELLIPSIS = ("..", r"\.")


def undressed(content: str) -> str:
    """An answer without its surroundings: spaces, a formula's delimiters, commands for fonts, braces, and the
    sentence's last mark. Marks of thousands inside it are removed too."""
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


FormKind = Literal["part", "list", "set", "brackets", "union", "matrix"]


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """An answer's parts. `ends` are the brackets around them, `[` and `)` for example; a matrix has rows of parts."""

    kind: FormKind
    parts: tuple[str, ...]
    ends: str = ""
    rows: int = 1


_BETWEEN = re.compile(rf"\s*(?:[,;]\s*)?(?:{TEXT}\{{\s*(?:and|or)\s*\}}|\b(?:and|or)\b|\\(?:quad|lor|land|vee)\b)\s*")
_CUP = re.compile(r"\\(?:big)?cup(?![A-Za-z])")
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{(?:[pbvBV]?(?:small)?matrix|array)\}(?:\{[clr| ]*\})?(.*)\\end\{\w+\}\s*[)\]]?", re.DOTALL
)
_MEMBER = re.compile(rf"[A-Za-z](?:_\{{?\w+\}}?)?\s*\\in(?![A-Za-z])\s*(.*)|(?:{TEXT}\{{[^{{}}]*\}}\s*)?\{{?([(\[].*)")
_ANGLES = re.compile(r"\\langle\s*(.*)\\rangle", re.DOTALL)
_OPENING, _CLOSING = "([{", ")]}"
_TOKEN = re.compile(
    r"\\begin\{\w+\}|\\end\{\w+\}|\\[A-Za-z]+|\\.|[()\[\]{},;=]|\b(?:and|or)\b|[^\\()\[\]{},;=ao]+|.", re.DOTALL
)


def split_outside(text: str, separators: str) -> list[str]:
    """The parts of the text between separators outside of brackets and environments."""
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
    """The items of a list, split at commas outside of brackets; `a \\pm b` is two."""
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


WRAPPED = re.compile(rf"{TEXT}\{{([^{{}}]*)\}}")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_WORDS = re.compile(r"[^\W\d_][^\W\d_'’ .-]*(?:[ '’.-]+[^\W\d_]+)*\.?")
_SINGLE_LETTER = re.compile(r"(?<![A-Za-z'’])[B-Zb-z](?![A-Za-z])")
_ARTICLES = re.compile(r"^(?:the|a|an)\s+")


def words_of(text: str) -> str | None:
    """The words of an answer that is text, like `\\text{Evelyn}`, in small letters; `None` for mathematics."""
    bare = WRAPPED.sub(r"\1", text).strip().strip("\"'`")
    is_bare = bare == text.strip()
    if not _WORDS.fullmatch(bare) or (is_bare and (len(bare) < 3 or _SINGLE_LETTER.search(bare))):
        return None
    return _ARTICLES.sub("", re.sub(r"\s+", " ", bare.lower().rstrip("."))).strip()


def choice_of(text: str) -> str | None:
    """The letter of an answer that is a choice, like `\\text{(C)}`."""
    bare = WRAPPED.sub(r"\1", text).strip()
    match = _CHOICE.fullmatch(bare)
    return match[1] if match and (bare != text.strip() or bare.startswith("(")) else None
