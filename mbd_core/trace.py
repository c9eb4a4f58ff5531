"""Step traces: one record a step and slot, in memory and as Parquet; everything else is computed from them."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mbd_core.types import StepTrace

SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("step", pa.int64()),
        ("slot", pa.int32()),
        ("block", pa.int32()),
        ("state", pa.string()),
        ("mask_ratio", pa.float64()),
        ("accepted", pa.int32()),
    ]
)


class TraceRecorder:
    """Collects the steps of an engine."""

    def __init__(self) -> None:
        self.rows: list[StepTrace] = []

    def extend(self, rows: Sequence[StepTrace]) -> None:
        self.rows.extend(rows)

    def write(self, path: Path) -> None:
        """Write all rows so far to a Parquet file, beside its place and then renamed."""
        columns = {f.name: [getattr(r, f.name) for r in self.rows] for f in fields(StepTrace)}
        beside = path.with_name(f".{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns, schema=SCHEMA), beside)
        beside.rename(path)


def read_trace(path: Path) -> list[StepTrace]:
    """The rows of a trace file."""
    return [StepTrace(**row) for row in pq.read_table(path, schema=SCHEMA).to_pylist()]
