"""Parts of a sweep as Ray Data carries them, and their grading. Processes that grade import this, without PyTorch."""

import pyarrow as pa

from mbd_core.evaluation.sandbox.processes import describe_isolation
from mbd_core.evaluation.sweep.grading import grade_table
from mbd_core.evaluation.tasks.benchmarks import find_task, runs_programs


def grade_part(packed: pa.Table) -> pa.Table:
    """`grade_table` on a packed part."""
    number, decoded = unpack(packed)
    return pack(number, grade_table(decoded))


def grade_isolated_part(packed: pa.Table) -> pa.Table:
    """`grade_part` on a machine that contains programs; `ValueError` on another one, for parts with programs."""
    _, decoded = unpack(packed)
    if any(runs_programs(find_task(task)) for task in set(decoded["task"].to_pylist())):
        describe_isolation("required")
    return grade_part(packed)


def pack(number: int, table: pa.Table) -> pa.Table:
    """A part in one row: its number, and its table in Arrow's format for streams."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    columns = {"part": pa.array([number]), "table": pa.array([sink.getvalue().to_pybytes()], pa.large_binary())}
    return pa.table(columns)


def unpack(packed: pa.Table) -> tuple[int, pa.Table]:
    """The number and the table of a packed part."""
    (row,) = packed.to_pylist()
    return row["part"], pa.ipc.open_stream(row["table"]).read_all()
