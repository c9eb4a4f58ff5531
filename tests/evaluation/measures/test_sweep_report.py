"""A report's rows: the best configuration, and the AUPs over all configurations."""

import pytest
from sweep_rows import report_rows

from mbd_core.evaluation.measures.summary import best_row, build_aup


def test_the_best_configuration_is_the_most_accurate_then_the_faster() -> None:
    rows = [row for row in report_rows() if row.key.model == "mbd"]
    assert best_row(row for row in rows if row.key.task == "a").config["tau_m2t"] == 0.7
    assert best_row(row for row in rows if row.key.task == "b").config["tau_m2t"] == 0.9
    assert {row.varied for row in rows} == {"tau_m2t=0.9", "tau_m2t=0.7"}


def test_aup_takes_all_configurations_and_the_task_s_best_accuracy() -> None:
    aups = build_aup(report_rows())
    found = {(a.model, a.task): a for a in aups}
    assert len(aups) == len(found) == 4
    assert found["mbd", "a"].y_max == 100.0
    assert (found["mbd", "a"].y_max_of, found["mbd", "a"].y_max_pool) == (
        "bd, SingleBD",
        ("bd, SingleBD (1)", "mbd, MBD (2)"),
    )
    assert found["mbd", "a"].anchor == (4.0, 75.0)
    assert found["mbd", "a"].points == ((4.0, 75.0), (5.0, 75.0))
    assert found["mbd", "a"].eq41.value == pytest.approx(75.0)
    assert found["mbd", "b"].dropped == ((5.0, 25.0),)
    assert found["bd", "a"].eq41.value == 0.0
    assert found["bd", "a"].d3llm.value == pytest.approx(200.0)
