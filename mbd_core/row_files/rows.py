"""Rows of one data file in the formats of hubs: JSON lines, a JSON list, Parquet, Arrow; plain or compressed.

The content decides the format. The name decides only if the content is ambiguous: a file named `.jsonl` has one row
per line, whatever its first line is.
"""

import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mbd_core.json_text import parse_json
from mbd_core.row_files.opening import one_sentence, opened
from mbd_core.row_files.tables import ARROW_FILE, ARROW_STREAM, PARQUET, table_rows

FORMATS = "JSON lines, a JSON list, Parquet or Arrow, plain or compressed"
ENDINGS = ("", ".gz", ".bz2", ".xz", ".zst")
JSON_LINES = tuple(suffix + ending for suffix in (".jsonl", ".ndjson") for ending in ENDINGS)
SUFFIXES = (*JSON_LINES, *(suffix + ending for suffix in (".json", ".parquet", ".arrow") for ending in ENDINGS))
"""The suffixes of files of rows in a folder."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")

NoteBad = Callable[[str, str], None]
"""A function that takes the place of a malformed row and the reason."""


@dataclass(frozen=True)
class FileRow:
    """A row of a file: a line, or a row of a list or a table. `number` counts from 1; blank lines count too."""

    path: str
    unit: Literal["line", "row"]
    number: int
    values: dict[str, Any]

    @property
    def place(self) -> str:
        """The row's place, for a sentence."""
        return f"{self.path}, {self.unit} {self.number}"

    @property
    def name(self) -> str:
        """The row's name among the rows of one data set."""
        return row_name(self.path, self.unit, self.number)


def row_name(path: str, unit: str, number: int) -> str:
    return f"{path.rpartition('/')[2]} {unit} {number}"


def read_file(path: str, *, unique: bool = False, bad: NoteBad | None = None) -> Iterator[FileRow]:
    """The rows of a file, here or at a URL that fsspec knows.

    With `unique`, an object that gives a name two different values is malformed. Malformed rows go to `bad`, if given.
    Raises `ValueError`, one sentence, for an unreadable file and for a malformed row, and names the remedy for an
    unknown format.
    """
    with one_sentence(path), opened(path) as (file, head):
        text = head.removeprefix(BYTE_ORDER_MARK).lstrip()
        reader = _JsonReader(path, unique=unique, bad=bad)
        if head.startswith((PARQUET, ARROW_FILE, ARROW_STREAM)):
            for number, row in enumerate(table_rows(file, head), start=1):
                yield FileRow(path, "row", number, row)
        elif (remedy := _known_other_format(head, text)) is not None:
            raise ValueError(f"{path} {remedy}")
        elif text.startswith(b"["):
            yield from reader.list_rows(file)
        elif text.startswith(b"{") or not text or path.endswith(JSON_LINES):
            yield from reader.lines(file)
        else:
            command = "read_table" if path.endswith(".tsv") else "read_csv"
            raise ValueError(
                f"{path} is in another format than those that are read: {FORMATS}; convert it, a table of text with: "
                f"python -c \"import pandas; pandas.{command}('FILE').to_parquet('rows.parquet')\""
            )


def _known_other_format(head: bytes, text: bytes) -> str | None:
    """What a file without rows is, and the remedy; `None` if the file may hold rows."""
    if head.startswith(UTF_16):
        return "is text in UTF-16, and UTF-8 is read; convert it with: iconv -f UTF-16 -t UTF-8 FILE > rows.jsonl"
    if text.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, not the file itself; fetch it with: git lfs pull"
    if text.startswith(b"<"):
        return "is a web page, not a data file; download the file itself, on a hub by its address with /resolve/"
    if text.startswith(b"PK\x03\x04"):
        return f"is a zip archive; unpack it, and name the file in it ({FORMATS})"
    return None


class _JsonReader:
    """Reads the rows of a file of JSON."""

    def __init__(self, path: str, *, unique: bool, bad: NoteBad | None) -> None:
        self.path, self._unique, self._bad = path, unique, bad

    def lines(self, file: Any) -> Iterator[FileRow]:
        """The rows of lines that are not blank; an object that fills the whole file is one row."""
        first, number = b"", 0
        for first in iter(file.readline, b""):
            number += 1
            if first.strip():
                break
        if first.count(b"{") > first.count(b"}"):  # an object may go on in the next lines
            content = file.read()
            try:
                whole = parse_json(first + content, self.path, unique=self._unique)
            except ValueError:
                file = io.BytesIO(content)
            else:
                yield from self._row(whole, "line", number)
                return
        for line_number, line in enumerate(itertools.chain((first,), file), start=number):
            if line.strip():
                yield from self._line(line, line_number)

    def list_rows(self, file: Any) -> Iterator[FileRow]:
        content = file.read()
        try:
            rows = parse_json(content, self.path, unique=self._unique)
        except ValueError:
            if not self.path.endswith(JSON_LINES):
                raise
            yield from self.lines(io.BytesIO(content))
            return
        for number, row in enumerate(rows, start=1):
            yield from self._row(row, "row", number)

    def _line(self, line: bytes, number: int) -> Iterator[FileRow]:
        subject = f"{self.path}, line {number}: it"
        try:
            row = parse_json(line, subject, unique=self._unique)
        except ValueError as error:
            if self._bad is None:
                raise
            self._bad(row_name(self.path, "line", number), str(error).removeprefix(subject).strip())
        else:
            yield from self._row(row, "line", number)

    def _row(self, row: Any, unit: Literal["line", "row"], number: int) -> Iterator[FileRow]:
        reason = f"a {type(row).__name__}, not a JSON object"
        if isinstance(row, dict):
            yield FileRow(self.path, unit, number, row)
        elif self._bad is None:
            raise ValueError(f"{self.path}, {unit} {number}: {reason}")
        else:
            self._bad(row_name(self.path, unit, number), reason)
