"""Tasks whose answer is a function that a benchmark's tests call: HumanEval, MBPP, and a generated task."""

import ast
import builtins
import json
from typing import Any, NotRequired, TypedDict

from mbd_core.evaluation.sandbox.processes import Limits
from mbd_core.evaluation.sandbox.program_text import extract_program
from mbd_core.evaluation.sandbox.programs import run_tests
from mbd_core.evaluation.tasks.kinds.task import Grade, Grader, Problem, Programs, Task
from mbd_core.tasks.generated import GENERATED_TASKS


def function_in(problem: Problem, text: str) -> str:
    """The program in an answer, with the parts of the prompt that it needs."""
    return extract_program(problem.prompt, problem.entry_point, text)


def _run_tests(problem: Problem, program: str) -> Grade:
    verdict = run_tests(program, entry_point=problem.entry_point, limits=Limits(), **json.loads(problem.reference))
    return Grade(correct=verdict.reason == "passed", reason=verdict.reason, detail=verdict.detail)


TESTED = Grader(rule="code", judge=_run_tests, programs=Programs(extract=function_in))


class FunctionRow(TypedDict):
    task_id: str
    prompt: str
    test: str
    entry_point: str


class MbppRow(TypedDict):
    """A row of MBPP's full file (`text`) or of its sanitised file (`prompt`)."""

    task_id: int | str
    test_list: list[str]
    text: NotRequired[str]
    prompt: NotRequired[str]
    test_imports: NotRequired[list[str] | None]
    test_setup_code: NotRequired[str | None]


def function_name(name: str) -> str:
    """The name in a row's column `entry_point`."""
    if not name.isidentifier():
        raise ValueError(f"column 'entry_point' must be a function's name, not {name!r}")
    return name


def _humaneval_problem(_problem_id: str, row: FunctionRow) -> Problem:
    entry_point = function_name(row["entry_point"])
    if "plus_input" in row:
        raise ValueError(
            "the row has EvalPlus's inputs ('plus_input'), which task 'humaneval' would leave out; "
            "use task 'humaneval-plus', which gives the score on the base inputs too"
        )
    tests = {"preamble": row["prompt"], "tests": row["test"], "check": "check"}
    return Problem(
        problem_id=row["task_id"], prompt=row["prompt"], reference=json.dumps(tests), entry_point=entry_point
    )


def _mbpp_problem(_problem_id: str, row: MbppRow) -> Problem:
    text = row.get("text") or row.get("prompt")
    if not isinstance(text, str):
        raise ValueError("no column 'text' or 'prompt' with the problem's text")
    if "plus_input" in row:
        raise ValueError("the row has EvalPlus's inputs ('plus_input'); use task 'mbpp-plus'")
    entry_point = _tested_function(row["test_list"])
    setup = "\n".join([*(row.get("test_imports") or ()), row.get("test_setup_code") or ""])
    tests = {"preamble": "", "tests": "\n".join([setup, *row["test_list"]]), "check": ""}
    return Problem(
        problem_id=f"Mbpp/{row['task_id']}",
        prompt=f'"""\n{text}\n{row["test_list"][0]}\n"""\n',
        reference=json.dumps(tests),
        entry_point=entry_point,
        text=text.strip(),
        tests="\n".join(row["test_list"]),
    )


def _tested_function(assertions: list[Any]) -> str:
    """The function that the first assertion calls: the outermost call that is no builtin."""
    try:
        calls = [node.func for node in ast.walk(ast.parse(assertions[0])) if isinstance(node, ast.Call)]
        return next(f.id for f in calls if isinstance(f, ast.Name) and not hasattr(builtins, f.id))
    except (SyntaxError, StopIteration, IndexError, TypeError):
        raise ValueError("column 'test_list' must hold assertions that call the wanted function") from None


CODE_MINI = Task(
    name="code-mini",
    label="Code-mini",
    row=FunctionRow,
    problem=_humaneval_problem,
    grader=TESTED,
    generate=GENERATED_TASKS["code-mini"].generate,
)
HUMANEVAL = Task(name="humaneval", label="HumanEval", row=FunctionRow, problem=_humaneval_problem, grader=TESTED)
MBPP = Task(
    name="mbpp",
    label="MBPP",
    row=MbppRow,
    problem=_mbpp_problem,
    grader=TESTED,
)
