"""HumanEval+ and MBPP+: problems packed as texts, the results of canonical solutions, and the grade of a program."""

import base64
import functools
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from mbd_core.evaluation.sandbox.plain_data import Digest, Value, encode
from mbd_core.evaluation.sandbox.processes import Limits
from mbd_core.evaluation.sandbox.programs import Call, RunVerdict, run_calls
from mbd_core.evaluation.tasks.kinds.evalplus_rules import (
    GIVEN_ANSWERS,
    LONGEST_SECONDS,
    Comparison,
    Dataset,
    all_seconds,
    call_seconds,
    conversion,
    typed_inputs,
)
from mbd_core.evaluation.tasks.kinds.task import Grade, Grader, Problem, Programs, Task
from mbd_core.evaluation.tasks.kinds.tested_functions import function_in, function_name

SPARE_BYTES = 1 << 16
LONGEST_CANONICAL = 1 << 28
SECONDS_PER_BYTE = 1e-6  # for sending a result, which EvalPlus does not do
SECONDS_PER_DIGESTED_BYTE = 5e-8
MEMORY_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class PlusProblem:
    """The part of a row of EvalPlus's files that grading needs; the inputs are as in the file."""

    dataset: Dataset
    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    base_input: list[list[Any]]
    plus_input: list[list[Any]]
    atol: float

    def pack(self) -> str:
        """The problem as a short text."""
        return base64.b85encode(zlib.compress(json.dumps(vars(self)).encode())).decode()

    @classmethod
    def unpack(cls, text: str) -> "PlusProblem":
        """The problem of `pack`."""
        return cls(**json.loads(zlib.decompress(base64.b85decode(text))))

    def inputs(self) -> tuple[list[list[Any]], list[list[Any]]]:
        """The base inputs and the plus inputs, in the types that the function takes."""
        if self.dataset == "humaneval":
            return self.base_input, self.plus_input
        return typed_inputs(self.task_id, self.base_input), typed_inputs(self.task_id, self.plus_input)


@dataclass(frozen=True, kw_only=True)
class ProblemOracle:
    """A problem, the canonical solution's result for each input, and a program's time limits."""

    problem: PlusProblem
    inputs: tuple[Sequence[Any], ...]
    expected: tuple[Value, ...]
    calls: tuple[Call, ...]
    num_base: int
    limits: Limits

    def comparisons(self) -> tuple[Comparison, Comparison]:
        """The comparisons of the base inputs and of the plus inputs."""
        first, second = (
            Comparison(
                dataset=self.problem.dataset,
                entry_point=self.problem.entry_point,
                inputs=self.inputs[part],
                expected=self.expected[part],
                atol=self.problem.atol,
            )
            for part in (slice(self.num_base), slice(self.num_base, None))
        )
        return first, second


class OracleFailure(RuntimeError):
    """A canonical solution did not return a result for every input."""


@functools.lru_cache(maxsize=1024)
def find_oracle(reference: str) -> ProblemOracle:
    """Run the canonical solution of a packed problem once in the sandbox; raises `OracleFailure`."""
    problem = PlusProblem.unpack(reference)
    base, plus = problem.inputs()
    inputs = [*base, *plus]
    expected: list[Value] = []

    def keep(_number: int, out: Value) -> bool:
        is_given = problem.dataset == "mbpp" and problem.entry_point in GIVEN_ANSWERS
        expected.append(Value(out.value is not None, "bool", out.seconds) if is_given else out)
        return True

    calls = [Call(arguments=arguments, seconds=LONGEST_SECONDS, longest=LONGEST_CANONICAL) for arguments in inputs]
    limits = Limits(wall_seconds=2 * LONGEST_SECONDS, cpu_seconds=int(2 * LONGEST_SECONDS), memory_bytes=MEMORY_BYTES)
    program = problem.prompt + problem.canonical_solution
    verdict = run_calls(program, problem.entry_point, calls, keep, limits=limits)
    if verdict.reason != "passed":
        raise OracleFailure(f"the canonical solution of {problem.task_id} fails: {verdict.reason} ({verdict.detail})")
    lengths = [100 if isinstance(out.value, Digest) else len(encode(out.value)) for out in expected]
    seconds = [
        call_seconds(out.seconds) + _sending_seconds(out, length)
        for out, length in zip(expected, lengths, strict=True)
    ]
    total = all_seconds(seconds[: len(base)]) + all_seconds(seconds[len(base) :])
    return ProblemOracle(
        problem=problem,
        inputs=tuple(inputs),
        expected=tuple(expected),
        calls=tuple(
            Call(arguments=arguments, seconds=limit, longest=4 * length + SPARE_BYTES)
            for arguments, limit, length in zip(inputs, seconds, lengths, strict=True)
        ),
        num_base=len(base),
        limits=Limits(wall_seconds=total, cpu_seconds=int(total) + 1, memory_bytes=MEMORY_BYTES),
    )


def _sending_seconds(out: Value, length: int) -> float:
    if isinstance(out.value, Digest):
        return SECONDS_PER_DIGESTED_BYTE * out.value.length
    return SECONDS_PER_BYTE * length


@dataclass(frozen=True, kw_only=True)
class PlusVerdict:
    """Whether a program passes the base inputs, and whether it passes the base and the plus inputs."""

    base: bool
    plus: bool
    verdict: RunVerdict


def judge_program(reference: str, program: str) -> PlusVerdict:
    """Run a program on all inputs of a packed problem, by EvalPlus's rules; the first wrong result decides."""
    oracle = find_oracle(reference)
    base, plus = oracle.comparisons()
    num_right = 0  # before the first wrong result

    def accept(number: int, out: Value) -> bool:
        nonlocal num_right
        right = base.accept(number, out) if number < oracle.num_base else plus.accept(number - oracle.num_base, out)
        num_right += right and number == num_right
        return right

    entry_point = oracle.problem.entry_point
    verdict = run_calls(
        program,
        entry_point,
        oracle.calls,
        accept,
        limits=oracle.limits,
        convert=conversion(oracle.problem.dataset, entry_point),
    )
    return PlusVerdict(base=num_right >= oracle.num_base, plus=verdict.reason == "passed", verdict=verdict)


def _grade(problem: Problem, program: str) -> Grade:
    try:
        judged = judge_program(problem.reference, program)
    except OracleFailure as error:
        return Grade(correct=False, reason="ungradable", detail=str(error))
    return Grade(
        correct=judged.plus,
        reason=judged.verdict.reason,
        detail=judged.verdict.detail,
        base_correct=judged.base,
        plus_correct=judged.plus,
    )


EVALPLUS = Grader(
    rule="plus",
    judge=_grade,
    judgements=("base", "plus"),
    programs=Programs(extract=function_in, sample_file="evalplus.jsonl"),
)


class PlusRow(TypedDict):
    """A row of EvalPlus's files; a problem without plus inputs has `{}` there."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    base_input: list[list[Any]]
    plus_input: list[list[Any]] | dict[str, Any]
    atol: int | float


def _plus_problem(dataset: Dataset) -> Callable[[str, PlusRow], Problem]:
    def problem(_problem_id: str, row: PlusRow) -> Problem:
        _check_dataset(dataset, row["task_id"])
        plus_problem = PlusProblem(
            dataset=dataset,
            task_id=row["task_id"],
            prompt=row["prompt"],
            entry_point=row["entry_point"],
            canonical_solution=row["canonical_solution"],
            base_input=row["base_input"],
            plus_input=row["plus_input"] if isinstance(row["plus_input"], list) else [],
            atol=row["atol"],
        )
        text, tests = _words_and_tests(row["prompt"]) if dataset == "mbpp" else ("", "")
        return Problem(
            problem_id=row["task_id"],
            prompt=row["prompt"],
            reference=plus_problem.pack(),
            entry_point=function_name(row["entry_point"]),
            text=text,
            tests=tests,
        )

    return problem


def _check_dataset(dataset: Dataset, task_id: str) -> None:
    """Raise `ValueError` for a row of EvalPlus's other file. A problem's number decides the types of MBPP+'s
    inputs."""
    prefix, _, number = task_id.rpartition("/")
    if dataset == "humaneval" and prefix == "Mbpp":
        raise ValueError(f"'{task_id}' is a problem of MBPP+; use task 'mbpp-plus', or HumanEval+'s file")
    if dataset == "mbpp" and prefix == "HumanEval":
        raise ValueError(f"'{task_id}' is a problem of HumanEval+; use task 'humaneval-plus', or MBPP+'s file")
    if dataset == "mbpp" and not (prefix == "Mbpp" and number.isdecimal()):
        raise ValueError(f"task_id '{task_id}' must be Mbpp/ and the problem's number, as in EvalPlus's file")


def _words_and_tests(prompt: str) -> tuple[str, str]:
    """The question and the tests in MBPP+'s prompt: a docstring whose last lines are an assertion."""
    words, start, tests = prompt.strip().strip('"').strip().partition("\nassert ")
    return words.strip(), (start + tests).strip()


HUMANEVAL_PLUS = Task(
    name="humaneval-plus",
    label="HumanEval+",
    row=PlusRow,
    problem=_plus_problem("humaneval"),
    grader=EVALPLUS,
    other_form="give EvalPlus's own HumanEvalPlus.jsonl.gz; task 'humaneval' takes the hub's "
    "evalplus/humanevalplus, whose column 'test' has all inputs",
)
MBPP_PLUS = Task(
    name="mbpp-plus",
    label="MBPP+",
    row=PlusRow,
    problem=_plus_problem("mbpp"),
    grader=EVALPLUS,
    other_form="give EvalPlus's own MbppPlus.jsonl.gz; of the hub's evalplus/mbppplus task 'mbpp' runs MBPP's own "
    "tests, the column 'test_list'",
)
