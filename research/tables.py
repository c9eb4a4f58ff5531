"""A study's rows as they were kept, and a table of its report as lines of Markdown."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from mbd_core.fields import load
from mbd_core.row_files.rows import read_file
from mbd_core.tables import Cell, Table, markdown

T = TypeVar("T")


def rows_of(file: Path, kind: type[T]) -> list[T]:
    """The rows of a file of JSON lines. Raises `ValueError` that names the file, and the line of a bad row."""
    rows: list[T] = []
    for row in read_file(str(file)):
        try:
            rows.append(load(kind, row.values, noun="field"))
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from None
    return rows


def table_lines(heads: Sequence[str], rows: Iterable[Sequence[Cell]], *, num_text: int | None = None) -> list[str]:
    """The lines of a table. The first `num_text` columns hold text, the others numbers; without `num_text` all hold
    text."""
    numeric = range(len(heads) if num_text is None else num_text, len(heads))
    return markdown([Table(columns=heads, numeric=numeric, rows=[*rows])]).splitlines()
