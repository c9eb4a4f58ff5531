"""Tables as values. A report is a list of them; Markdown and JSON are written here, HTML by a page's template."""

import json
import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Cell = object  # `None` is printed as a dash, a bool as yes or no
Text = str | list[str]  # a paragraph, or a list of items


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, its heading, and the texts around it.

    title    the heading, of level 2 or 3 (1: the document's own heading); "" for none
    lead     texts above the table
    see      the title of a table with more on the subject; a link leads there
    columns  the heads of the columns; empty if there are only texts
    numeric  the columns, by number, that are aligned right
    rows     a row of one cell is a heading of the rows below it
    notes    texts below the table
    folded   whether a page shows only the first text until a reader opens it
    brief    whether a terminal shows the table; the document has all tables
    """

    title: str = ""
    level: int = 2
    lead: Sequence[Text] = ()
    see: str = ""
    columns: Sequence[str] = ()
    numeric: Collection[int] = ()
    rows: Sequence[Sequence[Cell]] = ()
    notes: Sequence[Text] = ()
    folded: bool = False
    brief: bool = False

    @property
    def anchor(self) -> str:
        """The heading's address in a document, as GitHub forms it."""
        return anchor(self.title)

    def is_group(self, row: Sequence[Cell]) -> bool:
        """Whether a row is a heading of the rows below it."""
        return len(row) == 1 < len(self.columns)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The rows as JSON objects by head."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows if not self.is_group(row)]


def markdown(tables: Iterable[Table]) -> str:
    """The tables as Markdown, a blank line between their parts."""
    return "\n\n".join(part for table in tables for part in _parts(table)) + "\n"


def _parts(table: Table) -> Iterable[str]:
    if table.title:
        yield f"{'#' * table.level} {table.title}"
    yield from map(_text, table.lead)
    if table.see:
        yield f"See [{table.see}](#{anchor(table.see)})."
    if table.columns:
        yield "\n".join(_lines(table))
    yield from map(_text, table.notes)


def _text(text: Text) -> str:
    return text if isinstance(text, str) else "\n".join(f"- {one_line(item)}" for item in text)


def _lines(table: Table) -> Iterable[str]:
    yield _line(table.columns)
    yield "|" + "".join("---:|" if number in table.numeric else "---|" for number in range(len(table.columns)))
    for row in table.rows:
        yield _line([f"*{cell_text(row[0])}*", *[""] * (len(table.columns) - 1)] if table.is_group(row) else row)


def _line(cells: Iterable[Cell]) -> str:
    texts = (cell_text(cell).replace("|", "\\|") for cell in cells)
    return "|" + "".join(f" {text} |" if text else " |" for text in texts)


def cell_text(cell: Cell) -> str:
    """A cell as it is printed, on one line."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return one_line(str(cell))


def one_line(text: str) -> str:
    """A text with spaces for its line ends."""
    return " ".join(text.splitlines())


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def script_json(value: Any) -> str:
    """The value as JSON that can neither end a script element nor begin a comment in it, which only `<` could do."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


PAIRS = ("what", "value")
"""The columns of a table that is one object in JSON. In a terminal such a table has no heads."""


def plain(table: Table, *, width: int) -> str:
    """A table for a terminal: aligned columns; the last column is wrapped."""
    rows = [] if table.columns == PAIRS else [[str(head) for head in table.columns]]
    for row in table.rows:
        heads = ("", row[0]) if table.columns == PAIRS else table.columns
        rows.append([_shown(str(head), cell) for head, cell in zip(heads, row, strict=True)])
    widths = [max(len(row[at]) for row in rows) + 2 for at in range(len(table.columns) - 1)]
    lines = [table.title.upper()]
    for row in rows:
        start = "".join(f"{cell:<{size}}" for cell, size in zip(row, widths, strict=False))
        room = max(len(start) + 20, width)
        lines += textwrap.wrap(row[-1], room, initial_indent=start, subsequent_indent=" " * len(start)) or [start]
    return "\n".join(lines)


def _shown(name: str, cell: Cell) -> str:
    if "bytes" in name and type(cell) is int:
        return f"{cell / 2**30:,.2f} GiB" if cell >= 2**27 else f"{cell:,} bytes"
    if isinstance(cell, list):
        return ", ".join(map(str, cell)) or "none"
    return f"{cell:,}" if type(cell) is int else cell_text(cell)
