"""Parts of a batch in the form in which Ray Data carries them. Grading processes import this file, without PyTorch."""

import pyarrow as pa

from mbd_core.batch.postprocess import Postprocess


def process_part(packed: pa.Table, postprocess: Postprocess) -> pa.Table:
    """Apply `postprocess` to a packed part."""
    number, decoded = unpack(packed)
    return pack(number, postprocess(decoded))


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
