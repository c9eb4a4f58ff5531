"""Settings chosen on one task and used on others: the choice, the cells, and sweeps that do not fit together."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.report_sweep import main
from mbd_core.evaluation.report.studies.setting_transfer import transfer_table
from mbd_core.tables import markdown

TAUS = (0.7, 0.9, 0.95)
Points = dict[tuple[str, str], dict[float, tuple[float, float]]]


def row(model: str, task: str, tau: float, slots: int, accuracy: float, tpf: float) -> dict[str, Any]:
    config = {"block_size": 8, "buffer_size": slots, "tau_m2t": tau, "t2t": {"tau": 0.5}, "soft": None}
    accuracies = {"accuracy": accuracy, "accuracy_low": accuracy - 1, "accuracy_high": accuracy + 1}
    return {"model": model, "method": "MBD", "task": task, "config": config, "n": 50, "tpf": tpf, **accuracies}


def sweep(folder: Path, points: Points) -> Path:
    """A sweep's report: (accuracy, TPF) by subject and threshold, and SingleBD, which is better than all of them."""
    rows = [row(*subject, tau, 2, *point) for subject, by_tau in points.items() for tau, point in by_tau.items()]
    rows += [row(*subject, 0.9, 1, 99.0, 9.0) for subject in points]
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps({"rows": rows}))
    return folder


TUNED: Points = {
    ("m", "easy"): {0.7: (90.0, 6.0), 0.9: (90.0, 5.0), 0.95: (80.0, 4.0)},
    ("m", "hard"): {0.7: (50.0, 6.0), 0.9: (69.0, 5.5), 0.95: (70.0, 3.0)},
}
REPORTED: Points = {
    ("m", "easy"): {0.7: (88.0, 6.1), 0.9: (89.0, 5.1), 0.95: (90.0, 4.1)},
    ("m", "hard"): {0.7: (49.0, 6.2), 0.9: (68.0, 5.2), 0.95: (71.0, 3.2)},
}


def test_the_most_accurate_setting_of_each_task_is_used_on_both(tmp_path: Path) -> None:
    table = transfer_table([sweep(tmp_path / "a", TUNED)], [sweep(tmp_path / "b", REPORTED)], by="accuracy")
    assert markdown([table]).splitlines() == [
        "| Settings chosen on | they are | m on easy | m on hard |",
        "|---|---|---|---|",
        "| m on easy | tau_m2t=0.7 | 88.0 [87.0, 89.0], TPF 6.10 | 49.0 [48.0, 50.0], TPF 6.20 |",
        "| m on hard | tau_m2t=0.95 | 90.0 [89.0, 91.0], TPF 4.10 | 71.0 [70.0, 72.0], TPF 3.20 |",
    ]


def test_the_knee_gives_up_an_accuracy_that_costs_much_parallelism(tmp_path: Path) -> None:
    table = transfer_table([sweep(tmp_path / "a", TUNED)], [sweep(tmp_path / "b", REPORTED)], by="knee")
    assert "| m on hard | tau_m2t=0.9 |" in markdown([table])


def test_models_with_tasks_of_their_own_are_several_sweeps(tmp_path: Path) -> None:
    easy, hard = (
        [sweep(tmp_path / f"{name}-{side}", {("m", name): points[("m", name)]}) for name in ("easy", "hard")]
        for side, points in (("a", TUNED), ("b", REPORTED))
    )
    together = transfer_table([sweep(tmp_path / "a", TUNED)], [sweep(tmp_path / "b", REPORTED)], by="accuracy")
    assert transfer_table(easy, hard, by="accuracy") == together


def test_what_does_not_fit_together_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = sweep(tmp_path / "whole", TUNED)
    fewer = sweep(tmp_path / "fewer", {("m", "easy"): REPORTED[("m", "easy")]})
    other = sweep(tmp_path / "other", {s: {0.5: (1.0, 1.0)} for s in TUNED})
    for reported, sentence in (
        (fewer, "m on hard is on one side only"),
        (other, "the setting chosen on m on easy was not measured on m on easy"),
        (tmp_path / "none", "none has no report.json"),
        (whole, "whole is on both sides"),
    ):
        assert main(["transfer", "--chosen-on", str(whole), "--reported-on", str(reported)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("transfer: ") and sentence in line
    again = ["--reported-on", str(sweep(tmp_path / "more", REPORTED))] * 2
    assert main(["transfer", "--chosen-on", str(whole), *again]) == 2
    assert "m on easy has one setting twice" in capsys.readouterr().err
    assert main(["transfer", "--chosen-on", str(whole), *again[:2]]) == 0
    assert "| m on easy | tau_m2t=0.7 |" in capsys.readouterr().out
