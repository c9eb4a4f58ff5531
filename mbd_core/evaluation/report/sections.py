"""The sections of a report's Markdown as data, for a page that shows the same tables and sentences.

Only what the report writes is known: headings of the second and third level, tables, lists of one level, and
paragraphs of one line. Emphasis marks the rows of a table that head a group of rows. Names are what users gave:
`table_line` and `one_line` write them so that no table or list ends in them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

HEADING, INNER, ITEM, LINE = "## ", "### ", "- ", "|"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table's heads, which of its columns hold numbers, and its rows; a row of one cell heads those below it."""

    heads: Sequence[str]
    numeric: Sequence[bool]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Block:
    """An inner heading, a paragraph, a list or a table: one of them."""

    heading: str | None = None
    text: str | None = None
    items: Sequence[str] | None = None
    table: Table | None = None


@dataclass(frozen=True)
class Section:
    heading: str
    blocks: list[Block] = field(default_factory=list)


def one_line(text: str) -> str:
    """A text with spaces for its line ends."""
    return " ".join(text.splitlines())


def table_line(cells: Iterable[object]) -> str:
    """A line of a table, with these texts in its cells whatever they hold."""
    return "| " + " | ".join(one_line(str(cell)).replace("|", "\\|") for cell in cells) + " |"


def markdown_sections(markdown: str) -> list[Section]:
    """The sections in their order; the first has the report's title."""
    sections: list[Section] = []
    lines = [*markdown.split("\n"), ""]
    at = 0
    while at < len(lines):
        line, start = lines[at], at
        at += 1
        if line.startswith(("# ", HEADING)):
            sections.append(Section(line.lstrip("# ")))
        elif line.startswith(INNER):
            sections[-1].blocks.append(Block(heading=line.removeprefix(INNER)))
        elif line.startswith(LINE):
            at = _end(lines, start, LINE)
            sections[-1].blocks.append(Block(table=_table(lines[start:at])))
        elif line.startswith(ITEM):
            at = _end(lines, start, ITEM)
            sections[-1].blocks.append(Block(items=[item.removeprefix(ITEM) for item in lines[start:at]]))
        elif line:
            sections[-1].blocks.append(Block(text=line))
    return sections


def _end(lines: Sequence[str], start: int, mark: str) -> int:
    """The first line from `start` on that does not begin with the mark."""
    return next(number for number in range(start, len(lines)) if not lines[number].startswith(mark))


def _table(lines: Sequence[str]) -> Table:
    heads, rule, *rows = (_cells(line) for line in lines)
    return Table(heads=heads, numeric=[cell.endswith(":") for cell in rule], rows=[_row(row) for row in rows])


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))
    return [cell.strip().replace("\\|", "|") for cell in cells]


def _row(cells: Sequence[str]) -> Sequence[str]:
    group = re.fullmatch(r"\*(.*)\*", cells[0])
    return cells if group is None or any(cells[1:]) else [group[1]]
