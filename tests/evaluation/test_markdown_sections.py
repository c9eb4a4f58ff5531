"""The report's Markdown as data: all that it writes is found again, and nothing else."""

from sweep_rows import report_rows
from written_sweeps import timed_table

from mbd_core.evaluation.markdown_sections import markdown_sections
from mbd_core.evaluation.speed import speeds
from mbd_core.evaluation.sweep_markdown import render_markdown
from mbd_core.evaluation.sweep_report import build_aup


def test_the_report_s_tables_and_sentences_are_found_again() -> None:
    rows = report_rows()
    key = rows[0].key
    times = speeds(timed_table({**vars(key), "problem_id": "p"}).to_pylist())
    text = render_markdown(rows, build_aup(rows), times, labels={"a": "A", "b": "B"}, settings={"seed": 7})
    sections = markdown_sections(text)
    assert [s.heading for s in sections] == [
        line.lstrip("# ") for line in text.splitlines() if line.startswith(("# ", "## "))
    ]
    blocks = [block for section in sections for block in section.blocks]
    assert all([block.heading, block.text, block.items, block.table].count(None) == 3 for block in blocks)
    assert [block.heading for block in blocks if block.heading] == [
        line[4:] for line in text.splitlines() if line.startswith("### ")
    ]
    tables = [block.table for block in blocks if block.table is not None]
    best, every = tables[0], tables[1]
    assert best.heads[:2] == ["Model", "A Acc ↑"] and best.numeric[:2] == [False, True]
    assert [row for row in best.rows if len(row) == 1] == [["bd (blksz=8)"], ["mbd (blksz=8)"]]
    assert best.rows[1][:2] == ["SingleBD", "100.00 [51.0, 100.0]"]
    assert len(every.rows) == len(rows) and {len(row) for row in every.rows} == {len(every.heads)}
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert sum(len(table.rows) + 2 for table in tables) == len(lines)
    assert {block.text for block in blocks if block.text} == {
        line for line in text.splitlines() if line and line[0] not in "#-|"
    }
    assert sections[-1].heading == "Speed" and tables[-1].rows[0][:3] == ["bd", "SingleBD", "A"]
