"""LiveCodeBench's code generation: a row of its files, the program in an answer, and its grader's rule.

The rule is that of its `testing_util.py` (2025): a program that reads standard input is called as a function once for
each test, a method of `Solution` once for each test's arguments; six seconds a test; all tests must pass. Here the
program's process gets the inputs only, and its standard streams are one object for all tests, so that a program may
import them by name.
"""

import ast
import base64
import binascii
import datetime
import functools
import json
import pickle
import pickletools
import re
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any, TypedDict

from mbd_core.evaluation.sandbox.plain_data import Value
from mbd_core.evaluation.sandbox.processes import Limits
from mbd_core.evaluation.sandbox.programs import Call, RunVerdict, run_calls
from mbd_core.evaluation.tasks.kinds.task import Grade, Grader, Problem, Programs, Task

NAME = "livecodebench"
TEST_SECONDS = 6.0
MEMORY_BYTES = 4 << 30
SPARE_BYTES = 1 << 16
LONGEST_TESTS = 1 << 30  # bytes of a problem's tests

# The text before every program, as in the benchmark: these modules' names, the modules, and a deep recursion.
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
PREAMBLE = "".join(f"from {name} import *\n" for name in (*_MODULES, "builtins", "typing"))
PREAMBLE += f"import {', '.join(_MODULES)}\nsys.setrecursionlimit(50000)\n"
READER, METHOD = "wrapped_function", "tested_method"

# The prompt's instruction on the answer's form, below the question.
WITH_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your code within "
    "delimiters.\n```python\n{starter}\n```"
)
WITHOUT_STARTER = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample "
    "inputs). Enclose your code within delimiters as follows.\n```python\n# YOUR CODE HERE\n```"
)


class ContestRow(TypedDict):
    question_id: str
    question_content: str
    platform: str
    starter_code: str
    difficulty: str
    metadata: str
    public_test_cases: str
    private_test_cases: str
    contest_date: str | datetime.datetime


@dataclass(frozen=True, kw_only=True)
class Window:
    """The contests' dates from `first` to `last`, both included: days, or months. An empty text is no bound."""

    first: str = ""
    last: str = ""

    @classmethod
    def parse(cls, text: str) -> "Window":
        """The window of `2024-08..2025-01`; either end may be missing."""
        first, dots, last = text.partition("..")
        try:
            for end in (first, last):
                if end:
                    _day(end)
            if not dots or not (first or last):
                raise ValueError
        except ValueError:
            raise ValueError(
                f"'{text}' is no window of dates; write FIRST..LAST, each a month or a day, as 2024-08..2025-01"
            ) from None
        if first and last and first[: len(last)] > last[: len(first)]:
            raise ValueError(f"the window '{text}' ends before it begins; write the earlier date first")
        return cls(first=first, last=last)

    def holds(self, row: ContestRow) -> bool:
        """Whether a row's contest is within it; `ValueError` for a row without a date."""
        date = str(row["contest_date"])[:10]
        try:
            datetime.date.fromisoformat(date)
        except ValueError:
            raise ValueError(f"column 'contest_date' must be a date, as 2024-08-31, not {date!r}") from None
        return date[: len(self.first)] >= self.first and (not self.last or date[: len(self.last)] <= self.last)


def _day(text: str) -> None:
    if not re.fullmatch(r"\d{4}-\d\d(-\d\d)?", text):
        raise ValueError
    datetime.date.fromisoformat(text if len(text) == 10 else f"{text}-01")


@dataclass(frozen=True, kw_only=True)
class ContestProblem:
    """The columns of a row that grading needs: the tests as in the file, and the name of a tested method."""

    function: str
    public: str
    private: str
    platform: str
    difficulty: str
    date: str

    @classmethod
    def of_row(cls, row: ContestRow) -> "ContestProblem":
        """The problem of a row; `ValueError` for tests that cannot be read."""
        metadata = _parse_column(row["metadata"] or "{}", "metadata", dict)
        function = metadata.get("func_name") or ""
        if function and not (isinstance(function, str) and function.isidentifier()):
            raise ValueError(f"column 'metadata' must have a method's name as 'func_name', not {function!r}")
        private = row["private_test_cases"]
        problem = cls(
            function=function,
            public=row["public_test_cases"],
            # uncompressed tests are up to a hundred times as long
            private=_compressed(private) if private.lstrip().startswith("[") else private,
            platform=row["platform"],
            difficulty=row["difficulty"],
            date=str(row["contest_date"])[:10],
        )
        if not problem.tests():
            raise ValueError("columns 'public_test_cases' and 'private_test_cases' hold no test")
        return problem

    def tests(self) -> list[tuple[str, str]]:
        """The inputs and the outputs, public tests first."""
        private = _decompressed(self.private) if self.private else "[]"
        return [*_tests(self.public or "[]", "public_test_cases"), *_tests(private, "private_test_cases")]

    def pack(self) -> str:
        """The problem as text."""
        return json.dumps(vars(self))

    @classmethod
    def unpack(cls, text: str) -> "ContestProblem":
        """The problem of `pack`."""
        return cls(**json.loads(text))


def answer_form(starter: str) -> str:
    """The benchmark's instruction on the answer: a whole program, or a program that continues `starter`."""
    return WITH_STARTER.format(starter=starter) if starter else WITHOUT_STARTER


def _parse_column(text: str, column: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"column '{column}' must be JSON text") from None
    if not isinstance(value, kind):
        raise ValueError(f"column '{column}' must be JSON text of a {kind.__name__}, not of a {type(value).__name__}")
    return value


def _tests(text: str, column: str) -> list[tuple[str, str]]:
    try:
        tests = [(test["input"], test["output"]) for test in _parse_column(text, column, list)]
    except (KeyError, TypeError):
        raise ValueError(f"column '{column}' must be a list of tests, each with 'input' and 'output'") from None
    if not all(isinstance(part, str) for test in tests for part in test):
        raise ValueError(f"column '{column}' must have texts as 'input' and 'output'")
    return tests


def _compressed(text: str) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


def _decompressed(text: str) -> str:
    """The JSON text of private tests: base64 of zlib of a pickled text. Nothing is unpickled: the pickle's operations
    are read, and a pickle of anything but one text is refused."""
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(base64.b64decode(text, validate=True), LONGEST_TESTS)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError("it is cut, or far too long")
        texts = []
        for operation, argument, _ in pickletools.genops(content):
            if operation.name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
                texts.append(argument)
            elif operation.name not in ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "STOP"):
                raise ValueError(f"it holds the operation {operation.name}")
        (tests,) = texts
    except (ValueError, binascii.Error, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(
            f"column 'private_test_cases' must be JSON text, or base64 of zlib of a pickled text ({error})"
        ) from None
    return str(tests)


def extract_code(text: str) -> str:
    """The program in an answer, by the benchmark's rule: the text between the last two lines with a fence."""
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else ""


def reading_program(program: str) -> str:
    """A program that reads standard input as the function `wrapped_function`; its imports stay outside."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(program).body
        if body and isinstance(body[-1], ast.If) and ast.unparse(body[-1].test) == "__name__ == '__main__'":
            body = [*body[:-1], *body[-1].body]
        imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        (function,) = ast.parse(f"def {READER}(): pass").body
        assert isinstance(function, ast.FunctionDef)
        function.body = [node for node in body if node not in imports]
        return PREAMBLE + "\n".join(map(ast.unparse, [*imports, function]))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program


def method_program(program: str, function: str) -> str:
    """A program with the tested method as `tested_method`: `Solution`'s method, or a function of that name. The
    function must be the program's own, not a function that a module brings, like `add`."""
    if "class Solution" in program:
        return f"{PREAMBLE}\n{program}\n\n{METHOD} = Solution().{function}\n"
    return f"{PREAMBLE}{function} = None\n{program}\n\n{METHOD} = {function}\n"


def same_output(out: str, expected: str) -> bool:
    """Whether two outputs have the same lines. Spaces around a line do not count, and lines of numbers are compared by
    value."""
    lines, expected_lines = _lines(out), _lines(expected)
    return len(lines) == len(expected_lines) and all(map(_same_line, lines, expected_lines))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    try:
        return [Decimal(part) for part in line.split()] == [Decimal(part) for part in expected.split()]
    except InvalidOperation:
        return False


def same_result(out: Any, expected: Any) -> bool:
    """Whether a method returned the expected value; a tuple is as good as a list."""
    return bool((list(out) if isinstance(out, tuple) else out) == expected)


@functools.lru_cache(maxsize=4)
def _calls(reference: str) -> tuple[list[Call], list[Any]]:
    """The calls of a packed problem, and their expected results."""
    problem = ContestProblem.unpack(reference)
    tests = problem.tests()
    arguments: list[Sequence[Any]] = [
        [json.loads(line) for line in text.split("\n")] if problem.function else [text] for text, _ in tests
    ]
    expected = [json.loads(output) if problem.function else output for _, output in tests]
    calls = [
        Call(arguments=call_arguments, seconds=TEST_SECONDS, longest=12 * len(output) + SPARE_BYTES)
        for call_arguments, (_, output) in zip(arguments, tests, strict=True)
    ]
    return calls, expected


def judge_contest(reference: str, program: str) -> RunVerdict:
    """Run a program on all tests of a packed problem, by the benchmark's rule; the first wrong result decides."""
    calls, expected = _calls(reference)
    function = ContestProblem.unpack(reference).function

    def accept(number: int, out: Value) -> bool:
        if function:
            return same_result(out.value, expected[number])
        return isinstance(out.value, str) and same_output(out.value, expected[number])

    total = (TEST_SECONDS + 1) * len(calls) + 5
    return run_calls(
        method_program(program, function) if function else reading_program(program),
        METHOD if function else READER,
        calls,
        accept,
        limits=Limits(wall_seconds=total, cpu_seconds=int(total) + 1, memory_bytes=MEMORY_BYTES),
        convert="" if function else "printed",
    )


def _problem(_problem_id: str, row: ContestRow) -> Problem:
    contest = ContestProblem.of_row(row)
    return Problem(
        problem_id=row["question_id"],
        prompt=row["question_content"],
        reference=contest.pack(),
        entry_point=contest.function,
        tests=answer_form(row["starter_code"]),
    )


def _grade(problem: Problem, program: str) -> Grade:
    verdict = judge_contest(problem.reference, program)
    return Grade(correct=verdict.reason == "passed", reason=verdict.reason, detail=verdict.detail)


def _kinds(problem: Problem) -> tuple[str, ...]:
    """The difficulty, the platform and the month of a problem's contest."""
    contest = ContestProblem.unpack(problem.reference)
    return contest.difficulty, contest.platform, contest.date[:7]


LIVE_CODE_BENCH = Task(
    name=NAME,
    label="LiveCodeBench",
    row=ContestRow,
    problem=_problem,
    grader=Grader(
        rule="contest",
        judge=_grade,
        programs=Programs(extract=lambda _problem, text: extract_code(text), completes=False, kinds=_kinds),
    ),
)


def dated_task(name: str) -> Task:
    """The task within a window of contest dates, as `livecodebench:2024-08..2025-01`."""
    dates = name.removeprefix(f"{NAME}:")
    return replace(LIVE_CODE_BENCH, name=name, label=f"LiveCodeBench {dates}", is_asked=Window.parse(dates).holds)
