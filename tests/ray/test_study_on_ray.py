"""The study as its command runs it on Ray: trained, swept, reported, and gone on with."""

from dataclasses import replace
from pathlib import Path

import pytest
import ray

from actors.training.run import TrainingRun
from cluster.failures import task_sentence
from cluster.topology import ClusterTooSmall
from mbd_core.checkpoint.saving import save_model
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.multitf.data.prepared import TinyData, conversations
from mbd_core.multitf.recipes.recipe import shortened
from mbd_core.multitf.recipes.shipped import LEDGER_BD, LEDGER_TF
from mbd_core.storage.folder import Folder
from mbd_core.tasks.tiny_tokenizer import train_tokenizer
from research.ledger import study


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The base's shape with random weights."""
    assert LEDGER_BD.model is not None
    texts = ("\n".join(pair) for pair in conversations(TinyData(per_task=300, tasks=("ledger-mini",))))
    model = Decoder(LEDGER_BD.model)
    init_weights(model, seed=0)
    tokenizer = train_tokenizer(texts, vocab_size=LEDGER_BD.model.vocab_size)
    save_model(tmp_path / "ledger-bd", model, tokenizer=tokenizer, generation=LEDGER_BD.generation)
    return tmp_path / "ledger-bd"


@pytest.mark.slow
def test_a_study_is_run_and_gone_on_with(
    ray_cluster, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = ["ordering", "--base", str(base), "--out", str(out), "--seeds", "0", "--problems", "2", "--steps", "2"]
    argv += ["--taus", "0.9", "--buffers", "2", "--workers", "1", "--at-once", "2", "--actors", "1"]
    assert study.main(argv) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ledger: ")]
    assert [line.split()[1] for line in said] == ["begun:", "begun:", "trained:", "trained:"], "beside each other"
    models = sorted(path.name for path in (out / "models").iterdir())
    assert models == ["ledger-mbd-s0", "ledger-tf-s0"]
    report = (out / "ordering" / "study.md").read_text()
    written = {path: path.stat().st_mtime_ns for path in (out / "models").rglob("*.safetensors")}
    assert study.main(argv) == 0
    assert (out / "ordering" / "study.md").read_text() == report
    assert {path: path.stat().st_mtime_ns for path in (out / "models").rglob("*.safetensors")} == written


def refused_run(name: str, folder: Path) -> TrainingRun:
    """A run of the shipped base whose model folder is somebody's: it fails where it is begun."""
    (folder / "somebodys").mkdir(exist_ok=True)
    (folder / "somebodys" / "notes.txt").write_text("mine")
    out = Folder.at(str(folder / "somebodys"))
    return TrainingRun(recipe=LEDGER_TF, name=name, storage=Folder.at(str(folder / "runs")), out=out)


def test_after_a_run_that_failed_none_is_begun(
    ray_cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match=r"^first: \S*somebodys ") as failed:
        study.train_all([refused_run(name, tmp_path) for name in ("first", "second")], at_once=1)
    assert "second" not in str(failed.value)
    assert "second" not in capsys.readouterr().err


@pytest.mark.slow
def test_runs_beside_one_that_failed_come_to_their_ends(ray_cluster, base: Path, tmp_path: Path) -> None:
    whole = shortened(replace(LEDGER_TF, base=str(base)), 1)
    runs = Folder.at(str(tmp_path / "runs"))
    good = TrainingRun(
        recipe=whole, name="good", storage=runs, out=Folder.at(str(tmp_path / "model")), num_workers=1, log_targets=()
    )
    with pytest.raises(RuntimeError, match=r"^bad: .*no-base") as failed:
        study.train_all(
            [good, replace(good, recipe=replace(whole, base=str(tmp_path / "no-base")), name="bad")], at_once=2
        )
    assert "good" not in str(failed.value)
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_task_says_its_own_sentence_and_not_its_causes(ray_cluster) -> None:
    def fails() -> None:
        try:
            raise ConnectionError("closed by peer")
        except ConnectionError as error:
            raise RuntimeError("the training failed: sample 17 is too long") from error

    with pytest.raises(ray.exceptions.RayError) as failed:
        ray.get(ray.remote(num_cpus=0, max_retries=0)(fails).remote())
    assert task_sentence(failed.value) == "the training failed: sample 17 is too long"


def test_runs_without_room_beside_each_other_are_not_begun(
    ray_cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ClusterTooSmall, match="--at-once 100: 200 workers need 1 CPU each"):
        study.train_all([refused_run(str(number), tmp_path) for number in range(100)], at_once=100)
    assert "begun" not in capsys.readouterr().err
