"""A program's runs in the sandbox, on inputs or under a benchmark's tests. The verdict comes from another process."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

from mbd_core.evaluation.sandbox.child import PROGRAM_ENDED
from mbd_core.evaluation.sandbox.plain_data import Value, decode
from mbd_core.evaluation.sandbox.processes import Contained, Isolation, Limits, contained

RunReason = Literal["passed", "wrong", "error", "timeout", "memory"]
ResultConversion = Literal["", "set", "given", "printed"]
DEFINE_SECONDS = 10.0
LONGEST_VERDICT = 4096
MOST_WRONG = 20  # wrong inputs that a detail names
FURTHER_SECONDS = 5.0  # time for inputs after the first wrong one; they do not change the verdict


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """The result of a run; `detail` is for people (the exception's name, the exit status)."""

    reason: RunReason
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
    convert: ResultConversion = "",
    isolation: Isolation | None = None,
) -> RunVerdict:
    """Define the program, call its function, and pass every answer to `accept`. The first refused answer decides the
    verdict. The detail also names wrong inputs that the program reaches within further `FURTHER_SECONDS`.

    `limits.wall_seconds` is for the definition and all calls together, by the rule of `Contained.read_line`. The
    definition may take at most `DEFINE_SECONDS`.
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
                line = process.read_line(seconds=seconds, longest=call.longest)
                refusal = _judge(process, number, line, accept)
                if refusal is not None:
                    if line is None:
                        return refusal
                    wrong, num_run = _wrong_inputs_from(process, number, calls, accept, limits)
                    return replace(refusal, detail=refusal.detail + _wrong_text(wrong, num_run, len(calls)))
        except TimeoutError:
            return RunVerdict(reason="timeout", detail="over its time")
        except OverflowError:
            return RunVerdict(reason="wrong", detail="an answer is far longer than the right one")
    return RunVerdict(reason="passed")


def _wrong_inputs_from(
    process: Contained, first: int, calls: Sequence[Call], accept: Callable[[int, Value], bool], limits: Limits
) -> tuple[list[int], int]:
    """The wrong inputs from the `first` on, and how many inputs have an answer."""
    wrong, deadline = [first], time.monotonic() + FURTHER_SECONDS
    for number, call in enumerate(calls[first + 1 :], start=first + 1):
        seconds = min(deadline - time.monotonic(), process.left_of(limits.wall_seconds))
        if seconds <= 0:
            return wrong, number
        try:
            line = process.read_line(seconds=min(call.seconds, seconds), longest=call.longest)
        except (TimeoutError, OverflowError):
            return wrong, number
        if line is None:
            return wrong, number
        if _judge(process, number, line, accept) is not None:
            wrong.append(number)
    return wrong, len(calls)


def _wrong_text(wrong: Sequence[int], num_run: int, num_calls: int) -> str:
    """The wrong inputs in words; empty if there is only one."""
    if len(wrong) < 2:
        return ""
    inputs = ", ".join(map(str, wrong[:MOST_WRONG])) + (", ..." if len(wrong) > MOST_WRONG else "")
    calls = f"{num_calls}" if num_run == num_calls else f"the first {num_run} of {num_calls}"
    return f"; wrong inputs: {inputs} ({len(wrong)} of {calls})"


def _judge(
    process: Contained, number: int, line: bytes | None, accept: Callable[[int, Value], bool]
) -> RunVerdict | None:
    if line is None or line[:1] != b"=":
        return _failure_verdict(process, line)
    try:
        right = accept(number, decode(line[1:]))
    except ValueError as error:
        return RunVerdict(reason="error", detail=str(error))
    return None if right else RunVerdict(reason="wrong", detail=f"input {number}")


def _failure(process: Contained, *, seconds: float) -> RunVerdict | None:
    line = process.read_line(seconds=seconds, longest=LONGEST_VERDICT)
    return None if line == b"=" else _failure_verdict(process, line)


def _failure_verdict(process: Contained, line: bytes | None) -> RunVerdict:
    """The verdict for a missing value: the process ended, or the program raised an exception."""
    if line is not None:
        name = line[1:].decode(errors="replace")[:100]
        return RunVerdict(reason="memory" if name == "MemoryError" else "error", detail=name)
    status = process.wait_briefly()
    if status == -signal.SIGXCPU:
        return RunVerdict(reason="timeout", detail="over its CPU time")
    return RunVerdict(reason="error", detail=f"the process ended early with status {status}")


def run_tests(
    program: str,
    *,
    tests: str,
    entry_point: str,
    limits: Limits,
    preamble: str = "",
    check: str = "",
    isolation: Isolation | None = None,
) -> RunVerdict:
    """Run a benchmark's tests against the program, in two processes that exchange only plain data.

    `tests` follow `preamble`. If `check` is given, this function of the tests is called with the program's function.
    """
    order = {"program": program, "entry_point": entry_point, "inputs": None, "convert": ""}
    judge = {"preamble": preamble, "tests": tests, "entry_point": entry_point, "check": check}
    with ExitStack() as stack:
        calls_out, calls_in = os.pipe()
        answers_out, answers_in = os.pipe()
        try:
            answerer = stack.enter_context(
                contained("answer", order, limits, input_fd=calls_out, output_fd=answers_in, isolation=isolation)
            )
            process = stack.enter_context(
                contained("test", judge, limits, input_fd=answers_out, output_fd=calls_in, isolation=isolation)
            )
        finally:
            for fd in (calls_out, calls_in, answers_out, answers_in):
                os.close(fd)
        try:
            line = process.read_line(seconds=limits.wall_seconds, longest=LONGEST_VERDICT, others=[answerer])
        except TimeoutError:
            return RunVerdict(reason="timeout", detail=f"over {limits.wall_seconds:g} s of wall time")
        except OverflowError:
            return RunVerdict(reason="error", detail="the tests' verdict is no verdict")
        verdict = _test_verdict(process, answerer, line)
        if verdict.reason in ("passed", "timeout") or line is None:
            return verdict
        return replace(verdict, detail=verdict.detail + _further_failures(process, answerer, limits))


def _further_failures(process: Contained, answerer: Contained, limits: Limits) -> str:
    """The assertions that failed, in words; empty unless more than one failed and the tests ended in time."""
    seconds = min(FURTHER_SECONDS, process.left_of(limits.wall_seconds))
    try:
        line = process.read_line(seconds=seconds, longest=LONGEST_VERDICT, others=[answerer]) if seconds > 0 else None
    except (TimeoutError, OverflowError):
        return ""
    if line is None:
        return ""
    failures, num_run, total = line.decode().split()
    return _wrong_text([int(number) for number in failures.split(",")], int(num_run), int(total))


def _test_verdict(process: Contained, answerer: Contained, line: bytes | None) -> RunVerdict:
    if line is None:
        return RunVerdict(reason="error", detail=f"the tests ended early with status {process.end()}")
    reason, _, detail = line.decode(errors="replace").partition(" ")
    if detail == PROGRAM_ENDED:
        return _failure_verdict(answerer, None)
    if reason == "error":
        return RunVerdict(reason="memory" if detail == "MemoryError" else "error", detail=detail)
    return RunVerdict(reason="passed" if reason == "passed" else "wrong", detail=detail)
