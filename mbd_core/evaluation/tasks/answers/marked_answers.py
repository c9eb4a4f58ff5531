"""The answer in a worked solution by its mark or its box, and the exact value of a plain number.

`strict_number` is the strict rule of lm-eval's `gsm8k`, the number after the first `#### `, and of its `gsm8k_cot`,
the number after the first `The answer is `. `flexible_number`, the last number of a text, is for the project's own
tasks, whose answers are plain numbers. `stated_answers.py` finds the answers to GSM8K and MATH. Each rule takes one
answer: further guesses in the text do not count.
"""

import re
from collections.abc import Iterator
from fractions import Fraction

from mbd_core.evaluation.tasks.answers.exact_numbers import LONGEST_NUMBER

BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*(-?\d[\d.,]*)")
_BRACE = re.compile(r"\\(?:f|frame)?box(?:ed)?\s*\{|\\[\\{}]|[{}]")
_STRICT = re.compile(r" *(-?\$?[0-9.,]*[0-9][0-9.,]*)")
_FLEXIBLE = re.compile(r"-?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


def strict_number(text: str, mark: str = "####") -> str | None:
    """The number after the first `#### `, or after another mark, as written; `None` without one."""
    for place in re.finditer(re.escape(mark), text):
        match = _STRICT.match(text, place.end())
        if match:
            return match.group(1)
    return None


def flexible_number(text: str) -> str | None:
    """The last number of the text, as written; `None` without one."""
    numbers = _FLEXIBLE.findall(text)
    return numbers[-1] if numbers else None


def parse_number(text: str | None) -> Fraction | None:
    """The exact value of a decimal number, without `,`, `$` and a trailing `.`.

    `None` if the text is no decimal, or has more than `LONGEST_NUMBER` characters.
    """
    if text is None or len(text) > LONGEST_NUMBER:
        return None
    plain = text.replace(",", "").replace("$", "").removesuffix(".")
    return Fraction(plain) if _NUMBER.fullmatch(plain) else None


def same_number(answer: str | None, reference: str) -> bool:
    """Whether both are numbers with the same exact value, like `1,000.` and `$1000`, or `0.30` and `.3`."""
    value = parse_number(answer)
    return value is not None and value == parse_number(reference)


def boxed(text: str) -> str | None:
    """The content of the last box, `\\boxed{...}`, `\\fbox{...}` or `\\boxed 9`; `None` without a closed box."""
    text = BARE_BOX.sub(r"\\boxed{\1}", text)
    boxes = list(_closed_boxes(text))
    if not boxes:
        return None
    _, begin, end = max(boxes)
    return text[begin:end]


def outermost_boxes(text: str) -> list[tuple[int, int, int]]:
    """The closed boxes that lie in no other box, in order: each box's begin, and its content's begin and end."""
    boxes: list[tuple[int, int, int]] = []
    for box in sorted(_closed_boxes(text)):
        if not boxes or box[0] > boxes[-1][2]:
            boxes.append(box)
    return boxes


def _closed_boxes(text: str) -> Iterator[tuple[int, int, int]]:
    """Every box whose brace is closed, in the form of `outermost_boxes`, the innermost first. Each character is read
    once, however many braces are open."""
    braces: list[tuple[int, int] | None] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            braces.append(None)
        elif "box" in match[0]:
            braces.append(match.span())
        elif match[0] == "}" and braces and (box := braces.pop()) is not None:
            yield *box, match.start()
