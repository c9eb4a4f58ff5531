"""A folder at a URL is downloaded once a machine: resumed, compared with its digests, whole or not there."""

import errno
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import pytest

from mbd_core.files import MANIFEST, folder_beside
from mbd_core.storage import download, remote
from mbd_core.storage.cache import FolderCache
from mbd_core.storage.folder import Folder
from mbd_core.storage.models import fetch_model

ROOT = Path(__file__).resolve().parents[2]
CONTENT = {"a.bin": "0123456789" * 10, "deep/b.bin": "abcdefghij" * 10, "empty": ""}
NUM_CHUNKS = 7 + 7 + 1  # of 16 bytes


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CHUNK_BYTES", 16)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A folder in this process's memory that the project has uploaded."""
    return upload(Folder.at(f"memory://{tmp_path.name}/model"))


def upload(folder: Folder, files: dict[str, str] = CONTENT) -> Folder:
    with folder.staged("model", overwrite=True) as path, folder_beside(path, "model") as beside:
        for name, text in files.items():
            (beside / name).parent.mkdir(exist_ok=True)
            (beside / name).write_text(text)
    return folder


def texts(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def when_read(folder: Folder, monkeypatch: pytest.MonkeyPatch, call: Callable[[str, int | None], None]) -> None:
    """Lets `call` see each range that is read of the folder's files, before it is read."""
    kind = type(folder.filesystem()[0])
    cat_file = kind.cat_file

    def watched(self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        call(path.partition("/model/")[2], start)
        return cat_file(self, path, start=start, end=end, **options)

    monkeypatch.setattr(kind, "cat_file", watched)


def test_what_is_fetched_is_what_lies_there(folder: Folder, s3: str, tmp_path: Path) -> None:
    on_s3 = upload(Folder.at(f"{s3}/{tmp_path.name}/model"))
    for place in (folder, on_s3):
        fetched = place.fetch(tmp_path / place.location.partition(":")[0])
        assert texts(fetched) == CONTENT and fetched.name == "model"
        assert set(json.loads((fetched / MANIFEST).read_text())[download.DIGESTS]) == {*CONTENT}
        assert [path.name for path in fetched.parent.iterdir()] == ["model"], "no journal stays"


def test_a_fetch_that_was_cut_off_goes_on_where_it_was(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, int | None]] = []

    def cut_off(name: str, start: int | None) -> None:
        if name in CONTENT:
            read.append((name, start))
        if len(read) >= 9:
            raise ConnectionError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(download, "NUM_STREAMS", 1)
        patch.setattr(download, "as_completed", lambda futures: [*as_completed(futures)][::-1])  # the error first
        when_read(folder, patch, cut_off)
        with pytest.raises(ValueError, match=r"model cannot be read: the network is down \(what has come is kept"):
            folder.fetch(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").glob("*/model") if not path.parent.name.startswith(".")]
    first, read = {*read[:8]}, []
    when_read(folder, monkeypatch, lambda name, start: read.append((name, start)))
    assert texts(folder.fetch(tmp_path / "cache")) == CONTENT
    again = [each for each in read if each[0] in CONTENT]
    assert len(again) == NUM_CHUNKS - 8 and not first & {*again}


def test_a_version_that_changes_meanwhile_is_begun_anew(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, whole = tmp_path / "cache", remote.download

    def changed(*arguments: Any, **options: Any) -> None:
        whole(*arguments, **options)
        folder.write_text("a.bin", "other")

    with monkeypatch.context() as patch:
        patch.setattr(remote, "download", changed)
        with pytest.raises(ValueError, match="was changed while it was read"):
            folder.fetch(cache)
    assert not list(cache.rglob("*.bin"))


def test_the_old_version_stays_and_what_was_begun_of_it_goes(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = folder.fetch(cache)

    def fails(*_: Any) -> None:
        raise ConnectionError("down")

    upload(folder, {"a.bin": "second" * 9})
    with monkeypatch.context() as patch:
        when_read(folder, patch, lambda name, _: fails() if name == "a.bin" else None)
        with pytest.raises(ValueError):
            folder.fetch(cache)
    assert texts(first) == CONTENT and len(list(cache.glob(".*.partial"))) == 1
    upload(folder, {"a.bin": "third"})
    assert texts(folder.fetch(cache)) == {"a.bin": "third"} and texts(first) == CONTENT
    assert not list(cache.glob(".*.partial"))


def test_a_file_that_is_damaged_on_the_way_is_named_and_not_kept(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(folder.filesystem()[0])
    cat_file = kind.cat_file

    def damaged(self: Any, path: str, **bounds: Any) -> Any:
        content = cat_file(self, path, **bounds)
        return content.replace(b"7", b"8") if path.endswith("a.bin") else content

    with monkeypatch.context() as patch:
        patch.setattr(kind, "cat_file", damaged)
        with pytest.raises(ValueError, match=r"model/a\.bin has the sha256 .* damaged"):
            folder.fetch(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.bin"))
    folder.write_text("a.bin", "somebody's")  # after the manifest: it is what is wanted
    assert texts(folder.fetch(tmp_path / "cache"))["a.bin"] == "somebody's"


def test_a_disk_that_is_full_is_one_sentence(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    old = folder.fetch(cache)
    upload(folder, {"a.bin": "second" * 9})
    with monkeypatch.context() as patch:
        usage = download.shutil.disk_usage(tmp_path)._replace(free=10)
        patch.setattr(download.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(ValueError, match=r"model does not fit .* and 10 are free; older versions .*") as refusal:
            folder.fetch(cache)
    assert str(old.parent) in str(refusal.value)

    def no_space(name: str, _: int | None) -> None:
        if name == "a.bin":
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        when_read(folder, patch, no_space)
        with pytest.raises(ValueError, match=r"does not fit on the disk of .*: No space left on device; older"):
            folder.fetch(cache)
    assert texts(folder.fetch(cache)) == {"a.bin": "second" * 9}


def test_a_cache_that_cannot_be_written_is_one_sentence(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"file/cache cannot be written: .*; set XDG_CACHE_HOME"):
        folder.fetch(tmp_path / "file" / "cache")


FETCH = """
import sys, time
from pathlib import Path
from mbd_core.storage.cache import FolderCache

def fill(path):
    print("filling", flush=True)
    path.mkdir(exist_ok=True)
    time.sleep(float(sys.argv[2]))
    (path / "weights").write_text("whole")

print(FolderCache(Path(sys.argv[1])).filled("key", "model", fill, resumes=True) / "weights", flush=True)
"""


def test_of_many_processes_one_fetches_and_the_others_wait(tmp_path: Path) -> None:
    def start(seconds: float) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", FETCH, str(tmp_path), str(seconds)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    killed = start(60)
    assert killed.stdout is not None and killed.stdout.readline() == "filling\n"
    others = [start(0) for _ in range(3)]
    time.sleep(1)
    killed.kill()
    killed.wait()
    printed = [child.communicate(timeout=60)[0].splitlines() for child in others]
    assert sum(lines[:-1] == ["filling"] for lines in printed) == 1
    assert {lines[-1] for lines in printed} == {str(tmp_path / "key" / "model" / "weights")}
    assert (tmp_path / "key" / "model" / "weights").read_text() == "whole"


def test_a_fetch_that_takes_long_shows_how_far_it_is(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.fetch(tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(download, "SILENT_SECONDS", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "loud"))
    path = Path(fetch_model(folder.location))
    assert path.is_relative_to(tmp_path / "loud") and FolderCache.of_user().path in path.parents
    assert f"fetching {folder.location}: 100%" in capsys.readouterr().err
