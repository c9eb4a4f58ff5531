"""The answer in a worked solution by its mark, and the exact value of a number.

`strict_number` is the strict rule of lm-eval's `gsm8k`, the number after the first `#### `, and of its `gsm8k_cot`,
the number after the first `The answer is `. `flexible_number`, the last number of a text, is for the project's own
tasks, whose answers are plain numbers; the answers of GSM8K and MATH are found by math-verify (`math_answers.py`).
Each rule takes one answer: further guesses in the text do not count.
"""

import re
from fractions import Fraction
from typing import Literal

Mark = Literal["####", "The answer is"]

_BOXED = re.compile(r"\\f?box(?:ed)?\s*\{")
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
    """The content of the last `\\boxed{...}` (or `\\fbox`), braces matched; `None` without one that is closed."""
    for start in reversed([match.end() for match in _BOXED.finditer(text)]):
        depth = 1
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0) if text[position - 1] != "\\" else 0
            if depth == 0:
                return text[start:position]
    return None
