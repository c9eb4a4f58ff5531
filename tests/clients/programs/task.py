"""What every program asks, and how it says what came back."""

import json
import sys
from typing import Any

KIND, URL, MODEL = sys.argv[1:4]
QUESTION = "Tom has 12 pens. Tom sells 5 pens. How many pens does Tom have now?"


def take(kind: str, have: int, sold: int) -> int:
    """How many pens or cups are left."""
    return have - sold


def say(**came_back: Any) -> None:
    """The text, the calls or the object of an answer, as the last line that is printed."""
    print(json.dumps(came_back, default=str))
