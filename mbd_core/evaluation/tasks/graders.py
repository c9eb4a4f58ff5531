"""Grading one generated text: math by its value, code by the results of its calls.

A grade never raises for what a text holds: a text that breaks a grader is a wrong answer with the reason `ungradable`.
"""

import json
from dataclasses import dataclass
from typing import Literal

from mbd_core.evaluation.sandbox.processes import Limits
from mbd_core.evaluation.sandbox.program_text import extract_program
from mbd_core.evaluation.sandbox.programs import Reason as RunReason
from mbd_core.evaluation.sandbox.programs import run_tests
from mbd_core.evaluation.tasks.benchmarks import Problem, Task, runs_programs
from mbd_core.evaluation.tasks.evalplus import OracleFailure, judge_program
from mbd_core.evaluation.tasks.harness_tasks import harness_metrics, is_right
from mbd_core.evaluation.tasks.livecodebench import extract_code, judge_contest
from mbd_core.evaluation.tasks.math_answers import (
    boxed,
    flexible_number,
    judge_answer,
    same_number,
    strict_number,
)

Reason = RunReason | Literal["ungradable"]


@dataclass(frozen=True, kw_only=True)
class Grade:
    """Whether the text is right, and the reason; `correct` follows the task's rule.

    strict, flexible   math: both answers as found, and which are right
    base, plus         EvalPlus's tasks: whether the base inputs pass, and whether these and the plus inputs do
    """

    correct: bool
    reason: Reason
    detail: str = ""
    strict: str | None = None
    flexible: str | None = None
    strict_correct: bool | None = None
    flexible_correct: bool | None = None
    base_correct: bool | None = None
    plus_correct: bool | None = None


def grade(task: Task, problem: Problem, text: str, *, limits: Limits | None = None) -> Grade:
    """Grade `text` as the answer to `problem`. A math answer with no number in it is `wrong`."""
    try:
        if runs_programs(task):
            return grade_program(task, problem, program_of(task, problem, text), limits=limits)
        if task.rule == "harness":
            metrics = harness_metrics(task, problem, text)
            right = is_right(metrics)
            return Grade(correct=right, reason="passed" if right else "wrong", detail=json.dumps(metrics))
        return _grade_math(task, problem, text)
    except ImportError:
        raise
    except Exception as error:  # one text must not end a sweep, whatever it does to a parser
        return ungradable(error)


def ungradable(error: Exception) -> Grade:
    """The grade of an answer on which a grader, or its problem, broke."""
    return Grade(correct=False, reason="ungradable", detail=f"{type(error).__name__}: {error}"[:500])


def program_of(task: Task, problem: Problem, text: str) -> str:
    """The program in a text, as it is run and as EvalPlus's sample files hold it."""
    if task.rule == "contest":
        return extract_code(text)
    return extract_program(problem.prompt, problem.entry_point, text)


def grade_program(task: Task, problem: Problem, program: str, *, limits: Limits | None = None) -> Grade:
    """Grade a whole program, as it stands. `limits` are those of tests; the inputs of EvalPlus and LiveCodeBench
    bring their own."""
    if "\0" in program or not _is_utf8(program):
        return Grade(correct=False, reason="error", detail="the program is no text")
    if task.rule == "plus":
        try:
            program_verdict = judge_program(problem.reference, program)
        except OracleFailure as error:
            return Grade(correct=False, reason="ungradable", detail=str(error))
        return Grade(
            correct=program_verdict.plus,
            reason=program_verdict.verdict.reason,
            detail=program_verdict.verdict.detail,
            base_correct=program_verdict.base,
            plus_correct=program_verdict.plus,
        )
    if task.rule == "contest":
        verdict = judge_contest(problem.reference, program)
    else:
        tests = json.loads(problem.reference)
        verdict = run_tests(program, entry_point=problem.entry_point, limits=limits or Limits(), **tests)
    return Grade(correct=verdict.reason == "passed", reason=verdict.reason, detail=verdict.detail)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _grade_math(task: Task, problem: Problem, text: str) -> Grade:
    """Strict: the number after the task's mark, or for expressions what the last `\\boxed` holds. Flexible: the answer
    that the text states last (`stated_answers.py`); for the project's own tasks the last number."""
    failure = ""
    if task.rule == "math":
        strict, answer = boxed(text), None
        if strict is not None:
            answer = judge_answer(problem.reference, f"\\boxed{{{strict}}}")
            failure = answer.failure
        strict_correct = answer is not None and answer.correct
    else:
        strict = strict_number(text, task.mark)
        strict_correct = same_number(strict, problem.reference)
    if task.rule == "strict":
        flexible = flexible_number(text)
        flexible_correct = same_number(flexible, problem.reference)
    else:
        judgement = judge_answer(problem.reference, text)
        flexible, flexible_correct, failure = judgement.answer, judgement.correct, failure or judgement.failure
    correct = strict_correct if task.rule == "strict" else flexible_correct
    return Grade(
        correct=correct,
        reason="passed" if correct else "ungradable" if failure else "wrong",
        detail=failure,
        strict=strict,
        flexible=flexible,
        strict_correct=strict_correct,
        flexible_correct=flexible_correct,
    )
