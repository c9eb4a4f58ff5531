"""The second stage of a sweep: every decoded row of a table is graded."""

from dataclasses import asdict

import pyarrow as pa

from mbd_core.evaluation.graders import Grade, grade
from mbd_core.evaluation.sample_tables import GRADED_COLUMNS, ISOLATION, PROBLEM_COLUMNS
from mbd_core.evaluation.sandbox import available_isolation
from mbd_core.evaluation.tasks import Problem, find_task, runs_programs


def grade_table(table: pa.Table) -> pa.Table:
    """The table (`DECODED_COLUMNS`) with grades (`GRADED_COLUMNS`). A row without text is wrong (`undecoded`).

    Several configurations often give the same text for a problem, so each such text is graded once. Where programs
    were run, the metadata says how this machine contained them (`ISOLATION`).
    """
    rows = table.to_pylist()
    grades: dict[tuple[str, str, str], Grade] = {}
    for row in rows:
        if row["text"] is None:
            row.update(correct=False, reason="undecoded")
            continue
        key = (row["task"], row["problem_id"], row["text"])
        if key not in grades:
            problem = Problem(**{name: row[name] for name in PROBLEM_COLUMNS})
            grades[key] = grade(find_task(row["task"]), problem, row["text"])
        row.update(asdict(grades[key]))
    graded = pa.Table.from_pylist(rows, schema=GRADED_COLUMNS)
    if not any(runs_programs(find_task(task)) for task, *_ in grades):
        return graded
    return graded.replace_schema_metadata({ISOLATION: available_isolation()})
