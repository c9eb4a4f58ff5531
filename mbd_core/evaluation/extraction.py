"""Taking the one number out of a worked answer, and reading it exactly.

The two rules are those of lm-eval's `gsm8k`: strict takes what follows the first `#### `, flexible the last number
of the text. Each gives a single answer, so no second guess can be right in its place.
"""

import re
from fractions import Fraction

_STRICT = re.compile(r"#### *(-?\$?[0-9.,]*[0-9][0-9.,]*)")
_FLEXIBLE = re.compile(r"-?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


def strict_number(text: str) -> str | None:
    """What the first `#### N` gives as N, as written; `None` without one."""
    found = _STRICT.search(text)
    return found.group(1) if found else None


def flexible_number(text: str) -> str | None:
    """The last number of the text, as written; `None` without one."""
    found = _FLEXIBLE.findall(text)
    return found[-1] if found else None


def parse_number(written: str | None) -> Fraction | None:
    """The exact value of a decimal, `,` `$` and a trailing `.` aside; `None` where it is not one."""
    if written is None:
        return None
    plain = written.replace(",", "").replace("$", "").removesuffix(".")
    return Fraction(plain) if _NUMBER.fullmatch(plain) else None


def same_number(given: str | None, reference: str) -> bool:
    """Whether both are numbers of the same exact value: `1,000.` is `$1000`, `0.30` is `.3`."""
    value = parse_number(given)
    return value is not None and value == parse_number(reference)
