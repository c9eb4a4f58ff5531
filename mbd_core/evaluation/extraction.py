"""The one number of a worked answer, by two rules, and its exact value.

The rules are those of lm-eval's `gsm8k`: strict takes what follows the first `#### `, flexible takes the last number
of the text. Each gives one answer at most, so a second guess cannot be right in its place.
"""

import re
from fractions import Fraction

_STRICT = re.compile(r"#### *(-?\$?[0-9.,]*[0-9][0-9.,]*)")
_FLEXIBLE = re.compile(r"-?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


def strict_number(text: str) -> str | None:
    """What the first `#### N` gives as N, as written; `None` without one."""
    match = _STRICT.search(text)
    return match.group(1) if match else None


def flexible_number(text: str) -> str | None:
    """The last number of the text, as written; `None` without one."""
    numbers = _FLEXIBLE.findall(text)
    return numbers[-1] if numbers else None


def parse_number(text: str | None) -> Fraction | None:
    """The exact value of a decimal, `,`, `$` and a trailing `.` ignored; `None` if it is not a decimal."""
    if text is None:
        return None
    plain = text.replace(",", "").replace("$", "").removesuffix(".")
    return Fraction(plain) if _NUMBER.fullmatch(plain) else None


def same_number(answer: str | None, reference: str) -> bool:
    """Whether both are numbers of the same exact value: `1,000.` is `$1000`, `0.30` is `.3`."""
    value = parse_number(answer)
    return value is not None and value == parse_number(reference)
