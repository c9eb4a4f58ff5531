"""Weights that stay at their URL: ranks read by range what they would read of a downloaded folder."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import CONFIGS, rounded_folder, write_model
from torch import Tensor

from mbd_core.checkpoint import model_digest as model_digests
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.model_digest import model_digest
from mbd_core.checkpoint.safetensor_files import WEIGHTS, list_tensors
from mbd_core.checkpoint.streamed_tensors import StreamedTensors
from mbd_core.models.shard import Shard
from mbd_core.storage import download, streamed
from mbd_core.storage.folder import Folder
from mbd_core.storage.models import fetch_model
from mbd_core.storage.streamed import RangeReader, StreamedFile, stub_of
from tests.support.clusters.file_server import FileServer, file_server


@pytest.fixture
def served(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A server with the folder `m`; what is fetched goes below `tmp_path`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(streamed, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(streamed, "PIECE_BYTES", 10_000)
    shutil.copytree(tiny_model_dir, tmp_path / "www" / "m")
    with file_server(tmp_path / "www") as server:
        yield server


def stream(url: str) -> Path:
    return Path(fetch_model(f"{url}/m", url_weights="stream"))


def weights_of(folder: Path, *, rank: int = 0, ranks: int = 1, **options: Any) -> dict[str, Tensor]:
    shard = Shard(rank=rank, size=ranks)
    return load_model(folder, shard=shard, reduce=lambda partial: partial, **options).state_dict()


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("kind", ["dense", "dense in several files", "experts", "experts in FP8"])
def test_the_weights_of_each_rank_are_those_of_the_folder(kind: str, served: FileServer, tmp_path: Path) -> None:
    folder = tmp_path / "www" / "m"
    shutil.rmtree(folder)
    if kind == "experts in FP8":
        rounded_folder(folder, "llada2", apart=True)
    else:
        config, several = CONFIGS["sdar" if kind.startswith("dense") else "llada2"], kind.endswith("files")
        write_model(folder, config, **({"max_shard_bytes": 20_000} if several else {}))
    stubs = stream(served.url)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert list_tensors(stubs).keys() == list_tensors(folder).keys()
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        assert_equal(weights_of(folder, rank=rank, ranks=ranks), weights_of(stubs, rank=rank, ranks=ranks))
    if kind == "experts in FP8":
        assert_equal(weights_of(folder, fp8="blocks"), weights_of(stubs, fp8="blocks"))


@pytest.mark.parametrize("whole_bytes", [8 * 2**20, 1_000])
def test_the_digest_is_that_of_the_downloaded_folder(
    whole_bytes: int, served: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_digests, "WHOLE_BYTES", whole_bytes)
    monkeypatch.setattr(model_digests, "PROBE_BYTES", 500)
    folder, stubs = tmp_path / "www" / "m", stream(served.url)
    digest = model_digest(folder)
    assert model_digest(stubs) == digest
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    os.utime(folder / WEIGHTS, (0, 0))
    with pytest.raises(ValueError, match="was changed since its folder was asked for; start again"):
        model_digest(stubs)
    assert model_digest(stream(served.url)) == model_digest(folder) != digest


def test_ranks_read_their_rows_and_s3_serves_too(served: FileServer, tiny_model_dir: Path, s3: str) -> None:
    stubs, name = stream(served.url), "model.embed_tokens.weight"
    served.asked.clear()
    weights_of(stubs, rank=0, ranks=2)
    file = StreamedFile.at(stubs / WEIGHTS)
    assert file is not None
    first, last = (file.begin + offset for offset in file.tensors[name]["data_offsets"])
    read = sum(end - start for _, start, end in served.asked if first <= start < last)
    assert read == (last - first) // 2
    place = Folder.at(f"{s3}/{stubs.parent.name}/m")
    for file in tiny_model_dir.iterdir():
        place.write_bytes(file.name, file.read_bytes())
    assert_equal(weights_of(stream(place.location.removesuffix("/m"))), weights_of(tiny_model_dir))


def test_a_range_that_breaks_off_is_asked_for_again_alone(served: FileServer, tiny_model_dir: Path) -> None:
    stubs = stream(served.url)
    served.asked.clear()
    whole = weights_of(stubs)
    num_whole, served.cut = len(served.asked), 2
    served.asked.clear()
    assert_equal(weights_of(stubs), whole)
    assert len(served.asked) == num_whole + 2
    served.cut = 10**6
    with pytest.raises(ValueError, match=r"/m cannot be read: .*asked 3 times; .*--url-weights cache") as refusal:
        weights_of(stubs)
    assert served.url in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_file_that_was_changed_is_refused(served: FileServer, tmp_path: Path) -> None:
    stubs, file = stream(served.url), tmp_path / "www" / "m" / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-4:] = bytes(4)
    file.write_bytes(content)
    os.utime(file, (0, 0))
    with pytest.raises(ValueError, match="was changed since its folder was asked for; start again"):
        weights_of(stubs)
    assert stream(served.url) != stubs, "the next start takes the new version"


def test_a_server_without_parts_is_downloaded_from(
    served: FileServer, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served.has_ranges = False
    monkeypatch.setattr(download, "CHUNK_BYTES", 1000)
    folder = stream(served.url)
    assert "its server sends whole files only, so a file that is cut comes again" in capsys.readouterr().err
    assert (folder / WEIGHTS).read_bytes() == (tiny_model_dir / WEIGHTS).read_bytes()


def test_what_the_cache_has_is_not_asked_for_again(served: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CHUNK_BYTES", 10_000)
    folder = Path(fetch_model(f"{served.url}/m"))
    size = (folder / WEIGHTS).stat().st_size
    chunks = [end - start for name, start, end in served.asked if name == WEIGHTS]
    assert sum(chunks) == size and max(chunks) == 10_000, "its list has no sizes, yet it comes in chunks"
    assert stream(served.url) == folder and (folder / WEIGHTS).exists()


def test_a_head_that_is_damaged_names_the_file(served: FileServer, tmp_path: Path) -> None:
    file = tmp_path / "www" / "m" / WEIGHTS
    content = file.read_bytes()
    for damaged, trouble in (
        (b"\xff" * 100, "in its header"),
        (content[:-1], "at tensor"),
        (content[:9] + b"x" + content[10:], "is not valid JSON"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{WEIGHTS} is damaged or cut short.*{trouble}|{trouble}"):
            stream(served.url)
    assert not list((tmp_path / "cache" / "mbd-cluster" / "streamed").glob("[!.]*/m")), "nothing half-written is taken"


def test_a_slice_is_that_of_the_tensor(served: FileServer, tiny_model_dir: Path) -> None:
    file = StreamedFile.at(stream(served.url) / WEIGHTS)
    assert file is not None and not stub_of(tiny_model_dir / WEIGHTS).exists()
    tensors = StreamedTensors(RangeReader(file))
    name = next(name for name in tensors.keys() if len(file.tensors[name]["shape"]) == 2)  # noqa: SIM118
    whole = tensors.get_tensor(name)
    for where in ((slice(1, 3),), (slice(None), slice(2, 5)), (slice(-2, None), slice(0, 1)), (slice(3, 3),)):
        assert torch.equal(tensors.get_slice(name)[where], whole[where])
