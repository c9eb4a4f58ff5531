"""The study as its command runs it on Ray: trained, swept, reported, and gone on with."""

from dataclasses import replace
from pathlib import Path

import pytest

from actors.training_run import TrainingRun
from cluster.storage import Folder
from cluster.topology import ClusterTooSmall
from jobs import study
from mbd_core.checkpoint.saving import save_model
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.multitf.data import TinyData, conversations
from mbd_core.multitf.ledger_recipes import LEDGER_BD, LEDGER_TF
from mbd_core.tasks.tiny_tokenizer import train_tokenizer


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
def test_a_study_is_run_and_gone_on_with(ray_cluster, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["ordering", "--base", str(base), "--out", str(out), "--seeds", "0", "--problems", "2", "--steps", "2"]
    argv += ["--taus", "0.9", "--buffers", "2", "--workers", "1", "--at-once", "2", "--actors", "1"]
    assert study.main(argv) == 0
    models = sorted(path.name for path in (out / "models").iterdir())
    assert models == ["ledger-mbd-s0", "ledger-tf-s0"]
    report = (out / "ordering" / "study.md").read_text()
    written = {path: path.stat().st_mtime_ns for path in (out / "models").rglob("*.safetensors")}
    assert study.main(argv) == 0
    assert (out / "ordering" / "study.md").read_text() == report
    assert {path: path.stat().st_mtime_ns for path in (out / "models").rglob("*.safetensors")} == written


def run_without_base(name: str, folder: Path) -> TrainingRun:
    recipe = replace(LEDGER_TF, base=str(folder / "no-base"))
    return TrainingRun(recipe=recipe, name=name, storage=Folder.at(str(folder)), out=Folder.at(str(folder / "model")))


def test_after_a_run_that_failed_none_is_begun(
    ray_cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match=r"^first: .*no-base") as failed:
        study.train_all([run_without_base(name, tmp_path) for name in ("first", "second")], at_once=1)
    assert "second" not in str(failed.value)
    assert "second" not in capsys.readouterr().err


def test_runs_without_room_beside_each_other_are_not_begun(
    ray_cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ClusterTooSmall, match="200 workers need 1 CPU each"):
        study.train_all([run_without_base(str(number), tmp_path) for number in range(100)], at_once=500)
    assert "begun" not in capsys.readouterr().err
