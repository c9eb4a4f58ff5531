"""Two models on the same problems, read from the samples of sweeps."""

import json
from pathlib import Path

import pytest
from written_sweeps import write_rows

from jobs.report_sweep import main
from mbd_core.evaluation.measures.statistics import Interval
from mbd_core.evaluation.report.studies.paired_answers import load_answers, pair_answers
from mbd_core.evaluation.sweep.folder import read_samples

SETTING = {"task": "gsm-mini", "tau_m2t": 0.9, "buffer_size": 4}


def sweep(
    folder: Path,
    model: str,
    right: dict[str, bool],
    *,
    seed: int = 0,
    tau_m2t: float = 0.9,
    num_forwards: int | None = 4,
    draw: int | None = None,
    **fields: float,
) -> Path:
    rows = [
        {
            "model": model,
            "method": "MBD",
            "task": "gsm-mini",
            "seed": seed,
            "problem_id": problem,
            "correct": correct,
            "config": json.dumps({"tau_m2t": tau_m2t, "buffer_size": 4, **fields}),
            "num_tokens": 12,
            "num_forwards": num_forwards,
            **({} if draw is None else {"draw": draw}),
        }
        for problem, correct in right.items()
    ]
    write_rows(folder, rows)
    return folder


def test_answers_are_paired_by_seed_and_problem(tmp_path: Path) -> None:
    folders = [
        sweep(tmp_path / "x0", "x", {"a": True, "b": True, "c": False}),
        sweep(tmp_path / "x1", "x", {"a": True}, seed=1),
        sweep(tmp_path / "y0", "y", {"a": True, "b": False, "c": True}),
        sweep(tmp_path / "y1", "y", {"a": False}, seed=1),
        sweep(tmp_path / "other", "y", {"a": True}, tau_m2t=0.7),
    ]
    first, second = (load_answers(folders, model=model, **SETTING) for model in ("x", "y"))
    pairs = pair_answers(first, second)
    assert (pairs.num_problems, pairs.first_only, pairs.second_only) == (3, 2, 1)
    assert pairs.p_value == 1.0
    low, high = pairs.accuracy.bounds
    assert pairs.accuracy.value == 25.0 and low < 0 < high


def test_drawn_answers_are_paired_by_their_numbers_too(tmp_path: Path) -> None:
    folders = [
        sweep(tmp_path / f"{model}{draw}", model, {"a": model == "x" or draw == 1, "b": draw == 0}, draw=draw)
        for model in ("x", "y")
        for draw in (0, 1)
    ]
    first, second = (load_answers(folders, model=model, **SETTING) for model in ("x", "y"))
    pairs = pair_answers(first, second)
    assert (pairs.num_problems, pairs.first_only, pairs.second_only) == (2, 1, 0)
    assert pairs.num_decoded == 4 and pairs.accuracy.value == 25.0


def test_forwards_are_compared_where_both_have_them(tmp_path: Path) -> None:
    folders = [
        sweep(tmp_path / "x0", "x", {"a": True, "b": True}, num_forwards=4),
        sweep(tmp_path / "x1", "x", {"c": False}, num_forwards=None, seed=1),
        sweep(tmp_path / "y0", "y", {"a": True, "b": True}, num_forwards=6),
        sweep(tmp_path / "y1", "y", {"c": False}, seed=1),
    ]
    first, second = (load_answers(folders, model=model, **SETTING) for model in ("x", "y"))
    pairs = pair_answers(first, second)
    assert (pairs.num_problems, pairs.num_decoded) == (3, 2)
    assert pairs.nfe == Interval(value=-2.0, low=-2.0, high=-2.0)
    assert pairs.tpf == Interval(value=1.0, low=1.0, high=1.0)


def test_sides_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    folders = [sweep(tmp_path / "x", "x", {"a": True}), sweep(tmp_path / "y", "y", {"b": True})]
    with pytest.raises(ValueError, match="of z on"):
        load_answers(folders, model="z", **SETTING)
    folders.append(sweep(tmp_path / "semi", "x", {"a": True}, tau_semi=0.5))
    with pytest.raises(ValueError, match="tau_semi"):
        load_answers(folders, model="x", **SETTING)
    folders[-1] = sweep(tmp_path / "other", "x", {"a": False})
    with pytest.raises(ValueError, match=r"other and an earlier folder have different answers of x to a"):
        load_answers(folders, model="x", **SETTING)
    write_rows(tmp_path / "line", [{**row, "model": "y", "prompt": "another"} for row in read_samples(folders[0])])
    one, other = (load_answers([folders[0], tmp_path / "line"], model=model, **SETTING) for model in ("x", "y"))
    with pytest.raises(ValueError, match="different problems"):
        pair_answers(one, other)
    folders[-1] = folders[0]
    assert len(load_answers(folders, model="x", **SETTING)) == 1
    with pytest.raises(ValueError):
        pair_answers(*(load_answers(folders, model=model, **SETTING) for model in ("x", "y")))


def test_the_command_prints_the_counts_or_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweeps = [
        sweep(tmp_path / "x", "x", {"a": True, "b": True}),
        sweep(tmp_path / "y", "y", {"a": False, "b": True}),
    ]
    command = [
        "pairs",
        *map(str, sweeps),
        "--first",
        "x",
        "--task",
        "gsm-mini",
        "--tau-m2t",
        "0.9",
        "--buffer-size",
        "4",
        "--second",
    ]
    assert main([*command, "y"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["2 problems; only x right: 1, only y: 0", "sign test, two-sided: p = 1.000"]
    assert printed[2] == "accuracy: +50.00 [+0.00, +100.00] points"
    assert printed[3] == "TPF: +0.000 [+0.000, +0.000], over the 2 answers that both decoded"
    assert main([*command, "z"]) == 2
    assert capsys.readouterr().err.startswith("pairs: no samples of z on gsm-mini")
