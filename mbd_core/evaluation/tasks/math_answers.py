"""Mathematical answers: the number behind a mark, and whether a text gives the right answer, by a worker process."""

import atexit
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from mbd_core.evaluation.tasks.exact_numbers import LONGEST_NUMBER

# The answer in a worked solution by its mark, and the exact value of a number.
#
# `strict_number` is the strict rule of lm-eval's `gsm8k`, the number after the first `#### `, and of its `gsm8k_cot`,
# the number after the first `The answer is `. `flexible_number`, the last number of a text, is for the project's own
# tasks, whose answers are plain numbers; `stated_answers.py` finds those of GSM8K and MATH.
# Each rule takes one answer: further guesses in the text do not count.

BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*(-?\d[\d.,]*)")
_BRACE = re.compile(r"\\(?:f|frame)?box(?:ed)?\s*\{|\\[\\{}]|[{}]")
_STRICT = re.compile(r" *(-?\$?[0-9.,]*[0-9][0-9.,]*)")
_FLEXIBLE = re.compile(r"-?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


def strict_number(text: str, mark: str = "####") -> str | None:
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
    boxes = list(_closed_boxes(text))
    if not boxes:
        return None
    _, begin, end = max(boxes)
    return text[begin:end]


def outermost_boxes(text: str) -> list[tuple[int, int, int]]:
    """Where closed boxes that lie in no other begin, and where their contents begin and end, in their order."""
    boxes: list[tuple[int, int, int]] = []
    for box in sorted(_closed_boxes(text)):
        if not boxes or box[0] > boxes[-1][2]:
            boxes.append(box)
    return boxes


def _closed_boxes(text: str) -> Iterator[tuple[int, int, int]]:
    """Every box whose brace is closed, as `outermost_boxes` gives them, the innermost first. Each character is read
    once, whatever stands open."""
    braces: list[tuple[int, int] | None] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            braces.append(None)
        elif "box" in match[0]:
            braces.append(match.span())
        elif match[0] == "}" and braces and (box := braces.pop()) is not None:
            yield *box, match.start()


# Whether a text gives a mathematical answer, by `math_worker.py`, a process that can be killed.

START_SECONDS = 60.0
JUDGE_SECONDS = 10.0
LONGEST_TEXT = 20_000


@dataclass(frozen=True, kw_only=True)
class MathAnswer:
    """The answer found in a text, and whether it is right; `failure` says why there is none."""

    answer: str | None = None
    correct: bool = False
    failure: str = ""


class MathJudge:
    """One worker, started when it is needed and again after it was killed. Threads take turns."""

    def __init__(self, *, seconds: float = JUDGE_SECONDS) -> None:
        self._seconds = seconds
        self._worker: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def judge(self, gold: str, text: str) -> MathAnswer:
        """Judge the end of the text, where the answer is."""
        with self._lock:
            request = json.dumps({"gold": gold, "text": text[-LONGEST_TEXT:]})
            try:
                is_new = self._worker is None
                result = json.loads(self._ask(request, self._seconds + (START_SECONDS if is_new else 0.0)))
            except TimeoutError:
                self._end()
                return MathAnswer(failure=f"math-verify took over {self._seconds:g} s")
            except (EOFError, BrokenPipeError):
                self._end()
                return MathAnswer(failure="math-verify's process ended")
        return MathAnswer(answer=result["answer"], correct=result["correct"], failure=result.get("error", ""))

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._end()

    def _ask(self, request: str, seconds: float) -> bytes:
        if self._worker is None:
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "mbd_core.evaluation.tasks.math_worker"],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._worker.stdin is not None and self._worker.stdout is not None
        self._worker.stdin.write(request.encode() + b"\n")
        self._worker.stdin.flush()
        deadline, line = time.monotonic() + seconds, b""
        poll = select.poll()
        poll.register(self._worker.stdout.fileno(), select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            part = os.read(self._worker.stdout.fileno(), 1 << 16)
            if not part:
                raise EOFError
            line += part
        return line

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            with suppress(BrokenPipeError):
                worker.communicate()


_JUDGE = MathJudge()
atexit.register(_JUDGE.close)


def judge_answer(gold: str, text: str) -> MathAnswer:
    """Judge with this process's worker."""
    return _JUDGE.judge(gold, text)


def same_answer(first: str, second: str) -> bool:
    """Whether two answers count as one: the same text or number, or equal mathematics."""
    numbers = parse_number(first), parse_number(second)
    if first == second or None not in numbers:
        return first == second or numbers[0] == numbers[1]
    return judge_answer(first, f"\\boxed{{{second}}}").correct
