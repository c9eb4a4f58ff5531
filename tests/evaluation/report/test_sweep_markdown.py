"""The report's tables: the layout of the paper's Table 1, and names and settings of which nothing is Markdown."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from sweep_rows import report_rows, report_samples
from written_sweeps import timed_table

from mbd_core.evaluation.measures.speed import speeds
from mbd_core.evaluation.measures.summary import AupRow, ReportRow, build_aup, build_rows, with_intervals
from mbd_core.evaluation.report.accuracy_gaps import accuracy_gaps
from mbd_core.evaluation.report.contents import SweepNumbers, report_tables
from mbd_core.evaluation.report.metrics import METRICS
from mbd_core.evaluation.tasks.recipes import RECIPES
from mbd_core.tables import Table, markdown


def render_markdown(rows: Sequence[ReportRow], aups: Sequence[AupRow], times: Sequence[Any], **others: Any) -> str:
    """The report without the papers' tables, which have tests of their own."""
    numbers = SweepNumbers(rows=rows, aups=aups, times=times, **others)
    return markdown(report_tables(numbers)).partition("\n## Beside the papers")[0]


def test_the_table_has_the_columns_of_table_1_and_their_averages() -> None:
    rows = report_rows()
    text = render_markdown(rows, build_aup(rows), [], labels={"a": "A", "b": "B"}, settings={"seed": 7})
    table = [line for line in text.splitlines() if line.startswith("|")][:6]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0][:7] == ["Model", "A Acc ↑", "A TPF ↑", "B Acc ↑", "B TPF ↑", "Average Acc ↑", "Average TPF ↑"]
    assert len({len(row) for row in cells}) == 1
    assert cells[2][0] == "*bd (blksz=8)*"
    assert cells[3][:7] == [
        *("SingleBD", "100.00 [51.0, 100.0]", "2.00", "100.00 [51.0, 100.0]", "2.00", "100.00 [65.4, 100.0]", "2.00"),
    ]
    assert cells[5][:7] == [
        *("MBD", "75.00 [30.1, 95.4]", "5.00", "75.00 [30.1, 95.4]", "4.00", "75.00 [43.2, 89.5]", "4.50"),
    ]
    assert "- mbd, MBD: A: tau_m2t=0.7; B: tau_m2t=0.9" in text
    assert re.search(r"^- seed: 7$", text, re.MULTILINE)


def test_an_aup_stands_with_its_interval_its_points_and_the_pool_of_y_max() -> None:
    rows, samples = report_rows(), report_samples()
    aups, means = with_intervals(build_aup(rows), samples)
    text = render_markdown(rows, aups, [], labels={"a": "A", "b": "B"}, settings={}, aup_means=means)
    (line,) = (line for line in text.splitlines() if line.startswith("| mbd | MBD | A | 75.00"))
    low, high = aups[2].eq41.bounds
    assert line.split(" | ")[3] == f"75.00 [{low:.2f}, {high:.2f}]" and low < 75 < high
    assert line.endswith("| (4.00, 75.00) (5.00, 75.00) | none |")
    pool = "- A: y_max 100.00, of bd, SingleBD; its pool (number of configurations): bd, SingleBD (1); mbd, MBD (2)"
    assert text.splitlines().count(pool) == 1


def test_an_average_of_aups_stands_with_its_own_interval() -> None:
    rows, samples = report_rows(), report_samples()
    aups, means = with_intervals(build_aup(rows), samples)
    text = render_markdown(rows, aups, [], labels={"a": "A", "b": "B"}, settings={}, aup_means=means)
    (line,) = (line for line in text.splitlines() if line.startswith("| MBD |"))
    mean = means[1]
    assert mean.eq41.value == (aups[2].eq41.value + aups[3].eq41.value) / 2
    cells = [
        f"{value:.2f} [{low:.2f}, {high:.2f}]"
        for value, (low, high) in ((one.value, one.bounds) for one in (mean.eq41, mean.d3llm))
    ]
    assert line.removesuffix(" |").split(" | ")[-2:] == cells
    low, high = mean.eq41.bounds
    assert high - low < aups[2].eq41.bounds[1] - aups[2].eq41.bounds[0]
    assert "AUP Eq. 4.1 [95 %] ↑ | AUP d3LLM [95 %] ↑ |" in text


def test_no_prompt_s_fence_or_markup_reaches_beyond_its_setting() -> None:
    rows, key = report_rows(), report_rows()[0].key
    speed = speeds(timed_table({**asdict(key), "problem_id": "p"}).to_pylist())
    asked = {
        recipe.name: {name: {"prompt": one.wording.text, "stop": one.stop} for name, one in recipe.prompts.items()}
        for recipe in RECIPES.values()
    }
    labels = {"a": "A", "b": "B"}
    text = render_markdown(rows, build_aup(rows), speed, labels=labels, settings={"tasks": asked, "paths": ["``"]})
    plain = render_markdown(rows, build_aup(rows), speed, labels=labels, settings={"tasks": "", "paths": ""})
    fenced, kept = False, list[str]()
    for line in text.splitlines():
        fenced ^= line.startswith(("```", "~~~"))
        kept += [line] if not fenced and line.startswith(("## ", "|")) else []
    assert kept == [line for line in plain.splitlines() if line.startswith(("## ", "|"))]
    assert kept[-6] == next(line for line in kept if "Batch-1 TPS (" in line), "the last tables are what was timed"
    (setting,) = (line for line in text.splitlines() if line.startswith("- tasks: "))
    assert "<" not in re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", setting), "outside code, it would be HTML"
    assert len(text.splitlines()) == len(plain.splitlines())


def test_an_average_is_of_all_tasks_or_missing() -> None:
    samples = {key: own for key, own in report_samples().items() if (key.method, key.task) != ("SingleBD", "b")}
    rows = build_rows(samples)
    aups, means = with_intervals(build_aup(rows), samples)
    numbers = SweepNumbers(rows=rows, aups=aups, aup_means=means, labels={"a": "A", "b": "B"}, settings={})
    single, mbd = (row for row in report_tables(numbers)[0].rows if len(row) > 1)
    assert list(single[:3]) == ["SingleBD", "100.00 [51.0, 100.0]", "2.00"] and set(single[3:]) == {None}
    assert None not in mbd


def test_a_model_of_several_block_sizes_has_each_row_once() -> None:
    samples = report_samples()
    for key in [key for key in samples if "0.7" in key.config]:
        samples[replace(key, config=key.config.replace('"block_size": 8', '"block_size": 4'))] = samples.pop(key)
    rows = build_rows(samples)
    (best, *_) = report_tables(SweepNumbers(rows=rows, aups=build_aup(rows), labels={"a": "A", "b": "B"}, settings={}))
    assert [row[0] for row in best.rows] == ["bd (blksz=8)", "SingleBD", "mbd (blksz=8, blksz=4)", "MBD"]


def test_one_task_has_no_average() -> None:
    rows = [row for row in report_rows() if row.key.task == "a"]
    (best, *_) = report_tables(SweepNumbers(rows=rows, aups=build_aup(rows), labels={"a": "A"}, settings={}))
    assert best.columns == ("Model", "A Acc ↑", "A TPF ↑", "AUP Eq. 4.1 [95 %] ↑", "AUP d3LLM [95 %] ↑")
    assert [len(row) for row in best.rows] == [1, 5, 1, 5]
    assert best.rows[0] == ["bd (blksz=8)"] and best.rows[1][:2] == ["SingleBD", "100.00 [51.0, 100.0]"]


def test_a_number_is_named_as_the_table_of_metrics_names_it() -> None:
    rows = report_rows()
    speed = speeds(timed_table({**asdict(rows[0].key), "problem_id": "p"}).to_pylist())
    labels = {"a": "A", "b": "B"}
    tables = report_tables(SweepNumbers(rows=rows, aups=build_aup(rows), times=speed, labels=labels, settings={}))
    heads = {head for table in tables for head in table.columns}
    named = [metric for metric in METRICS.values() if metric.field != "tokens"]
    assert all(any(metric.name in head for head in heads) for metric in named)
    (meant,) = (table for table in tables if table.title == "What the numbers are")
    assert [row[0] for row in meant.rows] == [metric.name for metric in METRICS.values()]
    assert {table.see for table in tables} == {"", meant.title}


def tables_of(name: str, settings: Mapping[str, Any]) -> Sequence[Table]:
    """A report whose model and method are called `name`."""
    samples = {replace(key, model=name, method=name): graded for key, graded in report_samples().items()}
    rows = build_rows(samples)
    times = speeds(timed_table({**vars(rows[0].key), "problem_id": "p"}).to_pylist())
    gaps = accuracy_gaps(rows, samples)
    labels = {"a": "A", "b": "B"}
    return report_tables(
        SweepNumbers(rows=rows, aups=build_aup(rows), times=times, labels=labels, settings=settings, gaps=gaps)
    )


@pytest.mark.parametrize("name", ["a|b", r"a\|b", "a|", "a\n| b |", "a\n## b", "a\u2028b"])
def test_a_name_ends_no_cell_table_or_list(name: str) -> None:
    tables = tables_of(name, {})
    table_lines, plain_lines = (
        [line for line in markdown(of).splitlines() if line.startswith("|")] for of in (tables, tables_of("x", {}))
    )
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in table_lines] == [
        len(re.findall(r"(?<!\\)\|", line)) for line in plain_lines
    ]
    headings, plain = (
        [line for line in markdown(of).splitlines() if line.startswith(("#", "- "))]
        for of in (tables, tables_of("x", {}))
    )
    assert len(headings) == len(plain) and [h for h in headings if h[0] == "#"] == [h for h in plain if h[0] == "#"]


@pytest.mark.parametrize("end", ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_a_setting_begins_no_line(end: str) -> None:
    for tail in ("| x", "## Forged", ""):
        tables = tables_of("x", {"endpoints": {f"e{end}": {"model": f"m{end}{tail}"}}, "seed": 7})
        (run,) = [table for table in tables if table.title == "What was run"]
        section = markdown([run]).removesuffix("\n").splitlines()
        assert section[:2] == ["## What was run", ""] and len(section) == 4
        assert all(line.startswith("- ") for line in section[2:])
