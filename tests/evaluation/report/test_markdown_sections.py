"""The report's Markdown as data: all that it writes is found again, and nothing else."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from sweep_rows import report_rows, report_samples
from written_sweeps import timed_table

from mbd_core.evaluation.measures.summary import build_aup, build_rows
from mbd_core.evaluation.report.comparisons import accuracy_gaps
from mbd_core.evaluation.report.markdown import render_markdown
from mbd_core.evaluation.report.sections import Section, markdown_sections
from mbd_core.evaluation.sweep.timed_runs import speeds


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


def sections_of(name: str, settings: Mapping[str, Any]) -> list[Section]:
    """A report whose model and method are called `name`."""
    samples = {replace(key, model=name, method=name): graded for key, graded in report_samples().items()}
    rows, labels = build_rows(samples), {"a": "A", "b": "B"}
    times = speeds(timed_table({**vars(rows[0].key), "problem_id": "p"}).to_pylist())
    gaps = accuracy_gaps(rows, samples)
    return markdown_sections(
        render_markdown(rows, build_aup(rows), times, labels=labels, settings=settings, gaps=gaps)
    )


@pytest.mark.parametrize("name", ["a|b", r"a\|b", "a|", "a\n| b |", "a\n## b", "a\u2028b"])
def test_a_name_ends_no_cell_table_or_list(name: str) -> None:
    found, plain = sections_of(name, {}), sections_of("x", {})
    assert [section.heading for section in found] == [section.heading for section in plain]
    for section, other in zip(found, plain, strict=True):
        for block, meant in zip(section.blocks, other.blocks, strict=True):
            assert len(block.items or ()) == len(meant.items or ())
            if block.table is not None and meant.table is not None:
                assert [len(row) for row in block.table.rows] == [len(row) for row in meant.table.rows]
    every = next(section for section in found if section.heading == "Every configuration")
    assert every.blocks[0].table is not None and every.blocks[0].table.rows[0][1] == " ".join(name.splitlines())


@pytest.mark.parametrize("end", ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_a_setting_begins_no_line(end: str) -> None:
    for tail in ("| x", "## Forged", ""):
        found = sections_of("x", {"endpoints": {f"e{end}": {"model": f"m{end}{tail}"}}, "seed": 7})
        (run,) = [section for section in found if section.heading == "What was run"]
        (block,) = run.blocks
        assert block.items is not None and len(block.items) == 2
        assert [item.splitlines() for item in block.items] == [[item] for item in block.items]
