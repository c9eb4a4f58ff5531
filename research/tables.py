"""A table of a study's report as lines of Markdown."""

from collections.abc import Iterable, Sequence

from mbd_core.tables import Cell, Table, markdown


def table_lines(heads: Sequence[str], rows: Iterable[Sequence[Cell]], *, num_text: int | None = None) -> list[str]:
    """The lines of a table. The first `num_text` columns hold text, the others numbers; without `num_text` all hold
    text."""
    numeric = range(len(heads) if num_text is None else num_text, len(heads))
    return markdown([Table(columns=heads, numeric=numeric, rows=[*rows])]).splitlines()
