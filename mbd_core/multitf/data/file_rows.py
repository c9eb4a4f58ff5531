"""Rows of a user's files: JSON lines, JSON lists, Parquet and Arrow, one after another, each row with its name.

A struct of Arrow has every field that any row has, and null where its own row had none. So null fields of structs are
left out: the rows are those that JSON lines of the same data have.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from mbd_core.json_text import parse_json
from mbd_core.multitf.data.data_files import JSON_LINES, reading

ROWS_AT_ONCE = 256
"""Of a table so many rows are Python objects at once, whatever its batches are."""

Row = tuple[str, Mapping[str, Any]]


def read_rows(files: Sequence[str], *, bad: Callable[[str, str], None] | None = None) -> Iterator[Row]:
    """Every row of the files with its name, as `data.jsonl line 3` or `data.parquet row 3`.

    Raises `ValueError` naming the file, and the line where there is one, that cannot be read. With `bad`, which takes
    its name and the reason, a line that is no row is passed to it instead.
    """
    for path in files:
        name = path.rpartition("/")[2]
        with reading(path):
            if name.endswith(JSON_LINES):
                yield from _json_lines(path, name, bad)
            elif name.endswith(".json"):
                yield from _json_list(path, name)
            else:
                yield from _tables(path, name)


def _json_lines(path: str, name: str, bad: Callable[[str, str], None] | None) -> Iterator[Row]:
    with fsspec.open(path, "rb", compression="infer") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            source = f"{path} line {number}"
            try:
                row = _object(line, source)
            except ValueError as error:
                if bad is None:
                    raise
                bad(f"{name} line {number}", str(error).removeprefix(source).strip())
                continue
            yield f"{name} line {number}", row


def _json_list(path: str, name: str) -> Iterator[Row]:
    with fsspec.open(path, "rb") as file:
        content = file.read()
    try:
        rows = parse_json(content, path, unique=True)
    except ValueError as error:
        raise ValueError(f"{error}; rows one a line are a .jsonl file") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} must be a list of objects")
    yield from ((f"{name} row {number}", row) for number, row in enumerate(rows, start=1))


def _object(line: bytes, source: str) -> Mapping[str, Any]:
    row = parse_json(line, source, unique=True)
    if not isinstance(row, dict):
        raise ValueError(f"{source} must be a JSON object")
    return row


def _tables(path: str, name: str) -> Iterator[Row]:
    with fsspec.open(path, "rb") as file:
        number = 0
        for batch in (
            pq.ParquetFile(file).iter_batches(ROWS_AT_ONCE) if path.endswith(".parquet") else _arrow_batches(file)
        ):
            columns = {field.name: convert for field in batch.schema if (convert := _conversion(field.type))}
            for start in range(0, len(batch), ROWS_AT_ONCE):
                for row in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                    number += 1
                    yield f"{name} row {number}", row | {column: columns[column](row[column]) for column in columns}


def _arrow_batches(file: Any) -> Iterator[pa.RecordBatch]:
    """Arrow's stream format, which Hugging Face datasets have, or its file format."""
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_file:
        yield from pa.ipc.open_stream(file)
        return
    reader = pa.ipc.open_file(file)
    yield from (reader.get_batch(i) for i in range(reader.num_record_batches))


Conversion = Callable[[Any], Any]


def _conversion(kind: pa.DataType) -> Conversion | None:
    """What makes the value that JSON would have of a value of this Arrow type; `None`: it is that already."""
    if pa.types.is_struct(kind):
        fields = {field.name: _conversion(field.type) for field in kind}
        return lambda value: (
            value
            and {
                name: fields[name](part) if fields[name] else part  # type: ignore[misc]
                for name, part in value.items()
                if part is not None
            }
        )
    if pa.types.is_map(kind):
        of_value = _conversion(kind.item_type) or (lambda part: part)
        return lambda value: None if value is None else {name: of_value(part) for name, part in value}
    if hasattr(kind, "value_type") and not pa.types.is_dictionary(kind):  # lists of all kinds
        of_item = _conversion(kind.value_type)
        return None if of_item is None else lambda value: value and [of_item(part) for part in value]
    if isinstance(kind, pa.JsonType):  # `Json()` of Hugging Face's datasets: each value is a JSON text
        return lambda value: None if value is None else parse_json(value, "a value of the type JSON")
    return None
