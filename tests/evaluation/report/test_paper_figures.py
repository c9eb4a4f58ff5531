"""The papers' figures: each row as the paper's text has it, and each a figure of decoding that this project knows."""

import re
from pathlib import Path

import pytest

from mbd_core.decoding.blocks.methods import D2F_TABLE_8, TABLE_4
from mbd_core.evaluation.report.paper_figures import MODELS, PAPER_TABLES, PaperTable
from mbd_core.evaluation.tasks.benchmarks import TASKS
from mbd_core.evaluation.tasks.recipes import RECIPES

PAPERS = Path(__file__).resolve().parents[4] / "shared" / "papers"
TEXTS = {"MBD-LMs": "mbd_lms.txt", "D2F": "d2f.txt", "BlockBatch": "blockbatch.txt"}
# What stands in a row beside its figures: gains and ratios, as 1.24×, +78.39%, (4.9x), _{↓67%}, and what is not there.
EXTRA = re.compile(r"</?\w>|\([^)]*\)|_\{[^}]*\}|[+\d.]+[×%]|–")


def printed_rows(paper: str) -> list[tuple[str, list[str]]]:
    """The rows of the paper's tables: what stands in them, and their numbers in order."""
    lines = [EXTRA.sub("", line) for line in (PAPERS / TEXTS[paper]).read_text().splitlines() if "\t" in line]
    return [
        (line, [cell.strip() for cell in line.split("\t") if re.fullmatch(r"\d[\d.]*", cell.strip())])
        for line in lines
    ]


@pytest.mark.skipif(not PAPERS.is_dir(), reason=f"{PAPERS} is not here")
@pytest.mark.parametrize("table", PAPER_TABLES, ids=lambda table: table.title)
def test_every_row_stands_in_the_paper_s_text_under_its_name(table: PaperTable) -> None:
    rows = printed_rows(table.title.partition(",")[0])
    unreleased = 0
    for row in table.rows:
        figures = [figure.printed for figure in row.figures if figure is not None]
        if not figures:
            unreleased += 1
            continue
        name = "" if row.name.startswith("tau_act") else re.sub(r" ?\([^)]*\)", "", row.name)
        assert any(found[-len(figures) :] == figures and name in line for line, found in rows), (row.name, figures)
    assert unreleased == {"MBD-LMs, Table 2b": 5, "D2F, Table 4": 6}.get(table.title, 0)


def test_every_figure_is_of_a_model_a_task_and_a_recipe_that_are_known() -> None:
    names = [name for of_model in MODELS.values() for name in of_model]
    assert len(names) == len(set(names)), "one folder name means one model"
    assert {table.title for table in PAPER_TABLES} == {
        *(f"MBD-LMs, Table {number}" for number in ("1", "2a", "2b", "3")),
        *(f"D2F, Table {number}" for number in range(1, 5)),
        "BlockBatch, Table 1",
    }
    for table in PAPER_TABLES:
        assert all(len(row.figures) == len(table.heads) for row in table.rows)
        for recipe in table.recipes:
            assert {task for figure in table.figures() for task in figure.tasks} <= {
                *RECIPES[recipe].prompts,
                "gsm8k",
            }
        for figure in table.figures():
            assert figure.model in MODELS and set(figure.tasks) <= set(TASKS)
            assert len(figure.methods) == len(figure.tasks) and float(figure.printed) > 0


def test_averages_are_those_of_the_rows_and_the_methods_those_of_the_papers_own_tables() -> None:
    for table in PAPER_TABLES[:2]:
        for row in table.rows:
            for quantity in ("accuracy", "tpf"):
                of = [figure for figure in row.figures if figure is not None and figure.quantity == quantity]
                *single, average = of
                mean = sum(float(figure.printed) for figure in single) / len(single)
                odd = row.group.startswith("SDAR-8B-Chat-b4 ") and quantity == "tpf" and average.printed == "2.00"
                assert (float(average.printed) == pytest.approx(mean, abs=0.011)) != odd, (table.title, row)
    (mbd,) = [row for row in PAPER_TABLES[0].rows if row.name == "MBD-LLaDA2-Mini-DMax"]
    code = next(f for f in mbd.figures if f is not None and f.tasks == ("mbpp-plus",)).methods[0]
    assert TABLE_4["LLaDA2-Mini-DMax"]["code"]["multi"].items() <= code.items() and code["tau_add"] == 0.9
    (d2f,) = [row for row in PAPER_TABLES[4].rows if (row.group, row.name) == ("MBPP 3-shot", "D2F-LLaDA")]
    assert d2f.figures[0] is not None and D2F_TABLE_8["LLaDA/mbpp"].items() <= d2f.figures[0].methods[0].items()
