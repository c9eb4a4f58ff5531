"""The digest of a model folder: the same wherever it lies, another for other weights."""

import json
import shutil
from pathlib import Path

from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.model_digest import model_digest


def test_other_weights_have_another_digest_and_a_copy_the_same(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model_dir, tmp_path / "copy")
    digest = model_digest(tiny_model_dir)
    generation = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps({**generation, "tau_m2t": 0.123}))
    (copy / "README.md").write_text("notes")
    assert model_digest(copy) == digest
    weights = next(copy.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_digest(copy) != digest


def test_other_ids_that_end_an_answer_are_another_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model_dir, tmp_path / "copy")
    ids = list(load_config(copy).eos_token_ids)
    for eos in ([*ids, 7], ids):
        generation = json.loads((copy / "generation_config.json").read_text())
        (copy / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": eos}))
        assert (model_digest(copy) == model_digest(tiny_model_dir)) == (eos == ids)


def test_a_large_file_is_read_at_many_places(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Weights that were trained on differ everywhere; here every megabyte does."""
    size = 32 * 2**20
    for name, mark in (("a", b"\0"), ("b", b"\1")):
        (tmp_path / name).mkdir()
        shutil.copy(tiny_model_dir / "config.json", tmp_path / name)
        (tmp_path / name / "model.safetensors").write_bytes((b"\0" * (2**16 - 1) + mark) * (size // 2**16))
    assert model_digest(tmp_path / "a") != model_digest(tmp_path / "b")
