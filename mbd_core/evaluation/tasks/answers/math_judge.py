"""Whether a text gives a mathematical answer, by `math_worker.py`, a process that can be killed."""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mbd_core.evaluation.tasks.answers.marked_answers import parse_number

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
        """Judge the last `LONGEST_TEXT` characters of a text, where the answer is."""
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
                [sys.executable, "-m", "mbd_core.evaluation.tasks.answers.math_worker"],
                cwd=Path(__file__).parents[3],
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
