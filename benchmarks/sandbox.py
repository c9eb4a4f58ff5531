"""What the sandbox costs a program that does nothing: the start of its process, by inputs and by tests."""

import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import typer

from jobs.command_line import DATA, command
from mbd_core.evaluation.sandbox.processes import Limits, describe_isolation
from mbd_core.evaluation.sandbox.programs import Call, Verdict, run_calls, run_tests
from mbd_core.tables import Table, markdown

Repeats = Annotated[int, typer.Option(help="Runs of each kind.", min=1, rich_help_panel=DATA)]

PROGRAM = "def same(x):\n    return x\n"
LIMITS = Limits()
TESTS = "def check(candidate):\n    assert candidate(2) == 2\n"


def run(repeats: Repeats = 20) -> None:
    """Time a program that returns its input: a process that gets inputs, and the two processes of tests.

    It prints the median and the slowest of the repeats in milliseconds, and the machine's load, on which they depend.
    """

    def by_inputs() -> Verdict:
        calls = [Call(arguments=[2], seconds=1.0, longest=1000)]
        return run_calls(PROGRAM, "same", calls, lambda _number, out: bool(out.value == 2), limits=LIMITS)

    def by_tests() -> Verdict:
        return run_tests(PROGRAM, tests=TESTS, check="check", entry_point="same", limits=LIMITS)

    print(f"Programs run under {describe_isolation()}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {repeats} repeats")
    rows = []
    for name, once in (("inputs", by_inputs), ("tests, two processes", by_tests)):
        taken = sorted(_seconds(once) for _ in range(repeats))
        rows.append((name, f"{1000 * statistics.median(taken):.0f}", f"{1000 * taken[-1]:.0f}"))
    print(markdown([Table(columns=("kind", "median (ms)", "slowest (ms)"), numeric=(1, 2), rows=rows)]), end="")


def _seconds(once: Callable[[], Verdict]) -> float:
    started = time.perf_counter()
    verdict = once()
    if verdict.reason != "passed":
        raise RuntimeError(f"a program that returns its input ended as {verdict.reason}: {verdict.detail}")
    return time.perf_counter() - started


main = command(run, "python -m benchmarks sandbox")
