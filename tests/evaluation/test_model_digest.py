"""The digest of a model folder: the same wherever it lies, another for other weights."""

import shutil
from pathlib import Path

from mbd_core.evaluation.model_digest import model_digest


def test_other_weights_have_another_digest_and_a_copy_the_same(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model_dir, tmp_path / "copy")
    digest = model_digest(tiny_model_dir)
    (copy / "generation_config.json").write_text("{}")
    (copy / "README.md").write_text("notes")
    assert model_digest(copy) == digest
    weights = next(copy.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_digest(copy) != digest


def test_a_large_file_is_read_at_many_places(tmp_path: Path) -> None:
    """Weights that were trained on differ everywhere; here every megabyte does."""
    size = 32 * 2**20
    for name, mark in (("a", b"\0"), ("b", b"\1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes((b"\0" * (2**16 - 1) + mark) * (size // 2**16))
    assert model_digest(tmp_path / "a") != model_digest(tmp_path / "b")
