"""Sweeps of several seeds as one table: hand-computed means, and what does not fit together."""

import json
from pathlib import Path

import pytest

from jobs.report_sweep import main
from mbd_core.evaluation.report.studies.seeds import seed_table
from mbd_core.tables import markdown


def sweep(folder: Path, accuracies: dict[float, float], *, seed: int) -> Path:
    """A sweep's report with a row for each threshold."""
    rows = [
        {
            "model": "m",
            "method": "MBD",
            "task": "gsm-mini",
            "config": {"tau_m2t": tau, "block_size": 8, "t2t": {"tau": 0.5}},
            "n": 50,
            "accuracy": accuracy,
            "tpf": 2.0,
            "nfe": 5.0,
        }
        for tau, accuracy in accuracies.items()
    ]
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps({"rows": rows, "settings": {"seed": seed}}))
    return folder


def test_the_table_has_mean_and_standard_error_of_every_configuration(tmp_path: Path) -> None:
    folders = [sweep(tmp_path / f"seed-{n}", {0.7: 90.0 + n, 0.9: 95.0 + 2 * n}, seed=n) for n in range(3)]
    assert markdown([seed_table(folders)]).splitlines()[2:] == [
        "| m | MBD | gsm-mini | tau_m2t=0.7 | 150 | 91.00 ± 0.58 | 2.00 ± 0.00 | 5.00 ± 0.00 |",
        "| m | MBD | gsm-mini | tau_m2t=0.9 | 150 | 97.00 ± 1.15 | 2.00 ± 0.00 | 5.00 ± 0.00 |",
    ]


def test_sweeps_that_make_no_table_are_refused(tmp_path: Path) -> None:
    one = sweep(tmp_path / "a", {0.7: 1.0, 0.9: 2.0}, seed=0)
    other = sweep(tmp_path / "b", {0.7: 1.0, 0.8: 2.0}, seed=1)
    with pytest.raises(ValueError):
        seed_table([one])
    with pytest.raises(ValueError, match="1 of 2 sweeps"):
        seed_table([one, other])
    with pytest.raises(ValueError, match=r"report.json"):
        seed_table([one, tmp_path])
    again = sweep(tmp_path / "c", {0.7: 1.0, 0.9: 2.0}, seed=0)
    for folder in (one, again):
        with pytest.raises(ValueError, match=rf"{one} and {folder} are both of seed 0"):
            seed_table([one, folder])
    single = [sweep(tmp_path / f"tau-{tau}", {tau: 1.0}, seed=seed) for seed, tau in enumerate((0.7, 0.9))]
    with pytest.raises(ValueError, match=r"tau_m2t=0.7 is in 1 of 2 sweeps"):
        seed_table(single)


def test_the_command_prints_the_table_or_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [sweep(tmp_path / name, {0.7: 90.0}, seed=seed) for seed, name in enumerate(("a", "b"))]
    rows = tmp_path / "rows.json"
    assert main(["seeds", *map(str, folders), "--json", str(rows)]) == 0
    table = seed_table(folders)
    assert capsys.readouterr().out == markdown([table])
    assert json.loads(rows.read_text())["rows"] == table.records
    assert table.records[0]["n"] == 100 and table.records[0]["Acc (%)"] == "90.00 ± 0.00"
    assert main(["seeds", str(folders[0])]) == 2
    assert capsys.readouterr().err == "seeds: a standard error over seeds needs at least two sweeps\n"
