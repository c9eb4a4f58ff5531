"""A table of a study's report as lines of Markdown."""

from collections.abc import Iterable, Sequence

from mbd_core.evaluation.report.sections import table_line


def table_lines(heads: Sequence[str], rows: Iterable[Sequence[object]], *, num_text: int | None = None) -> list[str]:
    """The lines of a table whose first `num_text` columns hold text and the others numbers; without it, all text."""
    num_text = len(heads) if num_text is None else num_text
    rule = "|" + "---|" * num_text + "---:|" * (len(heads) - num_text)
    return [table_line(heads), rule, *map(table_line, rows)]
