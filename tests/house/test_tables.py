"""A table's views: Markdown whatever its cells hold, and rows as JSON."""

from mbd_core.tables import Table, markdown

TABLE = Table(
    title="Numbers",
    lead=("What they are:", ["one", "two\nlines"]),
    see="Other numbers",
    columns=("", "n", "ok"),
    numeric=(1,),
    rows=[["a group"], ["a|b\nc", 1.5, True], ["", None, False]],
    notes=("The end.",),
)


def test_markdown_has_the_title_the_texts_and_the_rows() -> None:
    assert markdown([TABLE, Table(title="More", level=3, lead=("Text.",))]).splitlines() == [
        *("## Numbers", "", "What they are:", "", "- one", "- two lines", ""),
        *("See [Other numbers](#other-numbers).", ""),
        "| | n | ok |",
        "|---|---:|---|",
        "| *a group* | | |",
        "| a\\|b c | 1.5 | yes |",
        "| | - | no |",
        *("", "The end.", "", "### More", "", "Text."),
    ]


def test_records_are_the_rows_by_head_without_groups() -> None:
    assert TABLE.records == [{"": "a|b\nc", "n": 1.5, "ok": True}, {"": "", "n": None, "ok": False}]
