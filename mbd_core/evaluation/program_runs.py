"""Runs a program in the sandbox, on inputs or under a benchmark's tests. The verdict comes from another process."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from mbd_core.evaluation.plain_data import Value, decode
from mbd_core.evaluation.sandbox import Contained, Isolation, Limits, contained
from mbd_core.evaluation.sandbox_child import PROGRAM_ENDED

Reason = Literal["passed", "wrong", "error", "timeout", "memory"]
Conversion = Literal["", "set", "given"]
DEFINE_SECONDS = 10.0
LONGEST_VERDICT = 4096


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a run; `detail` is for people (the exception's name, the exit status)."""

    reason: Reason
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the function: its arguments, the seconds it may take, the longest answer in bytes."""

    arguments: Sequence[Any]
    seconds: float
    longest: int


def run_calls(
    program: str,
    entry_point: str,
    calls: Sequence[Call],
    accept: Callable[[int, Value], bool],
    *,
    limits: Limits,
    convert: Conversion = "",
    isolation: Isolation | None = None,
) -> Verdict:
    """Define the program, call its function, and pass every answer to `accept`, until one is refused.

    `limits.wall_seconds` is for all calls together, by the rule of `Contained.read_line`; the definition has at most
    `DEFINE_SECONDS` of it.
    """
    order = {
        "program": program,
        "entry_point": entry_point,
        "inputs": [list(call.arguments) for call in calls],
        "convert": convert,
    }
    with contained("answer", order, limits, isolation=isolation) as process:
        surely_left = time.monotonic() + limits.wall_seconds
        try:
            refusal = _failure(process, seconds=min(DEFINE_SECONDS, limits.wall_seconds))
            if refusal is not None:
                return refusal
            for number, call in enumerate(calls):
                seconds = call.seconds
                if time.monotonic() + seconds > surely_left:
                    seconds = min(seconds, process.left_of(limits.wall_seconds))
                refusal = _judge(process, number, seconds, call.longest, accept)
                if refusal is not None:
                    return refusal
        except TimeoutError:
            return Verdict(reason="timeout", detail="over its time")
        except OverflowError:
            return Verdict(reason="wrong", detail="an answer is far longer than the right one")
    return Verdict(reason="passed")


def _judge(
    process: Contained, number: int, seconds: float, longest: int, accept: Callable[[int, Value], bool]
) -> Verdict | None:
    line = process.read_line(seconds=seconds, longest=longest)
    if line is None or line[:1] != b"=":
        return _raised(process, line)
    try:
        right = accept(number, decode(line[1:]))
    except ValueError as error:
        return Verdict(reason="error", detail=str(error))
    return None if right else Verdict(reason="wrong", detail=f"input {number}")


def _failure(process: Contained, *, seconds: float) -> Verdict | None:
    line = process.read_line(seconds=seconds, longest=LONGEST_VERDICT)
    return None if line == b"=" else _raised(process, line)


def _raised(process: Contained, line: bytes | None) -> Verdict:
    """Why there is no value: the process ended, or an exception."""
    if line is not None:
        name = line[1:].decode(errors="replace")[:100]
        return Verdict(reason="memory" if name == "MemoryError" else "error", detail=name)
    status = process.wait_briefly()
    if status == -signal.SIGXCPU:
        return Verdict(reason="timeout", detail="over its CPU time")
    return Verdict(reason="error", detail=f"the process ended early with status {status}")


def run_tests(
    program: str,
    *,
    tests: str,
    entry_point: str,
    limits: Limits,
    preamble: str = "",
    check: str = "",
    isolation: Isolation | None = None,
) -> Verdict:
    """Run a benchmark's tests against the program, both in processes of their own, which meet in plain data only.

    `tests` follow `preamble`; the function `check` of theirs, if named, is called with the program's function.
    """
    order = {"program": program, "entry_point": entry_point, "inputs": None, "convert": ""}
    judge = {"preamble": preamble, "tests": tests, "entry_point": entry_point, "check": check}
    with ExitStack() as stack:
        calls_out, calls_in = os.pipe()
        answers_out, answers_in = os.pipe()
        try:
            asked = stack.enter_context(
                contained("answer", order, limits, input_fd=calls_out, output_fd=answers_in, isolation=isolation)
            )
            process = stack.enter_context(
                contained("test", judge, limits, input_fd=answers_out, output_fd=calls_in, isolation=isolation)
            )
        finally:
            for fd in (calls_out, calls_in, answers_out, answers_in):
                os.close(fd)
        try:
            line = process.read_line(seconds=limits.wall_seconds, longest=LONGEST_VERDICT, beside=[asked])
        except TimeoutError:
            return Verdict(reason="timeout", detail=f"over {limits.wall_seconds:g} s of wall time")
        except OverflowError:
            return Verdict(reason="error", detail="the tests' verdict is no verdict")
        return _test_verdict(process, asked, line)


def _test_verdict(process: Contained, asked: Contained, line: bytes | None) -> Verdict:
    if line is None:
        return Verdict(reason="error", detail=f"the tests ended early with status {process.end()}")
    reason, _, detail = line.decode(errors="replace").partition(" ")
    if detail == PROGRAM_ENDED:
        return _raised(asked, None)
    if reason == "error":
        return Verdict(reason="memory" if detail == "MemoryError" else "error", detail=detail)
    return Verdict(reason="passed" if reason == "passed" else "wrong", detail=detail)
