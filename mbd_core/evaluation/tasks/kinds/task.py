"""A task: a benchmark's rows as problems, and how its answers are graded."""

import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mbd_core.evaluation.sandbox.programs import RunReason
from mbd_core.fields import members
from mbd_core.row_files.paths import NumberedRow

GradeReason = RunReason | Literal["ungradable"]
Judgement = Literal["strict", "flexible", "base", "plus"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem. `prompt` is the user's question. Its answers are graded by `reference`: the right number or
    expression, or a text that the task's grader packed.

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
class Grade:
    """Whether the text is right, and the reason; `correct` follows the task's rule.

    strict, flexible   math: both answers as found; `strict_correct` and `flexible_correct`: whether they are right
    base, plus         EvalPlus's tasks: whether the base inputs pass, and whether base and plus inputs pass
    """

    correct: bool
    reason: GradeReason
    detail: str = ""
    strict: str | None = None
    flexible: str | None = None
    strict_correct: bool | None = None
    flexible_correct: bool | None = None
    base_correct: bool | None = None
    plus_correct: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Programs:
    """How the programs among a benchmark's answers are read.

    extract      finds the program in an answer, from the problem and the answer's text
    completes    whether prompts are code, so that a sample may be a completion of one
    kinds        the kinds of a problem by which a report counts its samples
    sample_file  the file of whole programs that the benchmark's own evaluator takes
    """

    extract: Callable[[Problem, str], str]
    completes: bool = True
    kinds: Callable[[Problem], tuple[str, ...]] | None = None
    sample_file: str | None = None


@dataclass(frozen=True, kw_only=True)
class Grader:
    """How the answers of a task are graded.

    rule        the grader's name in records and reports
    judge       grades an answer: a text, or with `programs` the program in the text
    programs    for tasks whose answers are programs
    judgements  the fields of a grade beside `correct`
    vote        the answer that votes if a problem has several drawn answers; programs do not vote
    mark        the text before the answer of a worked solution; a few-shot example must have it
    """

    rule: str
    judge: Callable[[Problem, str], Grade]
    programs: Programs | None = None
    judgements: tuple[Judgement, ...] = ()
    vote: Literal["strict", "flexible"] | None = None
    mark: str | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark: its rows, how a row becomes a problem, and how an answer is graded.

    row         the `TypedDict` of a row; rows of a file may have further columns
    generate    draws rows; a task without it reads its rows from a file that the user names
    packaged    reads the rows that an installed package has, or the copy of them that the user names
    asks_calls  whether a problem's prompt is a chat with functions (`ToolChat`); answers are then in the form that the
                chat writes
    max_tokens  tokens of an answer to a generated problem, at most; for a file's problems the recipe has the limit
    is_asked    whether a row is one of the task's problems; other rows are skipped
    other_form  advice for rows that lack a column because they have another form of the benchmark
    """

    name: str
    label: str
    row: type
    problem: Callable[[str, Any], Problem]
    grader: Grader
    generate: Callable[..., Iterator[dict[str, str]]] | None = None
    packaged: Callable[[str | None], Iterator[NumberedRow]] | None = None
    asks_calls: bool = False
    max_tokens: int = 128
    is_asked: Callable[[Any], bool] = lambda _row: True
    other_form: str = ""

    @property
    def columns(self) -> Mapping[str, tuple[type, ...]]:
        """The columns that a row must have, and the types of their values."""
        return _columns(self.row)

    @property
    def benchmark(self) -> str:
        """The name without a window of dates, by which a recipe knows the task."""
        return self.name.partition(":")[0]

    @property
    def runs_programs(self) -> bool:
        """Whether answers are programs."""
        return self.grader.programs is not None

    def grade(self, problem: Problem, text: str) -> Grade:
        """Grade `text` as the answer to `problem`. A math answer with no number in it is `wrong`.

        A text that breaks the grader is a wrong answer with the reason `ungradable`: one text must not end a sweep.
        """
        try:
            if self.runs_programs:
                return self.grade_program(problem, self.program_in(problem, text))
            return self.grader.judge(problem, text)
        except ImportError:
            raise
        except Exception as error:
            return ungradable(error)

    def program_in(self, problem: Problem, text: str) -> str:
        """The program in a text, as it is run and as EvalPlus's sample files hold it."""
        assert self.grader.programs is not None
        return self.grader.programs.extract(problem, text)

    def grade_program(self, problem: Problem, program: str) -> Grade:
        """Grade a whole program, as it stands."""
        if "\0" in program or not _is_utf8(program):
            return Grade(correct=False, reason="error", detail="the program is no text")
        return self.grader.judge(problem, program)


@functools.cache
def _columns(row: Any) -> Mapping[str, tuple[type, ...]]:
    hints = {name: hint for name, hint in typing.get_type_hints(row).items() if name in row.__required_keys__}
    return {name: tuple(typing.get_origin(kind) or kind for kind in members(hint)) for name, hint in hints.items()}


def ungradable(error: Exception) -> Grade:
    """The grade of an answer on which a grader, or its problem, broke."""
    return Grade(correct=False, reason="ungradable", detail=f"{type(error).__name__}: {error}"[:500])


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
