"""The answer that a text states: at its last box, `####` or "answer", else its last formula or number.

Markdown, HTML and a thought (`<think>`) come off first. A later statement replaces an earlier one, whatever marks the
two: a model that corrects itself is taken at its last word.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mbd_core.evaluation.tasks.answers.answer_forms import choice_of, form_of, undressed, words_of
from mbd_core.evaluation.tasks.answers.exact_numbers import CURRENCY, number_end, read_quantity
from mbd_core.evaluation.tasks.answers.formulas import (
    COMMANDS,
    FORMULA,
    PERCENT_AFTER,
    StatedPart,
    formulas,
    joined,
)
from mbd_core.evaluation.tasks.answers.markdown_text import emphasised, without_markdown
from mbd_core.evaluation.tasks.answers.marked_answers import BARE_BOX, outermost_boxes
from mbd_core.evaluation.tasks.answers.notation import ascii_notation, plain_notation


def stated_answer(text: str, *, gold: str) -> str | None:
    """The content of the last stated answer, `None` without any. It uses only the kind of the gold answer: words, a
    list, or mathematics with or without digits."""
    text = text.rpartition("</think>")[2].strip() or text
    bold_parts = emphasised(text)
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
    if (bold := next((part for part in reversed(bold_parts) if kind.takes_whole(part)), None)) is not None:
        return bold
    return _last_value(text, kind)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """The kind of answer that is looked for."""

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


_AFTER_BOX = re.compile(r"\s*(?:\$|\\\)|\\\])?" + PERCENT_AFTER.pattern, re.I)


def _boxes(text: str) -> list[StatedPart]:
    boxes = []
    for start, begin, end in outermost_boxes(text):
        content, after = undressed(text[begin:end]), end + 1
        percent = _AFTER_BOX.match(text, after)
        if percent and read_quantity(content) is not None:
            content += r"\%"
        boxes.append(StatedPart(start=start, end=after, content=content, is_boxed=True))
    return joined(text, boxes)


def _marked(text: str, kind: _Kind) -> Iterator[StatedPart]:
    """The values after `####`, after "answer is" and the like, and before "is the answer"."""
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
            yield StatedPart(start=begin, end=cue.start(), content=sentence.split(",")[-1].strip())
        elif (content := _last_value(sentence, kind)) is not None:
            yield StatedPart(start=begin, end=cue.start(), content=content)


def _corrected(text: str, last: StatedPart, kind: _Kind) -> StatedPart:
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
MOST_WORDS = 4  # after an answer in its sentence


def _value_at(text: str, start: int, kind: _Kind) -> StatedPart | None:
    """The answer with which a sentence begins, or after its last `=`; else the sentence's first formula or number."""
    start += len(text[start:]) - len(text[start:].lstrip())
    line = text[start : start + 2000]
    if not line or _REFUSED.match(line):
        return None
    formula = FORMULA.match(line)
    if formula:
        groups = joined(line, list(formulas(line)))
        if groups and groups[0].start == 0 and r"\boxed" not in groups[0].content:
            content = undressed(groups[0].content)
            return StatedPart(start=start, end=start + groups[0].end, content=content)
    end = next((m.start() for m in _SENTENCE_END.finditer(line) if m.start() > 0), len(line))
    sentence = re.sub(r"[\"'`]\s*[}\]]*$", "", line[:end].strip().lstrip("\"'`").rstrip(" :,"))
    if r"\boxed" in sentence:
        return None

    if kind.is_words:
        return StatedPart(start=start, end=start + end, content=sentence.split(",")[0])
    if in_formulas := joined(sentence, list(formulas(sentence))):
        taken = [item for item in in_formulas if kind.takes(item.content)]
        return StatedPart(start=start, end=start + end, content=taken[0].content, is_clean=False) if taken else None
    side = sentence.rpartition("=")[2].strip()
    begin = start + max(0, line.find(side))
    number = number_end(side)
    if number and side[number:].lstrip().startswith("("):
        return StatedPart(start=start, end=begin + number, content=side[:number])
    if side and (read_quantity(side) is not None or not _LONG_WORD.search(COMMANDS.sub("", side))):
        content = sentence if form_of(plain_notation(sentence)).kind != "part" else side
        return StatedPart(start=start, end=start + end, content=content)
    if number:
        rest = side[number:].strip()
        is_clean = len(rest.split()) <= MOST_WORDS and not re.match(r"[-+*/^]|times|less|more", rest)
        return StatedPart(start=start, end=begin + number, content=side[:number], is_clean=is_clean)
    if numbers := _numbers(side):
        return StatedPart(start=start, end=start + end, content=numbers[0].content, is_clean=False)
    return None


_NUMBER_START = re.compile(
    rf"(?<![\w.\\^])(?<!\^\{{)(?:[+-]\s?)?(?:{CURRENCY}\s?)?[+-]?(?=[0-9]|\.[0-9]|\\frac)", re.ASCII
)
_DENIED = re.compile(r"\b(?:is not|isn't|not)\s+(?:equal to\s+)?[$]?-?[0-9][0-9.,]*", re.I)
_BRACKETS = re.compile(r"[(\[][^()\[\]\n]{1,200},[^()\[\]\n]{1,200}[)\]]")
_ORDINAL = re.compile(r"(?:st|nd|rd|th)\b")


def _numbers(text: str) -> list[StatedPart]:
    """The numbers of a text, ordinals only if there are no others."""
    numbers: list[StatedPart] = []
    ordinals: list[StatedPart] = []
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
        item = StatedPart(start=start, end=position, content=text[start:position].strip())
        (ordinals if _ORDINAL.match(text, position) else numbers).append(item)
    return numbers or ordinals


def _last_value(text: str, kind: _Kind) -> str | None:
    """The last formula or number; for an answer in words, the last text."""
    in_formulas = list(formulas(text))
    if kind.is_words:
        texts = re.findall(r"\\text(?:bf|rm)?\{([^{}]+)\}", text) or [item.content for item in in_formulas]
        lines = [line for line in text.strip().splitlines() if line.strip()]
        return texts[-1] if texts else lines[-1].strip() if lines else None
    outside = list(text)
    for item in in_formulas:
        outside[item.start : item.end] = " " * (item.end - item.start)
    prose = _DENIED.sub(lambda denied: " " * len(denied[0]), "".join(outside))
    numbers = _numbers(prose)
    if kind.has_brackets and (found := list(_BRACKETS.finditer(prose))):
        numbers = [StatedPart(start=item.start(), end=item.end(), content=item[0]) for item in found]
    values = sorted(
        [*joined(text, in_formulas), *(joined(text, numbers) if kind.is_list else numbers)], key=lambda item: item.end
    )
    last_value = next((item.content for item in reversed(values) if kind.takes(item.content)), None)
    return text.strip() if last_value is None and read_quantity(text) is not None else last_value
