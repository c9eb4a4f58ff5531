"""Rows of Parquet and Arrow.

A struct of Arrow has the fields of all rows, and null where a row lacks a field. So null fields of structs are left
out, and the rows equal those of JSON lines with the same data.
"""

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mbd_core.json_text import parse_json

ROWS_AT_ONCE = 256
"""The number of a table's rows that are Python objects at once. It does not depend on the table's batches."""
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"  # the first bytes of files of tables

ToJson = Callable[[Any], Any]


def table_rows(file: Any, head: bytes) -> Iterator[dict[str, Any]]:
    """The rows of a table in an unpacked file, whose first bytes are `head`.

    Raises `pa.ArrowInvalid` for a table of which two columns, or two fields of a struct, have one name.
    """
    if not file.seekable():
        file = io.BytesIO(file.read())
    for batch in _batches(file, head):
        check_names("its columns", batch.schema)
        columns = {field.name: convert for field in batch.schema if (convert := _conversion(field.type))}
        for start in range(0, len(batch), ROWS_AT_ONCE):
            for row in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                yield row | {column: columns[column](row[column]) for column in columns}


def _batches(file: Any, head: bytes) -> Iterator[pa.RecordBatch]:
    """The batches of a file in Parquet, in Arrow's file format, or in its stream format, as Hugging Face's data
    sets."""
    if head.startswith(PARQUET):
        yield from pq.ParquetFile(file).iter_batches(ROWS_AT_ONCE)
    elif head.startswith(ARROW_FILE):
        reader = pa.ipc.open_file(file)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(file)


def check_names(what: str, fields: Iterable[pa.Field]) -> None:
    """Raises `pa.ArrowInvalid` if a name stands twice: a row as an object would keep one of the values."""
    names = [field.name for field in fields]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise pa.ArrowInvalid(f"{what} have the name {twice[0]!r} twice; rename one of them")


def _conversion(kind: pa.DataType) -> ToJson | None:
    """The function from a value of this Arrow type to the value that JSON has for it; `None` if both are the same."""
    if pa.types.is_struct(kind):
        check_names("fields of one of its structs", kind)
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
