"""Judges mathematical answers with math-verify, one JSON line in, one out. Started by `math_answers.py`.

It is a process of its own because an answer like `9^{9^{9^9}}` can take any time and memory, inside one operation that
no signal interrupts.
"""

import json
import logging
import re
import resource
import sys
from typing import Any

from mbd_core.evaluation.tasks.math_answers import BARE_BOX, outermost_boxes

MEMORY_BYTES = 4 << 30
MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-"})
SIGN = re.compile(r"((?:^|[#:=(]|[^\W\d]{2})\s*)-\s+(?=\\?\$?\.?\d)", re.MULTILINE)
SPACE = r"(?:\\[,;:!> ]|\\q?quad(?![A-Za-z])|[~\s])"
EDGES = re.compile(rf"^(?:{SPACE}|\\(?:display|text)style(?![A-Za-z]))+|{SPACE}+$")
THOUSANDS = re.compile(r"(?<=\d)(?:\\[,;:! ]|\{,\}|~|,\\!\s*|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
MOST_LAYERS = 20  # that are taken off, one around the other
COMMAS = re.compile(r"^(?:-|\\?\$)*\d{1,3}(?:,\d{3})+(?=(?:\\,|[^\d,])(?:\\,|[^,])*$)")
DOLLAR_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{\\\$\}")
DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
FONTS = tuple(rf"\{name}{{" for name in ("mathbf", "boldsymbol", "bm", "pmb", "boxed", "fbox", "framebox"))
NUMBER_IN_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([-+\d.,\s]*\d[-+\d.,\s]*)\}")
ELLIPSIS = ("..", r"\.")


def normalized(text: str) -> str:
    """The text with one kind of minus sign, which stands at its number unless it follows an operand, and with boxes
    that hold their answers alone."""
    return _boxes_undressed(SIGN.sub(r"\1-", text.translate(MINUS_SIGNS)))


def _boxes_undressed(text: str) -> str:
    """The text with every box as `\\boxed{...}`, which math-verify reads, around its undressed content."""
    text = BARE_BOX.sub(r"\\boxed{\1}", text)
    parts, end_of_last = list[str](), 0
    for start, begin, end in outermost_boxes(text):
        parts += [text[end_of_last:start], r"\boxed{", undressed(text[begin:end]), "}"]
        end_of_last = end + 1
    return "".join([*parts, text[end_of_last:]])


def undressed(content: str) -> str:
    """A box's content without what changes no value: spaces and marks of thousands, bold letters, a formula's
    delimiters or braces around all of it, and the sentence's last mark behind it."""
    content = DOLLAR_TEXT.sub(r"\\$", THOUSANDS.sub("", content))
    for _ in range(MOST_LAYERS):
        content = EDGES.sub("", content)
        if content.endswith((".", ",", ";", ":")) and not content.endswith(ELLIPSIS):
            content = content[:-1]
        for opening, closing in DELIMITERS:
            inner = content[len(opening) : -len(closing)]
            if (
                content.startswith(opening)
                and content.endswith(closing)
                and inner
                and opening not in inner.replace(r"\$", "")
            ):
                content = inner
        for opening in (*FONTS, "{"):
            if content.startswith(opening) and _closes_at_end(content, len(opening)):
                content = content[len(opening) : -1]
        if match := NUMBER_IN_TEXT.fullmatch(content):
            content = match[1]
    return COMMAS.sub(lambda number: number[0].replace(",", ""), content)


def _closes_at_end(content: str, start: int) -> bool:
    """Whether the brace that was opened before `start` is closed by the last character."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", content[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return start + match.end() == len(content)
    return False


def judge(gold: str, text: str) -> dict[str, Any]:
    """What math-verify finds in the text, as it understands it, and whether that equals the gold answer."""
    from math_verify import parse, verify

    answer = parse(normalized(text), parsing_timeout=None, raise_on_error=True)
    gold_answer = parse(f"\\boxed{{{undressed(gold)}}}", parsing_timeout=None, raise_on_error=True)
    correct = bool(answer) and verify(gold_answer, answer, timeout_seconds=None, raise_on_error=True)
    return {"answer": str(answer[0])[:200] if answer else None, "correct": bool(correct)}


def main() -> None:
    """Answer until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        try:
            result = judge(**json.loads(line))
        except Exception as error:  # sympy raises whatever it likes for texts that are no mathematics
            result = {"answer": None, "correct": False, "error": type(error).__name__}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
