"""The number in a worked answer, by two rules, and its exact value.

The rules are those of lm-eval's `gsm8k`: strict takes the number after the first `#### `, flexible takes the last
number of the text. Each takes at most one number, so further guesses in the text do not count.
"""

import re
from fractions import Fraction

_STRICT = re.compile(r"#### *(-?\$?[0-9.,]*[0-9][0-9.,]*)")
_FLEXIBLE = re.compile(r"-?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


def strict_number(text: str) -> str | None:
    """The N of the first `#### N`, as written; `None` without one."""
    match = _STRICT.search(text)
    return match.group(1) if match else None


def flexible_number(text: str) -> str | None:
    """The last number of the text, as written; `None` without one."""
    numbers = _FLEXIBLE.findall(text)
    return numbers[-1] if numbers else None


def parse_number(text: str | None) -> Fraction | None:
    """The exact value of a decimal number, without `,`, `$` and a trailing `.`; `None` if the text is no decimal."""
    if text is None:
        return None
    plain = text.replace(",", "").replace("$", "").removesuffix(".")
    return Fraction(plain) if _NUMBER.fullmatch(plain) else None


def same_number(answer: str | None, reference: str) -> bool:
    """Whether both are numbers with the same exact value, like `1,000.` and `$1000`, or `0.30` and `.3`."""
    value = parse_number(answer)
    return value is not None and value == parse_number(reference)
