"""Grading of rows, the second stage of a sweep: every decoded row of a table is graded."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa

from mbd_core.batch.rows import PROBLEM_COLUMNS
from mbd_core.evaluation.sandbox.processes import available_isolation, describe_isolation
from mbd_core.evaluation.sweep.grading.graded_rows import ISOLATION, VOTE, graded_schema
from mbd_core.evaluation.tasks.answers.math_judge import same_answer
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.kinds.task import Grade, Problem


def grade_table(table: pa.Table, *, isolated: bool = False) -> pa.Table:
    """The table (`DECODED_COLUMNS`) with grades (`GRADED_COLUMNS`). A row without text is wrong (`undecoded`).

    Several configurations often give the same text for a problem, so each such text is graded once. If programs were
    run, the metadata says how this machine contained them (`ISOLATION`). With `isolated`, raises `ValueError` for
    programs on a machine that has neither bubblewrap nor Landlock.
    """
    rows = table.to_pylist()
    if isolated and any(find_task(task).runs_programs for task in {row["task"] for row in rows}):
        describe_isolation("required")
    grades: dict[tuple[str, str, str], Grade] = {}
    for row in rows:
        if row["text"] is None:
            row.update(correct=False, reason="undecoded")
            continue
        key = (row["task"], row["problem_id"], row["text"])
        if key not in grades:
            problem = Problem(**{name: row[name] for name in PROBLEM_COLUMNS})
            grades[key] = find_task(row["task"]).grade(problem, row["text"])
        row.update(asdict(grades[key]))
    table_of_grades = with_votes(pa.Table.from_pylist(rows, schema=graded_schema(rows)))
    if not any(find_task(task).runs_programs for task, *_ in grades):
        return table_of_grades
    return table_of_grades.replace_schema_metadata({ISOLATION: available_isolation()})


def with_votes(samples: pa.Table) -> pa.Table:
    """Graded rows with votes. The vote of a math answer is the first answer, to the same problem by the same
    configuration, that the task's grader accepts as equal. Rows of a sweep that draws no tokens stay as they are."""
    if VOTE.name not in samples.schema.names:
        return samples
    rows = samples.to_pylist()
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        task = find_task(row["task"])
        answer = None if task.grader.vote is None else row[task.grader.vote]
        answers = groups.setdefault(
            tuple(row[name] for name in ("model", "method", "config", "task", "problem_id")), []
        )
        row["vote"] = (
            None
            if answer is None
            else next((known_answer for known_answer in answers if same_answer(known_answer, answer)), answer)
        )
        if answer is not None and row["vote"] not in answers:
            answers.append(answer)
    return pa.Table.from_pylist(rows, schema=samples.schema)


@dataclass(frozen=True)
class Grading:
    """A batch's `Postprocess`: `grade_table` on each decoded table."""

    isolated: bool = False

    def __call__(self, table: pa.Table) -> pa.Table:
        return grade_table(table, isolated=self.isolated)

    def join(self, tables: Sequence[pa.Table]) -> pa.Table:
        """The samples of a part, with new votes and the isolation of its graded tables."""
        metadata = next((table.schema.metadata for table in tables if table.schema.metadata), None)
        return with_votes(pa.concat_tables(tables)).replace_schema_metadata(metadata)
