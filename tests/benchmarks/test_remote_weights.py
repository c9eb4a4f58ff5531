"""The weights' benchmark: ranks' shares tile a matrix, and both ways bring the same bytes."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks import remote_weights
from benchmarks.remote_weights import load_share, read_ranges, remote, stored_tensors
from mbd_core.storage.folder import Folder

NAMES = ("q_proj.weight", "o_proj.weight", "norm.weight")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    draw = np.random.default_rng(0)
    shapes = ((8, 6), (6, 8), (6,))
    save_file(
        {name: draw.standard_normal(shape).astype(np.float32) for name, shape in zip(NAMES, shapes, strict=True)},
        folder / "model.safetensors",
    )
    return folder


def test_ranks_read_their_rows_and_all_of_what_is_split_by_columns(weights: Path) -> None:
    values, content = load_file(weights / "model.safetensors"), (weights / "model.safetensors").read_bytes()
    tensors = {each.name: each for each in stored_tensors(Folder.at(f"file://{weights}"))}
    assert tensors.keys() == set(NAMES)
    for name, tensor in tensors.items():
        shares = [content[slice(*tensor.wanted(rank, 2))] for rank in range(2)]
        whole = values[name].tobytes()
        assert b"".join(shares) == whole if name == "q_proj.weight" else shares == [whole, whole]


def test_both_ways_bring_the_same_bytes(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_weights, "CHUNK_BYTES", 50)
    tensors = stored_tensors(Folder.at(f"file://{weights}"))
    for rank in range(2):
        size = read_ranges(f"file://{weights}", tensors, rank, 2)
        assert size == load_share(str(weights), tensors, rank, 2) == 4 * (48 / 2 + 48 + 6)


def test_the_command_prints_a_row_for_each_way(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert remote(["--model", f"file://{weights}", "--ranks", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "download, then load" in lines[2] and "ranges" in lines[3]
