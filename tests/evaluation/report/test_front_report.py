"""A sweep's report becomes a model folder's front, by the command that a user runs."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from jobs import report_sweep
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.methods import KEY, read_front
from mbd_core.evaluation.report.speed_front import front_of

MEASURED = {0.9: (90.0, 2.0), 0.7: (70.0, 3.0), 0.6: (60.0, 2.5), 0.5: (40.0, 5.0)}  # tau_m2t: accuracy, tpf


def row(tau: float, task: str = "gsm-mini", model: str = "tiny", **changes: Any) -> dict[str, Any]:
    accuracy, tpf = MEASURED[tau]
    config = asdict(DecodingConfig(block_size=4, tau_m2t=tau, buffer_size=2))
    fields = {"model": model, "method": "multi", "task": task, "config": config, "n": 50, "accuracy": accuracy}
    return fields | {"tpf": tpf} | changes


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def written(tmp_path: Path, *rows: dict[str, Any]) -> str:
    sweep = tmp_path / "sweep"
    sweep.mkdir(exist_ok=True)
    (sweep / "report.json").write_text(json.dumps({"rows": rows}))
    return str(sweep)


def test_the_command_writes_the_front_and_leaves_the_other_fields(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = written(tmp_path, *map(row, MEASURED))
    before = json.loads((folder / "generation_config.json").read_text())
    assert report_sweep.main(["front", sweep, "--folder", str(folder)]) == 0
    after = json.loads((folder / "generation_config.json").read_text())
    front = read_front(after, block_size=4)
    assert front is not None
    assert [(p.decoding["tau_m2t"], p.accuracy, p.tpf) for p in front.points] == [
        (0.9, 90, 2),
        (0.7, 70, 3),
        (0.5, 40, 5),
    ]
    assert (front.tasks, front.num_samples) == (("gsm-mini",), 50)
    assert {name: value for name, value in after.items() if name != KEY} == before
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["speed", "0", "0.3333", "1"]
    assert "tau_m2t=0.7" in lines[2] and "buffer_size" not in lines[2]

    assert report_sweep.main(["front", sweep, "--folder", str(folder)]) == 2, "a front is not lost"
    assert report_sweep.main(["front", sweep, "--folder", str(folder), "--overwrite"]) == 0


def test_several_tasks_are_their_means_and_one_configuration_counts_once() -> None:
    other = [row(tau, "code-mini", accuracy=10.0 * i, tpf=1.0, n=30) for i, tau in enumerate(MEASURED)]
    single = [row(0.9, method="careful")]
    rows = [*map(row, MEASURED), *other, *single, row(0.9, model="other")]
    front = front_of({"rows": rows}, model="tiny")
    assert front.num_samples == 80
    found = {p.decoding["tau_m2t"]: (p.accuracy, p.tpf) for p in front.points}
    assert found == {0.9: (45, 1.5), 0.7: (40, 2.0), 0.5: (35, 3.0)}
    alone = front_of({"rows": rows}, model="tiny", tasks=["gsm-mini"])
    assert (alone.tasks, alone.points[0].accuracy) == (("gsm-mini",), 90)


def test_points_are_of_the_same_tasks() -> None:
    rows = [*map(row, MEASURED), row(0.9, "code-mini", accuracy=10.0)]
    with pytest.raises(ValueError, match=r"code-mini lacks a configuration that gsm-mini has.* --tasks"):
        front_of({"rows": rows})
    assert front_of({"rows": rows}, tasks=["gsm-mini"]).points == front_of({"rows": rows[:-1]}).points


def test_a_task_without_forwards_does_not_hide_the_front_of_another() -> None:
    rows = [*map(row, MEASURED), row(0.9, "harness:arc", method="log-likelihood", tpf=None)]
    assert front_of({"rows": rows}, tasks=["gsm-mini"]).tasks == ("gsm-mini",)
    with pytest.raises(ValueError, match=r"on harness:arc by method 'log-likelihood'.* --tasks"):
        front_of({"rows": rows})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "b"], "no model 'b'; it has: tiny, other"),
        ([], "several models"),
        (["--model", "tiny", "--tasks", "math"], "no task 'math' of tiny; it has: gsm-mini"),
        (["--model", "other"], "does not fit"),
    ],
)
def test_what_the_sweep_or_the_model_has_not_is_bad_input(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    misfit = row(0.9, model="other", config=asdict(DecodingConfig(block_size=8)))
    sweep = written(tmp_path, row(0.9), misfit)
    assert report_sweep.main(["front", sweep, "--folder", str(folder), *arguments]) == 2
    assert reason in capsys.readouterr().err
    assert KEY not in json.loads((folder / "generation_config.json").read_text())
    assert report_sweep.main(["front", str(tmp_path), "--folder", str(folder)]) == 2
    assert "report.json" in capsys.readouterr().err
