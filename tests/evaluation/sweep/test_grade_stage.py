"""The grading stage: every row gets a grade, also one without a text."""

import json

import pyarrow as pa
import pytest
from sweep_rows import planned_samples

from mbd_core.batch.rows import DECODED_COLUMNS
from mbd_core.evaluation.sandbox.processes import available_isolation
from mbd_core.evaluation.sweep.grading.graded_rows import GRADED_COLUMNS, ISOLATION
from mbd_core.evaluation.sweep.grading.part_grading import grade_table
from mbd_core.evaluation.tasks.kinds.task import Grade, Problem, Task


def decoded(*texts: str | None) -> pa.Table:
    """Samples of one problem, whose answer is 4, with these texts."""
    rows = planned_samples(["m"], prompts=["2 + 2?"] * len(texts)).to_pylist()
    return pa.Table.from_pylist(
        [{**row, "problem_id": "p", "text": text} for row, text in zip(rows, texts, strict=True)],
        schema=DECODED_COLUMNS,
    )


def test_every_row_is_graded_and_one_without_a_text_is_wrong() -> None:
    table = grade_table(decoded("#### 4", "#### 5", None))
    assert table.schema == GRADED_COLUMNS
    rows = table.to_pylist()
    assert [row["correct"] for row in rows] == [True, False, False]
    assert [row["reason"] for row in rows] == ["passed", "wrong", "undecoded"]
    assert [row["strict"] for row in rows] == ["4", "5", None]


def test_a_part_says_how_its_programs_were_contained_where_any_ran() -> None:
    tests = json.dumps({"tests": "assert f() == 1"})
    rows = [{**row, "task": "code-mini", "reference": tests, "entry_point": "f"} for row in decoded("?").to_pylist()]
    ran = grade_table(pa.Table.from_pylist(rows, schema=DECODED_COLUMNS))
    assert ran.schema.metadata == {ISOLATION: available_isolation().encode()}
    unread = grade_table(pa.Table.from_pylist([{**row, "text": None} for row in rows], schema=DECODED_COLUMNS))
    assert not unread.schema.metadata and not grade_table(decoded("#### 4")).schema.metadata


def test_equal_texts_of_a_problem_are_graded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    grade = Task.grade

    def counting(task: Task, problem: Problem, text: str) -> Grade:
        texts.append(text)
        return grade(task, problem, text)

    monkeypatch.setattr(Task, "grade", counting)
    rows = grade_table(decoded("#### 4", "#### 5", "#### 4")).to_pylist()
    assert [row["correct"] for row in rows] == [True, False, True]
    assert texts == ["#### 4", "#### 5"]
