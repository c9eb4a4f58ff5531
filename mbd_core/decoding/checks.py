"""Checks of a setting's value: each raises a `ValueError` that names the setting.

`owner` is the prefix of the setting's name: the part that it belongs to and a dot ("canvas."), or empty.
"""

import json
import math

MOST = 2**31 - 1  # counts must fit into 32-bit integers


def check_count(owner: str, name: str, value: object, *, least: int = 1) -> None:
    """Raise `ValueError` unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}{name}={value!r} must be a whole number of at least {least}")
    if value > MOST:
        raise ValueError(f"{owner}{name}={value!r} must be at most {MOST}")


def check_share(owner: str, name: str, value: object) -> None:
    """Raise `ValueError` unless `value` is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{owner}{name}={value!r} must be a number from 0 to 1")


def check_weight(owner: str, name: str, value: object) -> None:
    """Raise `ValueError` unless `value` is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise ValueError(f"{owner}{name}={value!r} must be a number of at least 0")


def check_choice(owner: str, name: str, value: object, known: tuple[object, ...]) -> None:
    """Raise `ValueError`, with values as JSON, unless `value` is one of `known`, of the same type: 1 is not True."""
    if not any(type(value) is type(k) and value == k for k in known):
        text, *allowed = (json.dumps(v, default=repr) for v in (value, *known))
        raise ValueError(f"{owner}{name}={text} must be one of {', '.join(allowed)}")
