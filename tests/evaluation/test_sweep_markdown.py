"""The report's table in the layout of the paper's Table 1."""

import re

from sweep_rows import report_rows

from mbd_core.evaluation.sweep_markdown import render_markdown
from mbd_core.evaluation.sweep_report import build_aup


def test_the_table_has_the_columns_of_table_1_and_their_averages() -> None:
    rows = report_rows()
    text = render_markdown(rows, build_aup(rows), [], labels={"a": "A", "b": "B"}, settings={"seed": 7})
    table = [line for line in text.splitlines() if line.startswith("|")][:6]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0][:7] == ["Model", "A Acc ↑", "A TPF ↑", "B Acc ↑", "B TPF ↑", "Average Acc ↑", "Average TPF ↑"]
    assert len({len(row) for row in cells}) == 1
    assert cells[2][0] == "*bd (blksz=8)*"
    assert cells[3][:7] == [
        *("SingleBD", "100.00 [51.0, 100.0]", "2.00", "100.00 [51.0, 100.0]", "2.00", "100.00", "2.00"),
    ]
    assert cells[5][:7] == [
        *("MBD", "75.00 [30.1, 95.4]", "5.00", "75.00 [30.1, 95.4]", "4.00", "75.00", "4.50"),
    ]
    assert "- mbd, MBD: A: tau_m2t=0.7; B: tau_m2t=0.9" in text
    assert re.search(r"^- seed: 7$", text, re.MULTILINE)
