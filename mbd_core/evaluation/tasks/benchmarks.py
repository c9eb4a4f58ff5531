"""The benchmark tasks by name: how a row becomes a problem, and which rule grades an answer."""

import ast
import builtins
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from mbd_core.evaluation.tasks import livecodebench
from mbd_core.evaluation.tasks.evalplus import Dataset, PlusProblem
from mbd_core.evaluation.tasks.math_answers import Mark, boxed, parse_number, strict_number
from mbd_core.tasks.generated import GENERATED_TASKS

Rule = Literal["strict", "flexible", "math", "code", "plus", "contest", "harness"]
HARNESS_PREFIX = "harness:"
LIVE_CODE_BENCH = "livecodebench"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem. `prompt` is the user's question; `reference` is what its answers are graded by: the right number or
    expression, the tests as JSON (`code`), or the packed problem of EvalPlus (`plus`) or LiveCodeBench (`contest`).

    text, tests   MBPP's: the question in words, and the tests that a recipe may show; its `prompt` is code.
                  LiveCodeBench's `tests` are the form of the answer
    """

    problem_id: str
    prompt: str
    reference: str
    entry_point: str = ""
    text: str = ""
    tests: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark: its columns and their types, how a row becomes a problem, and the rule that grades an answer.

    rule        `strict` (the number after `####`), `flexible` (the answer that the text states last, a number), `math`
                (that answer, any expression), `code` (the tests pass), `plus` (EvalPlus's base and plus inputs pass),
                `contest` (LiveCodeBench's public and private tests pass) or `harness` (lm-evaluation-harness's own
                filters and metrics, `harness_tasks.py`)
    generate    draws rows; a task without it reads its rows from a file that the user names
    mark        what stands before the answer of a worked solution, for `strict` and `flexible`
    max_tokens  tokens of an answer to a generated problem, at most; for a file's problems the recipe says them
    is_asked    whether a row is one of the task's problems; the others are passed over
    other_form  what to do with rows that lack a column because they have another form of the benchmark
    """

    name: str
    label: str
    columns: Mapping[str, type | tuple[type, ...]]
    rule: Rule
    problem: Callable[[str, dict[str, Any]], Problem]
    generate: Callable[..., Iterator[dict[str, str]]] | None = None
    mark: Mark = "####"
    max_tokens: int = 128
    is_asked: Callable[[dict[str, Any]], bool] = lambda _row: True
    other_form: str = ""

    @property
    def benchmark(self) -> str:
        """The name without a window of dates, by which a recipe knows the task."""
        return LIVE_CODE_BENCH if self.rule == "contest" else self.name


def _number_problem(problem_id: str, row: dict[str, Any]) -> Problem:
    number = strict_number(row["answer"])
    if number is None or parse_number(number) is None:
        raise ValueError("column 'answer' must end in '#### ' and a number")
    return Problem(problem_id=problem_id, prompt=row["question"], reference=number)


def _math500_problem(problem_id: str, row: dict[str, Any]) -> Problem:
    if not row["answer"].strip():
        raise ValueError("column 'answer' must not be empty")
    return Problem(problem_id=str(row.get("unique_id") or problem_id), prompt=row["problem"], reference=row["answer"])


def _math_problem(problem_id: str, row: dict[str, Any]) -> Problem:
    answer = boxed(row["solution"])
    if answer is None:
        raise ValueError("column 'solution' must have its answer in \\boxed{...}")
    return Problem(problem_id=problem_id, prompt=row["problem"], reference=answer)


def _function_name(row: dict[str, Any]) -> str:
    name = row["entry_point"]
    if not name.isidentifier():
        raise ValueError(f"column 'entry_point' must be a function's name, not {name!r}")
    return str(name)


def _humaneval_problem(_problem_id: str, row: dict[str, Any]) -> Problem:
    entry_point = _function_name(row)
    if "plus_input" in row:
        raise ValueError(
            "the row has EvalPlus's inputs ('plus_input'), which task 'humaneval' would leave out; "
            "use task 'humaneval-plus', which gives the score on the base inputs too"
        )
    tests = {"preamble": row["prompt"], "tests": row["test"], "check": "check"}
    return Problem(
        problem_id=row["task_id"], prompt=row["prompt"], reference=json.dumps(tests), entry_point=entry_point
    )


def _mbpp_problem(_problem_id: str, row: dict[str, Any]) -> Problem:
    """A row of MBPP's full file (`text`) or of its sanitised one (`prompt`)."""
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


def _plus_problem(dataset: Dataset) -> Callable[[str, dict[str, Any]], Problem]:
    def problem(_problem_id: str, row: dict[str, Any]) -> Problem:
        _check_dataset(dataset, row["task_id"])
        fields = {name: row[name] for name in PLUS_COLUMNS}
        fields["plus_input"] = list(row["plus_input"])  # a problem without any has `{}` there
        reference = PlusProblem(dataset=dataset, **fields).pack()
        text, tests = _words_and_tests(row["prompt"]) if dataset == "mbpp" else ("", "")
        return Problem(
            problem_id=row["task_id"],
            prompt=row["prompt"],
            reference=reference,
            entry_point=_function_name(row),
            text=text,
            tests=tests,
        )

    return problem


def _contest_problem(_problem_id: str, row: dict[str, Any]) -> Problem:
    problem = livecodebench.ContestProblem.of_row(row)
    return Problem(
        problem_id=row["question_id"],
        prompt=row["question_content"],
        reference=problem.pack(),
        entry_point=problem.function,
        tests=livecodebench.answer_form(row["starter_code"]),
    )


def _check_dataset(dataset: Dataset, task_id: str) -> None:
    """Raise `ValueError` for a row of the other one of EvalPlus's files. The types of MBPP+'s inputs go by number."""
    prefix, _, number = task_id.rpartition("/")
    if dataset == "humaneval" and prefix == "Mbpp":
        raise ValueError(f"'{task_id}' is a problem of MBPP+; use task 'mbpp-plus', or HumanEval+'s file")
    if dataset == "mbpp" and prefix == "HumanEval":
        raise ValueError(f"'{task_id}' is a problem of HumanEval+; use task 'humaneval-plus', or MBPP+'s file")
    if dataset == "mbpp" and not (prefix == "Mbpp" and number.isdecimal()):
        raise ValueError(f"task_id '{task_id}' must be Mbpp/ and the problem's number, as in EvalPlus's file")


def _words_and_tests(prompt: str) -> tuple[str, str]:
    """MBPP+'s prompt is a docstring of the question and, on the last lines, an assertion."""
    words, start, tests = prompt.strip().strip('"').strip().partition("\nassert ")
    return words.strip(), (start + tests).strip()


NUMBER_COLUMNS = {"question": str, "answer": str}
CODE_COLUMNS = {"task_id": str, "prompt": str, "test": str, "entry_point": str}
PLUS_COLUMNS: dict[str, type | tuple[type, ...]] = {
    "task_id": str,
    "prompt": str,
    "entry_point": str,
    "canonical_solution": str,
    "base_input": list,
    "plus_input": (list, dict),
    "atol": (int, float),
}

_TASKS = (
    Task(
        name="gsm-mini",
        label="GSM-mini",
        columns=NUMBER_COLUMNS,
        rule="strict",
        problem=_number_problem,
        generate=GENERATED_TASKS["gsm-mini"].generate,
    ),
    Task(
        name="code-mini",
        label="Code-mini",
        columns=CODE_COLUMNS,
        rule="code",
        problem=_humaneval_problem,
        generate=GENERATED_TASKS["code-mini"].generate,
    ),
    Task(
        name="ledger-mini",
        label="Ledger-mini",
        columns=NUMBER_COLUMNS,
        rule="strict",
        problem=_number_problem,
        generate=GENERATED_TASKS["ledger-mini"].generate,
        max_tokens=192,
    ),
    Task(name="gsm8k", label="GSM8K", columns=NUMBER_COLUMNS, rule="flexible", problem=_number_problem),
    Task(
        name="gsm8k-cot",
        label="GSM8K-CoT",
        columns=NUMBER_COLUMNS,
        rule="flexible",
        problem=_number_problem,
        mark="The answer is",
    ),
    Task(
        name="math500",
        label="MATH500",
        columns={"problem": str, "answer": str},
        rule="math",
        problem=_math500_problem,
    ),
    Task(name="math", label="MATH", columns={"problem": str, "solution": str}, rule="math", problem=_math_problem),
    Task(name="humaneval", label="HumanEval", columns=CODE_COLUMNS, rule="code", problem=_humaneval_problem),
    Task(
        name="humaneval-plus",
        label="HumanEval+",
        columns=PLUS_COLUMNS,
        rule="plus",
        problem=_plus_problem("humaneval"),
        other_form="give EvalPlus's own HumanEvalPlus.jsonl.gz; task 'humaneval' takes the hub's "
        "evalplus/humanevalplus, whose column 'test' has all inputs",
    ),
    Task(
        name="mbpp",
        label="MBPP",
        columns={"task_id": (int, str), "test_list": list},
        rule="code",
        problem=_mbpp_problem,
    ),
    Task(
        name="mbpp-plus",
        label="MBPP+",
        columns=PLUS_COLUMNS,
        rule="plus",
        problem=_plus_problem("mbpp"),
        other_form="give EvalPlus's own MbppPlus.jsonl.gz; of the hub's evalplus/mbppplus task 'mbpp' runs MBPP's own "
        "tests, the column 'test_list'",
    ),
    Task(
        name=LIVE_CODE_BENCH,
        label="LiveCodeBench",
        columns=livecodebench.COLUMNS,
        rule="contest",
        problem=_contest_problem,
    ),
)
TASKS: dict[str, Task] = {task.name: task for task in _TASKS}


def _no_problem(problem_id: str, _row: dict[str, Any]) -> Problem:
    raise ValueError(f"{problem_id}: a task of lm-evaluation-harness is swept, by --tasks; it reads no rows of a file")


def runs_programs(task: Task) -> bool:
    """Whether a task's answers are programs."""
    return task.rule in ("code", "plus", "contest")


def find_task(name: str) -> Task:
    """The task with that name, which for LiveCodeBench may have a window of contest dates, as in
    `livecodebench:2024-08..2025-01`; `ValueError` lists the known names."""
    if name.startswith(f"{LIVE_CODE_BENCH}:"):
        dates = name.removeprefix(f"{LIVE_CODE_BENCH}:")
        is_asked = livecodebench.Window.parse(dates).holds
        return replace(TASKS[LIVE_CODE_BENCH], name=name, label=f"LiveCodeBench {dates}", is_asked=is_asked)
    if name.startswith(HARNESS_PREFIX):
        return Task(
            name=name, label=name.removeprefix(HARNESS_PREFIX), columns={}, rule="harness", problem=_no_problem
        )
    if name not in TASKS:
        raise ValueError(f"unknown task '{name}'; known: {', '.join(TASKS)}, and in sweeps {HARNESS_PREFIX}NAME")
    return TASKS[name]
