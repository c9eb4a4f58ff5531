"""Grading one generated text: exact numbers for math, executed tests for code."""

from dataclasses import dataclass

from mbd_core.evaluation.extraction import flexible_number, same_number, strict_number
from mbd_core.evaluation.sandbox import Limits, Reason, run_tests
from mbd_core.evaluation.tasks import Problem, Task


@dataclass(frozen=True, kw_only=True)
class Grade:
    """Whether the text is right, and the reason. For math also both extractions, as written, and which are right;
    `correct` follows the task's rule."""

    correct: bool
    reason: Reason
    detail: str = ""
    strict: str | None = None
    flexible: str | None = None
    strict_correct: bool | None = None
    flexible_correct: bool | None = None


def grade(task: Task, problem: Problem, text: str, *, limits: Limits | None = None) -> Grade:
    """Grade `text` as the answer to `problem`. Code is the prompt's stub with `text` after it, run in a process of
    its own; a math answer with no number in it is `wrong`."""
    if task.rule == "code":
        verdict = run_tests(
            problem.prompt + text, test=problem.reference, entry_point=problem.entry_point, limits=limits or Limits()
        )
        return Grade(correct=verdict.reason == "passed", reason=verdict.reason, detail=verdict.detail)
    strict, flexible = strict_number(text), flexible_number(text)
    strict_correct = same_number(strict, problem.reference)
    flexible_correct = same_number(flexible, problem.reference)
    correct = strict_correct if task.rule == "strict" else flexible_correct
    return Grade(
        correct=correct,
        reason="passed" if correct else "wrong",
        strict=strict,
        flexible=flexible,
        strict_correct=strict_correct,
        flexible_correct=flexible_correct,
    )
