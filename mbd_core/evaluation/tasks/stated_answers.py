"""Where a text states its answer: the last box, `####` or "answer" of it, else its last formula or number.

Markdown, HTML and a thought (`<think>`) come off first. A later statement replaces an earlier one, whatever marks the
two: a model that corrects itself is taken at its last word.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mbd_core.evaluation.tasks.answer_forms import choice_of, form_of, undressed, words_of
from mbd_core.evaluation.tasks.exact_numbers import (
    CURRENCY,
    ascii_notation,
    number_end,
    plain_notation,
    read_quantity,
)
from mbd_core.evaluation.tasks.math_answers import BARE_BOX, outermost_boxes


def stated_answer(text: str, *, gold: str) -> str | None:
    """The content of the last stated answer, `None` without any; of the gold answer it uses the kind alone: words, a
    list, or mathematics with or without digits."""
    text = text.rpartition("</think>")[2].strip() or text
    emphasised = _emphasised(text)
    kind = _Kind.of(gold)
    text = BARE_BOX.sub(
        r"\\boxed{\1}", SIGN.sub(lambda sign: f"{sign[1] or sign[2] or ''}-", ascii_notation(without_markdown(text)))
    )
    boxes = list(_boxes(text))
    marked = boxes + [item for item in _marked(text, kind) if not any(box.holds(item) for box in boxes)]
    marked = [item for item in marked if item.is_boxed or kind.takes(item.content)]
    for candidates in ([item for item in marked if item.is_clean], marked):
        if candidates:
            last = max(candidates, key=lambda item: item.start)
            return max((_corrected(text, last, kind), last), key=lambda item: item.start).content
    if (bold := next((part for part in reversed(emphasised) if kind.takes_whole(part)), None)) is not None:
        return bold
    return _last_value(text, kind)


@dataclass(frozen=True, kw_only=True)
class _Statement:
    """An answer that stands in a text from `start` to `end`. It is clean if little but it stands in its sentence."""

    start: int
    end: int
    content: str
    is_clean: bool = True
    is_boxed: bool = False

    def holds(self, other: "_Statement") -> bool:
        return self.start <= other.start < self.end or (other.start <= self.start < other.end)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What kind of answer is looked for."""

    is_words: bool
    is_list: bool
    has_brackets: bool
    has_digits: bool

    @classmethod
    def of(cls, gold: str) -> "_Kind":
        plain = plain_notation(undressed(gold))
        is_words = words_of(plain) is not None or choice_of(plain) is not None
        return cls(
            is_words=is_words,
            is_list=form_of(plain).kind in ("list", "set"),
            has_brackets=form_of(plain).kind == "brackets",
            has_digits=re.search(r"\d", plain) is not None,
        )

    def takes(self, content: str) -> bool:
        if self.is_words or not self.has_digits:
            return bool(content.strip())
        return re.search(r"\d|\\(?:pi|infty|sqrt)", content) is not None or read_quantity(content) is not None

    def takes_whole(self, content: str) -> bool:
        """Whether an emphasised text is nothing but an answer."""
        if self.is_words:
            return 0 < len(content.split()) < 4 and not content.rstrip().endswith(":")
        return read_quantity(undressed(content)) is not None or (
            self.takes(content) and any(content.startswith(opening) for opening in ("$", r"\("))
        )


# Markdown.

_TAGS = re.compile(
    r"</?(?:b|strong|em|i|u|span|div|p|code|mark|center|font|big|small|sub|sup|h[1-6]|td|th|tr|table)\b[^<>]*>", re.I
)
_ANSWER_TAG = re.compile(r"</?(?:final_?)?answer>", re.I)
_LINE_MARKS = (
    (re.compile(r"^[ \t]*(?:```|~~~)[\w+-]*[ \t]*$", re.MULTILINE), ""),  # fences of code
    (
        re.compile(r"^[ \t]*\|?(?:[ \t]*:?-{3,}:?[ \t]*\|)+(?:[ \t]*:?-{3,}:?[ \t]*)?$", re.MULTILINE),
        "",
    ),  # tables' rules
    (re.compile(r"^[ \t]*(?:[-*_][ \t]*){3,}$", re.MULTILINE), ""),  # rules
    (re.compile(r"^[ \t]{0,3}(?:>[ \t]?)+", re.MULTILINE), ""),  # quotes
    (re.compile(r"^[ \t]{0,3}(?:#{1,3}|#{5,6})[ \t]+", re.MULTILINE), ""),  # headings; `####` marks an answer
    (re.compile(r"^[ \t]*[-*+\u2022][ \t]+(?=\S)", re.MULTILINE), ""),  # items
    (re.compile(r"^([ \t]*)\d{1,2}[.)][ \t]+(?=[A-Z*_])", re.MULTILINE), r"\1"),  # numbers of items
)
_STRUCK = re.compile(r"~~(?=\S)[^~\n]{1,500}?~~")
_CODE = re.compile(r"(`{1,2})(?!`)([^`\n]{1,500}?)\1(?!`)")
_BOLD = re.compile(
    r"(?<![\w)\]}*])(?<!\\)\*\*\*?(?=[^\s*])([^*\n]{1,500}?)(?<=[^\s*])\*\*\*?|(?<=[A-Za-z]{2})\*\*(\S[^*\n]{0,500}?)\*\*"
)
_BOLD_LOW = re.compile(r"(?<![\w)\]}\\])__(?=\S)([^_\n]{1,500}?)(?<=\S)__(?!\w)")
_ITALIC = re.compile(r"(?<![\w\\*)\]}])\*(?=[^\s*])([^*\n]{1,500}?)(?<=[^\s*])\*(?![\w*(])")
_ITALIC_LOW = re.compile(r"(?<![\w\\)\]}$])_(?=[^\s_{])([^_\n]{1,500}?)(?<=[^\s_])_(?![\w{])")
_STRAY = re.compile(r"(?<=[\w.$)])\*\*+(?=\s|$)|^\*\*+(?=\S)", re.MULTILINE)
_TEXT_ANSWER = re.compile(r"\\text(?:bf|it)?\{([^{}]*\banswers?\b[^{}]*)\}", re.I)
_LINE_OF_TABLE = re.compile(r"^[ \t]*\|(.*\|.*)\|[ \t]*$", re.MULTILINE)


def without_markdown(text: str) -> str:
    """The text without marks of emphasis, headings, lists, code, tables and HTML, and without what is struck out."""
    text = _ANSWER_TAG.sub(lambda tag: "\n" if tag[0][1] == "/" else "\nAnswer: ", _TAGS.sub("", text))
    text = _STRUCK.sub("", re.sub(r"<br\s*/?>", "\n", text))
    for pattern, replacement in _LINE_MARKS[:2]:
        text = pattern.sub(replacement, text)
    text = _LINE_OF_TABLE.sub(lambda line: re.sub(r"[ \t]*\|[ \t]*", " : ", line[1]).strip(), text)
    for pattern, replacement in _LINE_MARKS[2:]:
        text = pattern.sub(replacement, text)
    text = _CODE.sub(r"\2", _TEXT_ANSWER.sub(r"\1", text))
    for _ in range(2):
        text = _BOLD.sub(lambda bold: bold[1] or bold[2], text)
        text = _ITALIC.sub(r"\1", _BOLD_LOW.sub(r"\1", text))
    return _STRAY.sub("", _ITALIC_LOW.sub(r"\1", text))


def _emphasised(text: str) -> list[str]:
    """The bold texts of the last paragraph that has words, if no equation follows them."""
    paragraphs = [part for part in re.split(r"\n\s*\n", text.strip()) if re.search(r"\w", part)]
    if not paragraphs:
        return []
    bold = list(_BOLD.finditer(paragraphs[-1]))
    if not bold or "=" in paragraphs[-1][bold[-1].end() :]:
        return []
    return [ascii_notation(match[1] or match[2]).strip().rstrip(".") for match in bold]


# Formulas.

_FORMULA = re.compile(
    r"(?<!\\)\$\$(?P<a>[^$]{1,2000}?)\$\$|\\\[(?P<b>.{1,2000}?)\\\]|\\\((?P<c>.{1,2000}?)\\\)"
    r"|(?<![\\$\d])\$(?!\s)(?P<d>(?:\\\$|[^$\n]){1,2000}?)(?<![\s\\])\$(?![\d$])"
    r"|(?<![\\$\d])\$\s(?P<e>[^$\n]{1,2000}?)\s\$(?![\d$])"
    r"|\\begin\{(?P<name>align|equation|gather|aligned)(?P<star>\*?)\}(?P<f>.{1,2000}?)\\end\{(?P=name)(?P=star)\}",
    re.DOTALL,
)
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_COMMANDS = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_PERCENT_BEHIND = re.compile(r"\s?(?:\\?%|percent\b|pct\b)", re.I)


def _formulas(text: str) -> Iterator[_Statement]:
    """The formulas of a text; an amount of money (`$5 and $6`) is none. One of several rows is its last row."""
    position = 0
    while match := _FORMULA.search(text, position):
        content = next(match[name] for name in "abcdef" if match[name] is not None)
        if match["d"] and _PROSE.search(_COMMANDS.sub("", content)):
            position = match.start() + 1
            continue
        position = match.end()
        if r"\begin{" not in content:
            content = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", content) if row.strip()][-1:]
            content = content[0].replace("&", "") if content else ""
        if percent := _PERCENT_BEHIND.match(text, position):
            content, position = content + r"\%", percent.end()
        yield _Statement(start=match.start(), end=position, content=content.strip())


_CONNECTOR_TEXT = re.compile(r"\\text\{\s*,?\s*(and|or)\s*\}|\$|\\[()\[\]]|\\q?quad\b|\\[,;:! ]")
_CONNECTOR = re.compile(r"\s*(?:,?\s*(?:and|or)|[,;])\s*(?:\w\s*=\s*)?$")


def _joined(text: str, parts: list[_Statement]) -> list[_Statement]:
    """Statements that only `,`, `and` or `or` divides as one, a list."""
    groups: list[_Statement] = []
    for part in parts:
        if groups and _CONNECTOR.match(_CONNECTOR_TEXT.sub(r"\1", text[groups[-1].end : part.start])):
            last = groups.pop()
            content = f"{last.content} , {part.content}"
            part = _Statement(start=last.start, end=part.end, content=content, is_boxed=part.is_boxed)
        groups.append(part)
    return groups


# Marks of an answer.

SIGN = re.compile(
    r"((?:^|[#:=(]|[^\W\d]{2})[ \t]*)-[ \t]+(?=\\?\$?\.?\d)"
    r"|((?:^|[#:=(]|\b(?:is|are|be|equals))[ \t]*)\b(?:minus|negative)[ \t]+(?=\\?\$?\.?\d)",
    re.MULTILINE | re.I,
)
_FINAL = (
    r"(?:therefore|thus|then|hence|so|simply|just|indeed|now|still|approximately|about|around|roughly|exactly|equal to"
    r"|given by|found to be|option|choice|that is|i\.e\.|:|,)"
)
_CUE = re.compile(
    r"\banswers?\b[\"')\]]*(?:\s*\([^()\n]{0,40}\))?(?:\s*[:=]|\s+-{1,2}\s|"
    r"(?:[^\n.:=]|\.(?=\d)){0,80}?\b(?:is|are|was|be|becomes|equals|as)\b)"
    r"|\b(?:option|choice)\s+(?:is|:)|\b(?:final )?result\s*[:=]|答案(?:是|为|：|:)",
    re.I,
)
_CHECK = re.compile(r"\b(?:check|verify|verifying|checking|confirm|test)\b[^.\n]*$", re.I)
_FILLERS = re.compile(rf"(?:[\s\"'`]|\\?[,:]|{_FINAL}(?![A-Za-z]))*", re.I)
_LONE_CUE = re.compile(r"^[ \t]*#*[ \t]*(?:the\s+)?(?:final\s+|correct\s+)?answer[ \t]*:?[ \t]*$", re.I | re.MULTILINE)
_REVERSED = re.compile(r"(?<!\s)\s{1,4}(?:is|are)\s+(?:the|our|my|your)\s+(?:\w+\s+)?answer\b", re.I)
_HASHES = re.compile(r"####+[ \t]*\n?")
_HEADING_NUMBER = re.compile(r"\d{1,2}[.)]\s+[A-Za-z]")
_REFUSED = re.compile(r"(?:not|wrong|incorrect|correct|right|unknown|unclear|in|the same)\b", re.I)
_CORRECTION = re.compile(
    r"(?:^[ \t]*or\b|\b(?:or rather|rather|correction|i mean|wait|actually|no|sorry|oops|instead)\b)[\s,:;.!-]*"
    r"(?:(?:it|that|this)(?:'s| is| should be| must be| has to be)|(?:it )?should be"
    r"|the \w+(?: \w+)? (?:is|should be))?"
    r"[\s:]*",
    re.I | re.MULTILINE,
)


def _boxes(text: str) -> list[_Statement]:
    boxes = []
    for start, begin, end in outermost_boxes(text):
        content, after = undressed(text[begin:end]), end + 1
        behind = re.compile(r"\s*(?:\$|\\\)|\\\])?\s?(?:\\?%|percent\b|pct\b)", re.I).match(text, after)
        if behind and read_quantity(content) is not None:
            content += r"\%"
        boxes.append(_Statement(start=start, end=after, content=content, is_boxed=True))
    return _joined(text, boxes)


def _marked(text: str, kind: _Kind) -> Iterator[_Statement]:
    """What stands behind `####`, behind "answer is" and the like, and before "is the answer"."""
    for cue in _HASHES.finditer(text):
        if not _HEADING_NUMBER.match(text, cue.end()) and (found := _value_at(text, cue.end(), kind)):
            yield found
    for cue in _CUE.finditer(text):
        if _CHECK.search(text, max(0, cue.start() - 40), cue.start()):
            continue
        if found := _value_at(text, _FILLERS.match(text, cue.end()).end(), kind):  # type: ignore[union-attr]
            yield found
    for cue in _LONE_CUE.finditer(text):
        if found := _value_at(text, _FILLERS.match(text, cue.end()).end(), kind):  # type: ignore[union-attr]
            yield found
    for cue in _REVERSED.finditer(text):
        begin = max(text.rfind("\n", 0, cue.start()), text.rfind(". ", 0, cue.start())) + 1
        sentence = text[begin : cue.start()]
        if kind.is_words:
            yield _Statement(start=begin, end=cue.start(), content=sentence.split(",")[-1].strip())
        elif (content := _last_value(sentence, kind)) is not None:
            yield _Statement(start=begin, end=cue.start(), content=content)


def _corrected(text: str, last: _Statement, kind: _Kind) -> _Statement:
    """The statement that corrects the last one: `Wait, it should be 5.`"""
    for cue in _CORRECTION.finditer(text, last.end):
        found = _value_at(text, cue.end(), kind)
        if found and found.is_clean and kind.takes(found.content):
            last = found
    return last


_SENTENCE_END = re.compile(
    r"[.!?;](?=[\s\"')}]|$)|\n|,?\s+(?:because|since|which|where|so that|so|as|but|if|when|i hope)\b"
    r"|,\s+(?:and the|and so|the|it|as)\b",
    re.I,
)
_LONG_WORD = re.compile(r"(?<![\\A-Za-z])(?!and\b|or\b|sqrt\b|pi\b|sin\b|cos\b|tan\b|log\b|ln\b)[A-Za-z]{2,}")
MOST_WORDS = 4  # behind an answer in its sentence


def _value_at(text: str, start: int, kind: _Kind) -> _Statement | None:
    """The answer with which a sentence begins, or behind its last `=`; else the sentence's first formula or number."""
    start += len(text[start:]) - len(text[start:].lstrip())
    line = text[start : start + 2000]
    if not line or _REFUSED.match(line):
        return None
    formula = _FORMULA.match(line)
    if formula:
        groups = _joined(line, list(_formulas(line)))
        if groups and groups[0].start == 0 and r"\boxed" not in groups[0].content:
            content = undressed(groups[0].content)
            return _Statement(start=start, end=start + groups[0].end, content=content)
    end = next((m.start() for m in _SENTENCE_END.finditer(line) if m.start() > 0), len(line))
    sentence = re.sub(r"[\"'`]\s*[}\]]*$", "", line[:end].strip().lstrip("\"'`").rstrip(" :,"))
    if r"\boxed" in sentence:
        return None

    if kind.is_words:
        return _Statement(start=start, end=start + end, content=sentence.split(",")[0])
    if formulas := _joined(sentence, list(_formulas(sentence))):
        taken = [item for item in formulas if kind.takes(item.content)]
        return _Statement(start=start, end=start + end, content=taken[0].content, is_clean=False) if taken else None
    side = sentence.rpartition("=")[2].strip()
    begin = start + max(0, line.find(side))
    number = number_end(side)
    if number and side[number:].lstrip().startswith("("):
        return _Statement(start=start, end=begin + number, content=side[:number])
    if side and (read_quantity(side) is not None or not _LONG_WORD.search(_COMMANDS.sub("", side))):
        content = sentence if form_of(plain_notation(sentence)).kind != "part" else side
        return _Statement(start=start, end=start + end, content=content)
    if number:
        rest = side[number:].strip()
        is_clean = len(rest.split()) <= MOST_WORDS and not re.match(r"[-+*/^]|times|less|more", rest)
        return _Statement(start=start, end=begin + number, content=side[:number], is_clean=is_clean)
    if numbers := _numbers(side):
        return _Statement(start=start, end=start + end, content=numbers[0].content, is_clean=False)
    return None


# The last value of a text.

_NUMBER_START = re.compile(
    rf"(?<![\w.\\^])(?<!\^\{{)(?:[+-]\s?)?(?:{CURRENCY}\s?)?[+-]?(?=[0-9]|\.[0-9]|\\frac)", re.ASCII
)
_DENIED = re.compile(r"\b(?:is not|isn't|not)\s+(?:equal to\s+)?[$]?-?[0-9][0-9.,]*", re.I)
_BRACKETS = re.compile(r"[(\[][^()\[\]\n]{1,200},[^()\[\]\n]{1,200}[)\]]")
_ORDINAL = re.compile(r"(?:st|nd|rd|th)\b")


def _numbers(text: str) -> list[_Statement]:
    """The numbers of a text, ordinals only if there are no others."""
    numbers: list[_Statement] = []
    ordinals: list[_Statement] = []
    position = 0
    while place := _NUMBER_START.search(text, position):
        start, end = place.start(), number_end(text[place.start() :])
        if not end:
            position = place.end() + 1
            continue
        if (
            text[start] in "+-"
            and re.search(r"[\w)}%]\s?$", text[:start][-2:])
            and not re.search(r"[A-Za-z]{2}\s$", text[:start][-3:])
        ):
            start, end = start + 1, end - 1  # an operator, or a range's dash
        position = place.start() + number_end(text[place.start() :])
        item = _Statement(start=start, end=position, content=text[start:position].strip())
        (ordinals if _ORDINAL.match(text, position) else numbers).append(item)
    return numbers or ordinals


def _last_value(text: str, kind: _Kind) -> str | None:
    """The last formula or number; of an answer in words the last text."""
    formulas = list(_formulas(text))
    if kind.is_words:
        texts = re.findall(r"\\text(?:bf|rm)?\{([^{}]+)\}", text) or [item.content for item in formulas]
        lines = [line for line in text.strip().splitlines() if line.strip()]
        return texts[-1] if texts else lines[-1].strip() if lines else None
    outside = list(text)
    for item in formulas:
        outside[item.start : item.end] = " " * (item.end - item.start)
    prose = _DENIED.sub(lambda denied: " " * len(denied[0]), "".join(outside))
    numbers = _numbers(prose)
    if kind.has_brackets and (found := list(_BRACKETS.finditer(prose))):
        numbers = [_Statement(start=item.start(), end=item.end(), content=item[0]) for item in found]
    values = sorted(
        [*_joined(text, formulas), *(_joined(text, numbers) if kind.is_list else numbers)], key=lambda item: item.end
    )
    last_value = next((item.content for item in reversed(values) if kind.takes(item.content)), None)
    return text.strip() if last_value is None and read_quantity(text) is not None else last_value
