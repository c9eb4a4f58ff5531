"""Runs with an autoregressive teacher: its folder, what is refused of it, and that a run learns from it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from base_folders import base_folder

from mbd_core.checkpoint.adaptation.block_diffusion import convert_to_block_diffusion
from mbd_core.multitf.data.encoding import EncodedChat, tokenizer_fingerprint
from mbd_core.multitf.data.prepared import write_record, write_samples
from mbd_core.multitf.run import __main__ as run
from mbd_core.multitf.run.curve_file import LOSSES

Train = Callable[..., int]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An autoregressive model `ar`, `bd` that was made of it, and data of their tokenizer."""
    from mbd_core.checkpoint.folder import read_folder

    root = tmp_path_factory.mktemp("teachers")
    base_folder(root / "ar", "Llama", "tiny-llama", vocab_size=320)  # with room for the mask
    convert_to_block_diffusion(root / "ar", root / "bd", block_size=4)
    student = read_folder(root / "bd")
    (root / "data").mkdir()
    rows = (EncodedChat([3, 4, 5], [6 + (i * j) % 40 for j in range(13)]) for i in range(16))
    about = {
        "tokenizer": tokenizer_fingerprint(student.tokenizer),
        "mask_token_id": student.config.mask_token_id,
        "eos_token_id": student.config.eos_token_ids[0],
        "max_length": 2048,
    }
    write_record(root / "data", about | write_samples(root / "data", rows))
    return root


@pytest.fixture
def train(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    monkeypatch.chdir(tmp_path)
    fixed = ["--recipe", "tiny-tf", "--data", str(folders / "data"), "--steps", "3", "--batch-size", "8"]
    fixed += ["--set", "states.block_size=4", "--precision", "float32"]

    def run_it(*options: str, base: Path = folders / "bd") -> int:
        return run.main([*fixed, "--base", str(base), *options])

    return run_it


def curve(folder: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (Path(folder) / LOSSES).read_text().splitlines()]


def test_base_and_its_own_folder_teach_the_same(train: Train, folders: Path) -> None:
    pytest.importorskip("peft")
    lora = ["--lora", "4", "--set", "train.lora.dropout=0"]
    for name, teacher in (("a", "base"), ("b", str(folders / "ar"))):
        assert train("--teacher", teacher, *lora, "--checkpoints", name, "--out", f"{name}-model") == 0
    assert curve("a") == pytest.approx(curve("b"), rel=1e-5)
    recorded = json.loads(Path("b-model/recipe.json").read_text())
    assert recorded["train"]["teacher"]["model"] == str(folders / "ar")


def test_all_weights_learn_from_a_copy_of_the_base(train: Train, folders: Path) -> None:
    for name, teacher in (("a", "base"), ("b", str(folders / "ar"))):
        assert (
            train(
                "--teacher", teacher, "--set", "train.teacher.weight=0.5", "--checkpoints", name, "--out", f"{name}-m"
            )
            == 0
        )
    assert curve("a") == pytest.approx(curve("b"), rel=1e-6)
    assert train("--checkpoints", "c", "--out", "c-m") == 0
    assert curve("c")[0] != pytest.approx(curve("a")[0], rel=1e-3)


def test_a_model_that_learned_to_fill_masks_is_no_teacher(
    train: Train, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--out", "first") == 0
    assert train("--teacher", "base", base=Path("first")) == 2
    assert "trained to fill masks" in one_sentence(capsys)
    assert train("--teacher", str(folders / "ar"), "--out", "second", base=Path("first")) == 0
    assert train("--teacher", str(folders / "bd")) == 2
    assert "does not read causally" in one_sentence(capsys)


def test_a_teacher_has_the_students_vocabulary(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base_folder(tmp_path / "qwen", "Qwen3", "tiny-qwen3")
    tokenizer = json.loads((tmp_path / "qwen/tokenizer.json").read_text())
    first, second, *_ = vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "qwen/tokenizer.json").write_text(json.dumps(tokenizer))
    capsys.readouterr()
    assert train("--teacher", str(tmp_path / "qwen")) == 2
    assert "another vocabulary" in one_sentence(capsys)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--teacher", "nowhere"], "unknown model 'nowhere'"),
        (["--teacher", "base", "--set", "train.teacher.jsd=1.5"], "below 1"),
        (["--teacher", "base", "--set", "train.teacher.weight=0"], "weight"),
    ],
)
def test_settings_that_no_teacher_can_honour_are_refused(
    train: Train, capsys: pytest.CaptureFixture[str], options: list[str], why: str
) -> None:
    assert train(*options) == 2
    assert why in one_sentence(capsys)


def test_random_weights_have_no_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run.main(["--recipe", "tiny-bd-b8", "--teacher", "base", "--out", "/nowhere/x"]) == 2
    assert "--base" in one_sentence(capsys)


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]
