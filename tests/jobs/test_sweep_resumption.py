"""The sweep's command without a cluster: what it refuses before Ray starts, and that it goes on with what is there.

The stages run one after the other in this process; `tests/ray/test_eval_sweep.py` has them on Ray.
"""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sweep_cluster import Cluster, put_in_place

from cluster import local
from jobs.eval_sweep import main
from jobs.report_sweep import main as join
from mbd_core.checkpoint.model_digest import model_digest
from mbd_core.evaluation.sandbox.processes import MEANING, available_isolation
from mbd_core.evaluation.sweep.folder import read_report, read_samples

pytestmark = pytest.mark.usefixtures("unrendered_pictures")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return put_in_place(monkeypatch)


def command(model: Path, out: Path | str, *more: str) -> list[str]:
    options = {"--models": model, "--tasks": "gsm-mini", "--methods": "single", "--max-tokens": "8", "--limit": "6"}
    options |= {"--max-rows": "3", "--num-pages": "64", "--timed": "2", "--concurrency": "3", "--out": out}
    return [*(str(part) for option in options.items() for part in option), *more]


def page_data(folder: Path) -> Any:
    """What the report's page is drawn from."""
    page = (folder / "report.html").read_text()
    return json.loads(page.partition('<script id="data" type="application/json">')[2].partition("</script>")[0])


def test_the_same_command_computes_only_what_is_missing(
    cluster: Cluster, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tiny_model_dir, tmp_path / "whole")) == 0
    out = tmp_path / "out"
    cluster.parts, cluster.fails_after = [], 1
    assert main(command(tiny_model_dir, out)) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1] == (
        f"eval_sweep: the sweep failed: a node is gone; what was computed lies in {out}, with the traceback in "
        "failure.txt; the same command computes the rest"
    )
    cluster.fails_after = None
    assert main(command(tiny_model_dir, out)) == 0
    assert "1 of 2 parts are there" in capsys.readouterr().err
    assert cluster.parts == [1, 0]
    assert Counter(row["sample"] for row in read_samples(out)) == Counter(range(6))
    assert not (out / "failure.txt").exists()
    assert (out / "plot.png").read_bytes() == (tmp_path / "whole" / "plot.png").read_bytes()
    whole, report = read_report(tmp_path / "whole"), read_report(out)
    times = report.pop("times")
    assert [(speed["num_alone"], speed["num_together"], speed["concurrency"]) for speed in times] == [(2, 6, 3)]
    assert len(whole.pop("times")) == 1 and json.dumps(report) == json.dumps(whole)
    texts = [(folder / "report.md").read_text().partition("## Speed") for folder in (out, tmp_path / "whole")]
    assert texts[0][0] == texts[1][0] and texts[0][2]
    pages = [page_data(folder) for folder in (out, tmp_path / "whole")]
    before = [
        (folder / "report.html").read_text().partition('<section class="part" id="speed"')
        for folder in (out, tmp_path / "whole")
    ]
    assert before[0][0] == before[1][0] and 'id="results"' in before[0][0] and 'id="beside-the-papers"' in before[0][2]
    assert pages[0] == pages[1]
    assert all(len(sample["steps"]) == sample["num_tokens"] for samples in pages[0]["samples"] for sample in samples)
    cluster.cases = []
    assert main(command(tiny_model_dir, out)) == 0
    assert len(cluster.parts) == 2 and not cluster.cases
    assert read_report(out) == {**report, "times": times}
    assert main(command(tiny_model_dir, out, "--overwrite", "--actors", "6")) == 0
    assert len(cluster.parts) == 4, "cut as it was"
    for index, actors in ((1, 1), (2, 6)):
        shard = tmp_path / f"shard-{index}"
        asked = ["--shard", f"{index}/2", "--actors", str(actors), "--timed", str(index), "--concurrency", str(index)]
        assert main(command(tiny_model_dir, shard, *asked)) == 0
    samples = [row["sample"] for index in (1, 2) for row in read_samples(tmp_path / f"shard-{index}")]
    assert sorted(samples) == list(range(6)), "shards are cut alike, with however many actors"
    assert join([str(tmp_path / "shard-1"), str(tmp_path / "shard-2"), "--out", str(tmp_path / "joined")]) == 0


def test_a_finished_sweep_is_reported_again_without_a_cluster(
    cluster: Cluster, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked = ["--tasks", "code-mini", "--limit", "2"]
    assert main(command(tiny_model_dir, out, "--timed", "0", *asked)) == 0
    settings = read_report(out)["settings"]
    assert settings["isolation"] == [MEANING[available_isolation()]]
    assert settings["models"][tiny_model_dir.name]["digest"] == model_digest(tiny_model_dir)
    report = (out / "report.json").read_bytes()
    (out / "report.json").unlink()
    starts = cluster.starts
    for more in ((), ("--overwrite",)):  # the second ends a sweep whose report is gone
        assert main(command(tiny_model_dir, out, "--timed", "0", *asked, *more)) == 0
        printed = capsys.readouterr()
        assert "1 of 1 parts are there" in printed.err and "# Evaluation sweep" in printed.out
        assert (out / "report.json").read_bytes() == report
        (out / "report.json").unlink()
    (out / "report.json").write_bytes(report)
    assert cluster.starts == starts, "nothing was to be computed"
    assert main(command(tiny_model_dir, out, *asked)) == 0, "its times are missing"
    assert main(command(tiny_model_dir, out, *asked, "--overwrite")) == 0, "it is computed again"
    assert cluster.starts == starts + 2 and len(cluster.parts) == 2


def test_the_best_point_is_written_and_the_same_command_is_still_the_same_sweep(
    cluster: Cluster, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = Path(shutil.copytree(tiny_model_dir, tmp_path / "model")), tmp_path / "out"
    asked = command(model, out, "--grid", "tau_m2t=0.2,0.4", "--write-best", "knee")
    assert main(asked) == 0
    assert "The best by knee of model's 2 configurations: SingleBD" in capsys.readouterr().out
    generation = json.loads((model / "generation_config.json").read_text())
    assert generation["tau_m2t"] in (0.2, 0.4) and generation["buffer_size"] == 1
    computed = len(cluster.parts)
    assert main(asked) == 0 and len(cluster.parts) == computed
    assert json.loads((model / "generation_config.json").read_text()) == generation


def test_what_cannot_be_timed_withholds_no_report(
    cluster: Cluster, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    cluster.refuses_to_time = True
    assert main(command(tiny_model_dir, out)) == 1
    assert (
        capsys.readouterr()
        .err.strip()
        .splitlines()[-1]
        .endswith(f"not all could be timed: no KV page; the report is in {out}")
    )
    assert len(read_report(out)["settings"]["not timed"]) == 1 and not (out / "failure.txt").exists()
    cluster.refuses_to_time, cluster.times_fail = False, True
    assert main(command(tiny_model_dir, out)) == 0
    assert "cannot be timed: RuntimeError: broken" in capsys.readouterr().err
    assert len(read_report(out)["settings"]["not timed"]) == 1, "a failed case is not done"
    assert main(command(tiny_model_dir, out, "--timed", "0")) == 0
    cluster.times_fail = False
    assert main(command(tiny_model_dir, out)) == 0
    report = read_report(out)
    assert len(report["times"]) == 1 and "not timed" not in report["settings"] and len(cluster.parts) == 2
    assert main(command(tiny_model_dir, out, "--timed", "0")) == 0
    assert read_report(out) == report


def test_a_shard_without_parts_is_a_note(
    cluster: Cluster, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tiny_model_dir, tmp_path / "out", "--shard", "3/3")) == 0
    printed = capsys.readouterr()
    assert "note: shard 3/3 has none of the sweep's parts" in printed.err and not printed.out
    assert not cluster.parts and not cluster.cases


def test_a_model_of_the_same_name_with_other_weights_is_another_sweep(
    cluster: Cluster, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, copy = tmp_path / "out", shutil.copytree(tiny_model_dir, tmp_path / tiny_model_dir.name)
    assert main(command(copy, out)) == 0
    assert main(command(tiny_model_dir, out)) == 0, "the same files elsewhere are the same model"
    weights = next(copy.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert main(command(copy, out)) == 2
    assert f"the files of model '{copy.name}' are others; give another" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file/sweep", "dangling/sweep", "dangling", "/proc/sweep", "sweep-with-a-file"])
def test_a_folder_that_cannot_be_written_is_one_sentence_before_a_cluster_starts(
    place: str,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "connect", lambda **_: pytest.fail("no cluster is needed for it"))
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "sweep-with-a-file" / "samples").mkdir(parents=True)
    theirs = tmp_path / "sweep-with-a-file" / "samples" / "part-00000.parquet"
    theirs.write_text("precious")
    assert main(command(tiny_model_dir, tmp_path / place)) == 2
    assert theirs.read_text() == "precious"
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "cannot be written" in error or "exists already" in error
