"""Tasks whose answer is a number or an expression: GSM8K, MATH, and the generated tasks."""

import re
from typing import NotRequired, TypedDict

from mbd_core.evaluation.tasks.answers.marked_answers import (
    boxed,
    flexible_number,
    parse_number,
    same_number,
    strict_number,
)
from mbd_core.evaluation.tasks.answers.math_judge import MathAnswer, judge_answer
from mbd_core.evaluation.tasks.kinds.task import Grade, Grader, Problem, Task
from mbd_core.tasks.generated import GENERATED_TASKS


def _grade_generated(problem: Problem, text: str) -> Grade:
    """The number after `####` decides whether an answer is right; the flexible answer is the text's last number."""
    strict, flexible = strict_number(text), flexible_number(text)
    correct = same_number(strict, problem.reference)
    return Grade(
        correct=correct,
        reason="passed" if correct else "wrong",
        strict=strict,
        flexible=flexible,
        strict_correct=correct,
        flexible_correct=same_number(flexible, problem.reference),
    )


def _grade_stated(
    problem: Problem, text: str, *, strict: str | None, strict_correct: bool, failure: str = ""
) -> Grade:
    """The answer that the text states last (`stated_answers.py`) decides."""
    stated = judge_answer(problem.reference, text)
    failure = failure or stated.failure
    return Grade(
        correct=stated.correct,
        reason="passed" if stated.correct else "ungradable" if failure else "wrong",
        detail=failure,
        strict=strict,
        flexible=stated.answer,
        strict_correct=strict_correct,
        flexible_correct=stated.correct,
    )


def _grade_expression(problem: Problem, text: str) -> Grade:
    """The strict answer is the content of the last `\\boxed`."""
    strict = boxed(text)
    in_box = MathAnswer() if strict is None else judge_answer(problem.reference, f"\\boxed{{{strict}}}")
    return _grade_stated(problem, text, strict=strict, strict_correct=in_box.correct, failure=in_box.failure)


def _stated_number(mark: str) -> Grader:
    """Grades by the number that the text states last; the strict answer is the number after `mark`."""

    def judge(problem: Problem, text: str) -> Grade:
        strict = strict_number(text, mark)
        return _grade_stated(problem, text, strict=strict, strict_correct=same_number(strict, problem.reference))

    return Grader(rule="flexible", judge=judge, judgements=("strict", "flexible"), vote="flexible", mark=mark)


GENERATED_NUMBER = Grader(rule="strict", judge=_grade_generated, judgements=("strict", "flexible"), vote="strict")
EXPRESSION = Grader(rule="math", judge=_grade_expression, judgements=("strict", "flexible"), vote="flexible")


_DIGIT = re.compile(r"\d")


class NumberRow(TypedDict):
    """A question whose answer ends in `####` and a number."""

    question: str
    answer: str


class Math500Row(TypedDict):
    problem: str
    answer: str
    unique_id: NotRequired[str]


class MathRow(TypedDict):
    problem: str
    solution: str


def _number_problem(problem_id: str, row: NumberRow) -> Problem:
    _, mark, end = row["answer"].rpartition("####")
    line = end.strip().partition("\n")[0].strip()
    number = strict_number(mark + line)
    # other digits would be lost, as those of 1/2, 10^3, 1 000 and 3:30
    if number is None or parse_number(number) is None or _DIGIT.search(line.partition(number)[2]):
        raise ValueError(f"column 'answer' must end in '#### ' and a decimal number, not {line[:40]!r}")
    return Problem(problem_id=problem_id, prompt=row["question"], reference=number)


def _math500_problem(problem_id: str, row: Math500Row) -> Problem:
    if not row["answer"].strip():
        raise ValueError("column 'answer' must not be empty")
    return Problem(problem_id=str(row.get("unique_id") or problem_id), prompt=row["problem"], reference=row["answer"])


def _math_problem(problem_id: str, row: MathRow) -> Problem:
    answer = boxed(row["solution"])
    if answer is None:
        raise ValueError("column 'solution' must have its answer in \\boxed{...}")
    return Problem(problem_id=problem_id, prompt=row["problem"], reference=answer)


GSM_MINI = Task(
    name="gsm-mini",
    label="GSM-mini",
    row=NumberRow,
    problem=_number_problem,
    grader=GENERATED_NUMBER,
    generate=GENERATED_TASKS["gsm-mini"].generate,
)
LEDGER_MINI = Task(
    name="ledger-mini",
    label="Ledger-mini",
    row=NumberRow,
    problem=_number_problem,
    grader=GENERATED_NUMBER,
    generate=GENERATED_TASKS["ledger-mini"].generate,
    max_tokens=192,
)
GSM8K = Task(name="gsm8k", label="GSM8K", row=NumberRow, problem=_number_problem, grader=_stated_number("####"))
GSM8K_COT = Task(
    name="gsm8k-cot",
    label="GSM8K-CoT",
    row=NumberRow,
    problem=_number_problem,
    grader=_stated_number("The answer is"),
)
MATH500 = Task(
    name="math500",
    label="MATH500",
    row=Math500Row,
    problem=_math500_problem,
    grader=EXPRESSION,
)
MATH = Task(
    name="math",
    label="MATH",
    row=MathRow,
    problem=_math_problem,
    grader=EXPRESSION,
)
