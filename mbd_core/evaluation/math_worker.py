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

MEMORY_BYTES = 4 << 30
MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-"})
SIGN = re.compile(r"((?:^|[#:=(]|[^\W\d]{2})\s*)-\s+(?=\\?\$?\.?\d)", re.MULTILINE)


def normalized(text: str) -> str:
    """The text with one kind of minus sign, which stands at its number unless it follows an operand."""
    return SIGN.sub(r"\1-", text.translate(MINUS_SIGNS))


def judge(gold: str, text: str) -> dict[str, Any]:
    """What math-verify finds in the text, as it understands it, and whether that equals the gold answer."""
    from math_verify import parse, verify

    found = parse(normalized(text), parsing_timeout=None, raise_on_error=True)
    right = parse(f"\\boxed{{{gold}}}", parsing_timeout=None, raise_on_error=True)
    correct = bool(found) and verify(right, found, timeout_seconds=None, raise_on_error=True)
    return {"found": str(found[0])[:200] if found else None, "correct": bool(correct)}


def main() -> None:
    """Answer until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        try:
            result = judge(**json.loads(line))
        except Exception as error:  # sympy raises whatever it likes for texts that are no mathematics
            result = {"found": None, "correct": False, "error": type(error).__name__}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
