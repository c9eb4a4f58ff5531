"""What `jobs/train_multitf.py` refuses before a worker starts, and what it hands on. No cluster is started."""

from pathlib import Path

import pytest
from chat_rows import chat, write_rows
from full_attention_folder import make_folder

from actors.training.run import TrainingRun
from jobs import prepare_data, train_multitf
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.multitf.run.curve_file import LOSSES, CurveFile
from mbd_core.storage.folder import Folder

LONG = "x" * 300


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[TrainingRun]:
    """The runs that were handed to a cluster."""
    runs: list[TrainingRun] = []

    monkeypatch.setattr("jobs.api.training.train_on_cluster", lambda training, *_, **__: runs.append(training))
    monkeypatch.chdir(tmp_path)
    return runs


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--storage", f"runs/{LONG}/x"], "a name in it than 255"),
        (["--run-name", LONG], "longer than 200 bytes"),
        (["--run-name", ""], "run name '' must be one folder name"),
        (["--out", ""], "an empty name is no folder"),
        (["--run-name", ".."], "run name '..' must be one folder name"),
        (["--run-name", "a\nb"], "run name 'a\\nb' must be one folder name"),
        (["--out", f"a/{LONG}/b"], "a name in it than 255"),
        (["--out", "/proc/x"], "/proc/x cannot be written"),
        (["--storage", "file/runs"], "Not a directory"),
        (["--log-to", "tensorbord"], "--log-to 'tensorbord': known are tensorboard, wandb, mlflow"),
        (["--data", "nowhere"], "holds no prepared training data"),
        (["--recipe", "SDAR-8B-b32"], "recipe SDAR-8B-b32 has no model of its own: name one with --base"),
        (["--recipe", "SDAR-8B-b32", "--base", "tiny-bd"], "has no data of its own"),
        (["--recipe", "LLaDA2-Mini", "--base", "tiny-bd", "--data", "data"], "LLaDA2MoeModelLM models, and tiny-bd"),
        (["--base", "dream"], "attends to whole sequences"),
        (["--recipe", "tiny-bd-b8", "--data", "data"], "trains its own tokenizer"),
        (["--data", "data"], "prepare it again with --max-length 160"),
        (["--tensor-parallel", "3"], "--tensor-parallel 3 does not divide the number of training processes, 2"),
        (
            ["--tensor-parallel", "2", "--set", "train.compile=true"],
            "leave one of train.compile and --tensor-parallel out",
        ),
        (["--set", "train.clip=1", "--set", "train.clip=2"], "train.clip is set twice; say it once"),
        (["--lr", "1", "--set", "train.lr=2"], "--lr and --set train.lr are both given; say one of them"),
        (["--set", 'train={"lr": 1}'], "there is no field train; it holds fields, as train."),
        (["--set", "train.lrr=1"], "there is no field train.lrr; is 'train.lr' meant?"),
        (["--weight-decay", "1"], "(say --set train.weight_decay=VALUE)"),
    ],
)
def test_bad_input_is_refused_before_a_worker_starts(
    started: list[TrainingRun],
    options: list[str],
    sentence: str,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("file").write_text("")
    if "dream" in options:
        make_folder("dream", Path("dream"), load_tokenizer(tiny_model_dir, load_config(tiny_model_dir)))
    if "data" in options:
        write_rows(Path("rows.jsonl"), [chat(i, answer="many words " * 100) for i in range(40)])
        assert prepare_data.main(["rows.jsonl", "--model", "tiny-bd", "--out", "data"]) == 0
    storage = [] if "--storage" in options else ["--storage", "runs"]
    assert train_multitf.main([*options, *storage]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1
    assert started == [] and not Path("runs").exists()


def test_a_shipped_base_and_own_data_are_handed_on(started: list[TrainingRun]) -> None:
    write_rows(Path("rows.jsonl"), [chat(i) for i in range(40)])
    assert prepare_data.main(["rows.jsonl", "--model", "tiny-bd", "--out", "data"]) == 0
    options = ["--recipe", "SDAR-8B-b32", "--base", "tiny-bd", "--data", "data", "--steps", "3", "--storage", "runs"]
    assert train_multitf.main([*options, "--set", "train.compile=true", "--log-to", "tensorboard"]) == 0
    (run,) = started
    assert run.recipe.train.compile and run.log_targets == ("tensorboard",)
    assert run.recipe.base == "tiny-bd" and run.recipe.train.steps == 3
    assert str(run.recipe.data) == str(Path("data").resolve())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], "tiny-mbd"),
        (["--out", "out/second/"], "tiny-mbd-second"),
        (["--out", "s3://bucket/models/third"], "tiny-mbd-third"),
        (["--out", "runs/fourth"], "tiny-mbd-fourth"),  # in --storage, beside the run
        (["--out", "out/second", "--run-name", "own"], "own"),
    ],
)
def test_a_run_is_named_by_its_recipe_and_the_model_that_it_writes(
    started: list[TrainingRun], options: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folder, "check_target", lambda *_, **__: None)  # there is no bucket
    assert train_multitf.main(["--storage", "runs", *options]) == 0
    assert [run.name for run in started] == [name]


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_training_that_fails_ends_the_cluster_that_it_started_and_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_ours: bool
) -> None:
    ended: list[str] = []
    monkeypatch.setattr("cluster.local.connect", lambda **_: is_ours)
    monkeypatch.setattr("cluster.local.disconnect", lambda: ended.append("Ray"))

    def failing(training: TrainingRun) -> None:
        raise ValueError("no room for it")

    monkeypatch.setattr("actors.training.worker.with_paths", failing)
    assert train_multitf.main(["--recipe", "tiny-bd", "--steps", "1", "--storage", str(tmp_path / "runs")]) == 2
    assert "no room for it" in capsys.readouterr().err and ended == (["Ray"] if is_ours else [])


def test_losses_are_there_while_a_run_goes_on(tmp_path: Path) -> None:
    curve = [{"step": 0, "loss": 2.0}]
    (tmp_path / LOSSES).write_text('{"step": 0}\n{"step": 1}\n')  # of a start that was lost
    file = CurveFile(Folder.at(tmp_path), curve)
    for step in (1, 2):
        curve.append({"step": step, "loss": 1.0})
        file.append()
        assert (tmp_path / LOSSES).read_text().splitlines()[-1] == f'{{"step": {step}, "loss": 1.0}}'
    assert len((tmp_path / LOSSES).read_text().splitlines()) == 3


def test_losses_on_remote_storage_are_written_whole(tmp_path: Path) -> None:
    folder, curve = Folder.at(f"memory://{tmp_path.name}/run"), [{"step": 0, "loss": 2.0}]
    file = CurveFile(folder, curve)
    curve.append({"step": 1, "loss": 1.0})
    file.append()
    file.flush()
    assert (folder.read_text(LOSSES) or "").count("\n") == 2
