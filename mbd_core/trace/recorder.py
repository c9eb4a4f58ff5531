"""Step traces: one row for each step and slot, recorded by column and written as Parquet.

A trace is one file, or a folder of part files (`part-00000000.parquet`, ...) that a long-running engine rotates. DUMMY
slots are written too, because they record N_buf; compressed, they take almost no space.

Shape legend: n sequences that decode in a step, N slots, B block size.
"""

import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mbd_core.decoding.answers.slots import CANVAS_STATE, SlotState, StepTrace
from mbd_core.files import file_beside

STATES = (*(state.name for state in SlotState), CANVAS_STATE)
SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("step", pa.int64()),
        ("slot", pa.int32()),
        ("block", pa.int32()),
        ("state", pa.string()),
        ("mask_ratio", pa.float64()),
        ("accepted", pa.int32()),
        ("edited", pa.int32()),
        ("judged", pa.int32()),
        ("confirmed", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("confidences", pa.list_(pa.float32())),
        ("draft", pa.list_(pa.int32())),
    ]
)
SINCE_ADDED = ("judged", "confirmed", "draft")
"""Columns that traces of earlier versions lack. Those versions verified no drafts."""
PART = re.compile(r"part-(\d{8})\.parquet")
BLOCK_SIZE_KEY = b"block_size"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Step:
    step: int
    request_ids: list[str]
    first_blocks: list[int]
    states_nN: np.ndarray
    mask_ratios_nN: np.ndarray
    accepted_nN: np.ndarray
    edited_nN: np.ndarray
    tokens_nNB: np.ndarray | None
    confidences_nNB: np.ndarray | None


class TraceRecorder:
    """Collects the steps of an engine; a decode step costs only the copies of a few small arrays.

    Without `folder` all rows stay in memory until `write`. With a folder, every `rows_per_file` rows become a part
    file and the oldest parts beyond `max_files` are deleted, so that memory and disk are bounded; `close` writes the
    last, shorter part. Existing parts count towards `max_files`. Only one recorder may use a folder at a time. A part
    that cannot be written is lost and an error is logged: a full disk must not end the requests being served.

    With `detail` the engine also records tokens and confidences. `block_size` is B, and is written into the file; with
    detail the length of the tokens shows it. Raises `ValueError` for sizes below 1.
    """

    def __init__(
        self,
        detail: bool = False,
        *,
        block_size: int | None = None,
        folder: Path | None = None,
        rows_per_file: int = 100_000,
        max_files: int = 16,
    ) -> None:
        for name, value in (("rows_per_file", rows_per_file), ("max_files", max_files)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.detail, self.block_size = detail, block_size
        self._folder, self._rows_per_file, self._max_files = folder, rows_per_file, max_files
        self._next_part = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._next_part = max((_part_number(p) for p in _parts(folder)), default=-1) + 1
        self._tables: list[pa.Table] = []
        self._steps: list[_Step | StepTrace] = []
        self._num_rows = 0

    def add(
        self,
        step: int,
        request_ids: list[str],
        first_blocks: list[int],
        states: np.ndarray,
        mask_ratios: np.ndarray,
        accepted: np.ndarray,
        edited: np.ndarray,
        tokens: np.ndarray | None,
        confidences: np.ndarray | None,
    ) -> None:
        """Append one step of n sequences. Arrays are copied, so the caller may reuse them.

        states       (n, N) int, `SlotState` in the forward
        mask_ratios  (n, N) float, before the forward; accepted, edited: (n, N) int, counts of this step
        tokens       (n, N, B) int after the step, -1 = masked; confidences (n, N, B); both `None` without `detail`
        """
        assert (tokens is not None) == (confidences is not None) == self.detail
        self._steps.append(
            _Step(
                step,
                list(request_ids),
                list(first_blocks),
                np.array(states, dtype=np.int8),
                np.array(mask_ratios, dtype=np.float64),
                np.array(accepted, dtype=np.int32),
                np.array(edited, dtype=np.int32),
                None if tokens is None else np.array(tokens, dtype=np.int32),
                None if confidences is None else np.array(confidences, dtype=np.float32),
            )
        )
        self._grow(states.size)

    def extend(self, rows: Sequence[StepTrace]) -> None:
        """Append rows of decoders that plan their rows, in their order."""
        self._steps += rows
        self._grow(len(rows))

    @property
    def rows(self) -> list[StepTrace]:
        """The rows in memory, in order; with a folder, the rows without a part file."""
        return _to_rows(self.table())

    def table(self) -> pa.Table:
        """The rows in memory as one Arrow table of `SCHEMA`."""
        self._fold()
        table = pa.concat_tables(self._tables or [SCHEMA.empty_table()])
        size = self.block_size
        return table.replace_schema_metadata({BLOCK_SIZE_KEY: str(size)} if size is not None else None)

    def write(self, path: Path) -> None:
        """Write the rows in memory to a temporary Parquet file, then rename it to `path`."""
        with file_beside(path) as new_file:
            pq.write_table(self.table(), new_file, compression="zstd")

    def close(self) -> None:
        """With a folder, write the remaining rows as its last part."""
        if self._folder is not None and self._num_rows:
            self._rotate()

    def _fold(self) -> None:
        for is_row, run in itertools.groupby(self._steps, lambda s: isinstance(s, StepTrace)):
            steps: list[Any] = list(run)
            self._tables.append(_from_rows(steps) if is_row else _to_table(steps))
        self._steps = []

    def _grow(self, num_rows: int) -> None:
        self._num_rows += num_rows
        if self._folder is not None and self._num_rows >= self._rows_per_file:
            self._rotate()

    def _rotate(self) -> None:
        assert self._folder is not None
        try:
            self.write(self._folder / f"part-{self._next_part:08d}.parquet")
            self._next_part += 1
            for part in _parts(self._folder)[: -self._max_files]:
                part.unlink(missing_ok=True)
        except OSError as error:
            log.error("%d trace rows are lost, %s cannot be written: %s", self._num_rows, self._folder, error)
        self._tables, self._steps, self._num_rows = [], [], 0


def read_trace(path: Path) -> list[StepTrace]:
    """The rows of a trace file or of a folder of parts; raises the errors of `read_trace_table`."""
    return _to_rows(read_trace_table(path))


def read_trace_table(path: Path) -> pa.Table:
    """A trace as an Arrow table of `SCHEMA`, parts in their order; `trace_block_size` finds its block size.

    If the first part of a folder was deleted, the table may begin in the middle of requests: requests in its first
    step are left out. Raises `ValueError`, one sentence, if the trace is missing, not Parquet, or has other columns.
    """
    if not path.exists():
        raise ValueError(f"{path}: there is no such trace file or folder")
    if not path.is_dir():
        return _read_file(path)
    parts = _parts(path)
    if not parts:
        raise ValueError(f"{path}: the folder holds no trace parts (part-00000000.parquet and so on)")
    tables = [_read_file(p) for p in parts]
    table = pa.concat_tables([t.replace_schema_metadata(tables[0].schema.metadata) for t in tables])
    if _part_number(parts[0]) == 0 or not len(table):
        return table
    ids, steps = table["request_id"].to_numpy(zero_copy_only=False), table["step"].to_numpy()
    return table.filter(pa.array(~np.isin(ids, np.unique(ids[steps == steps[0]]))))


def trace_block_size(table: pa.Table) -> int | None:
    """B of a trace: from the length of its tokens, else from the recorder's `block_size`, else `None`."""
    tokens = table["tokens"].drop_null()
    if len(tokens):
        return len(tokens[0])
    size = (table.schema.metadata or {}).get(BLOCK_SIZE_KEY)
    return int(size) if size is not None else None


def _read_file(path: Path) -> pa.Table:
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: this is not a Parquet file, so not a trace") from error
    for name in SINCE_ADDED:
        if name not in table.column_names:
            field = SCHEMA.field(name)
            empty = (
                pa.nulls(len(table), field.type)
                if name == "draft"
                else pa.repeat(pa.scalar(0, field.type), len(table))
            )
            table = table.append_column(field, empty)
    for field in SCHEMA:
        if field.name not in table.column_names:
            raise ValueError(f"{path}: column '{field.name}' is missing, so this is not a step trace")
        kind = table.schema.field(field.name).type
        if kind != field.type:
            raise ValueError(f"{path}: column '{field.name}' is {kind}; in a step trace it is {field.type}")
    return table.select(SCHEMA.names)


def _parts(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if PART.fullmatch(p.name))


def _part_number(path: Path) -> int:
    return int(path.stem.removeprefix("part-"))


def _from_rows(rows: list[StepTrace]) -> pa.Table:
    return pa.table({f.name: [getattr(r, f.name) for r in rows] for f in fields(StepTrace)}, schema=SCHEMA)


def _to_table(steps: list[_Step]) -> pa.Table:
    """Rows ordered by step, sequence, slot."""
    num_slots = np.concatenate([np.full(len(s.request_ids), s.states_nN.shape[1]) for s in steps])
    sequence = np.repeat(np.arange(len(num_slots)), num_slots)
    slot = np.arange(len(sequence)) - np.repeat(np.cumsum(num_slots) - num_slots, num_slots)
    first = np.concatenate([np.asarray(s.first_blocks, dtype=np.int32) for s in steps])[sequence]
    columns: dict[str, Any] = {
        "request_id": pa.array([r for s in steps for r in s.request_ids], pa.string()).take(sequence),
        "step": np.repeat([s.step for s in steps], [s.states_nN.size for s in steps]),
        "slot": slot.astype(np.int32),
        "block": (first + slot).astype(np.int32),
        "state": pa.array(STATES).take(np.concatenate([s.states_nN.ravel() for s in steps])),
        "mask_ratio": np.concatenate([s.mask_ratios_nN.ravel() for s in steps]),
        "accepted": np.concatenate([s.accepted_nN.ravel() for s in steps]),
        "edited": np.concatenate([s.edited_nN.ravel() for s in steps]),
        "judged": np.zeros(len(sequence), dtype=np.int32),
        "confirmed": np.zeros(len(sequence), dtype=np.int32),
        "tokens": _list_column([s.tokens_nNB for s in steps], len(sequence), SCHEMA.field("tokens").type),
        "confidences": _list_column(
            [s.confidences_nNB for s in steps], len(sequence), SCHEMA.field("confidences").type
        ),
        "draft": pa.nulls(len(sequence), SCHEMA.field("draft").type),
    }
    return pa.table(columns, schema=SCHEMA)


def _list_column(arrays: list[np.ndarray | None], num_rows: int, kind: pa.DataType) -> pa.Array:
    blocks = [a for a in arrays if a is not None]
    if not blocks:
        return pa.nulls(num_rows, kind)
    lengths = np.concatenate([np.full(a.shape[0] * a.shape[1], a.shape[2]) for a in blocks])
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([a.ravel() for a in blocks])))


def _to_rows(table: pa.Table) -> list[StepTrace]:
    def whole(row: dict[str, Any]) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}

    return [StepTrace(**whole(row)) for row in table.to_pylist()]
