"""A call's arguments as the object of a reply."""

import json
import re
import sys
from typing import Any

from pydantic_core import from_json

LARGEST = sys.float_info.max
CONSTANTS = {"Infinity": LARGEST, "-Infinity": -LARGEST, "NaN": None}
ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)")
LONE = len(r"\ud800")  # the length of a match of half a pair; whole pairs are longer, other escapes shorter


def call_input(text: str) -> dict[str, Any]:
    """The object that a call's arguments spell. Arguments that were cut give the fields so far, or `{}`.

    A model may write JSON that no reply can hold. A number beyond the floats, or of more digits than Python reads,
    becomes the float nearest to it; half of a pair of surrogates becomes U+FFFD.
    """
    text = ESCAPE.sub(lambda match: r"\ufffd" if len(match[0]) == LONE else match[0], text or "{}")
    try:
        value = _read(text)
    except ValueError:
        try:
            value = _read(json.dumps(from_json(text, allow_partial="trailing-strings")))
        except ValueError:
            value = {}
    return value if isinstance(value, dict) else {}


def _read(text: str) -> Any:
    return json.loads(text, parse_float=_bounded, parse_int=_integer, parse_constant=CONSTANTS.get)


def _bounded(text: str) -> float:
    return min(max(float(text), -LARGEST), LARGEST)


def _integer(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:  # Python reads integers of 4,300 digits
        return _bounded(text)
