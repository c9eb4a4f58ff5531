"""The answer in a worked solution by its mark, and the exact value of a number.

`strict_number` is the strict rule of lm-eval's `gsm8k`, the number after the first `#### `, and of its `gsm8k_cot`,
the number after the first `The answer is `. `flexible_number`, the last number of a text, is for the project's own
tasks, whose answers are plain numbers; the answers of GSM8K and MATH are found by math-verify (`math_answers.py`).
Each rule takes one answer: further guesses in the text do not count.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

Mark = Literal["####", "The answer is"]

BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*(-?\d[\d.,]*)")
_BRACE = re.compile(r"\\(?:f|frame)?box(?:ed)?\s*\{|\\[\\{}]|[{}]")
_STRICT = re.compile(r" *(-?\$?[0-9.,]*[0-9][0-9.,]*)")
_FLEXIBLE = re.compile(r"-?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
LONGEST_NUMBER = 1000  # characters; Python itself refuses to convert more than 4,300 digits
_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


def strict_number(text: str, mark: Mark = "####") -> str | None:
    """The N of the first `#### N`, or behind another mark, as written; `None` without one."""
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
    """The exact value of a decimal number, without `,`, `$` and a trailing `.`; `None` if the text is no decimal, or
    one of more than `LONGEST_NUMBER` characters."""
    if text is None or len(text) > LONGEST_NUMBER:
        return None
    plain = text.replace(",", "").replace("$", "").removesuffix(".")
    return Fraction(plain) if _NUMBER.fullmatch(plain) else None


def same_number(answer: str | None, reference: str) -> bool:
    """Whether both are numbers with the same exact value, like `1,000.` and `$1000`, or `0.30` and `.3`."""
    value = parse_number(answer)
    return value is not None and value == parse_number(reference)


def boxed(text: str) -> str | None:
    """The content of the last box, `\\boxed{...}`, `\\fbox{...}` or `\\boxed 9`; `None` without one that is closed."""
    text = BARE_BOX.sub(r"\\boxed{\1}", text)
    closed = list(_closed_boxes(text))
    if not closed:
        return None
    _, begin, end = max(closed)
    return text[begin:end]


def outermost_boxes(text: str) -> list[tuple[int, int, int]]:
    """Where closed boxes that lie in no other begin, and where their contents begin and end, in their order."""
    found: list[tuple[int, int, int]] = []
    for box in sorted(_closed_boxes(text)):
        if not found or box[0] > found[-1][2]:
            found.append(box)
    return found


def _closed_boxes(text: str) -> Iterator[tuple[int, int, int]]:
    """Every box whose brace is closed, as `outermost_boxes` gives them, the innermost first. Each character is read
    once, whatever stands open."""
    opened: list[tuple[int, int] | None] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(None)
        elif "box" in match[0]:
            opened.append(match.span())
        elif match[0] == "}" and opened and (box := opened.pop()) is not None:
            yield *box, match.start()
