"""What lies at a path is compared in a few bytes, and copied whole, once."""

import os
import time
from pathlib import Path

import pytest
from filelock import FileLock

from mbd_core.storage import contents
from mbd_core.storage.contents import SAMPLE, UNUSED_DAYS, Copy, contents_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "parts").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "empty").touch()
    (folder / "parts" / "weights").write_bytes(bytes(range(256)) * 1024)
    return folder


def test_equal_contents_are_equal_wherever_they_lie(folder: Path, tmp_path: Path) -> None:
    before = contents_of(folder)
    assert before is not None and before.size == 2 + 256 * 1024
    (folder / ".cache").write_text("what is hidden counts for nothing")
    assert contents_of(folder) == before
    assert contents_of(folder.rename(tmp_path / "other")) == before
    assert contents_of(folder) is None and contents_of(tmp_path / "other" / "config.json") is not None


@pytest.mark.parametrize("place", [0, SAMPLE - 1, 256 * 1024 - 1, -1])
def test_a_changed_byte_at_the_beginning_or_end_is_seen(folder: Path, place: int) -> None:
    file, before = folder / "parts" / "weights", contents_of(folder)
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert contents_of(folder) != before


def test_a_name_and_a_size_are_seen(folder: Path) -> None:
    before = contents_of(folder)
    (folder / "empty").rename(folder / "void")
    renamed = contents_of(folder)
    assert renamed != before
    (folder / "void").write_text("x")
    assert contents_of(folder) not in (before, renamed)


def test_a_copy_is_whole_and_made_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "CHUNK", 100_000)
    chunks: list[bytes] = []
    copy = Copy.of(folder, lambda chunk: chunks.append(chunk) or len(chunks) - 1)
    assert len(chunks) == 4, "a file of 2 bytes, none, and one of three chunks"
    taken: list[int] = []

    def get(number: int) -> bytes:
        taken.append(number)
        return chunks[number]

    cache = tmp_path / "cache"
    there = copy.unpacked(cache, get)
    assert there.name == "model" and contents_of(there) == contents_of(folder)
    assert copy.unpacked(cache, get) == there and taken == [0, 1, 2, 3]


def test_a_copy_that_breaks_off_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    def broken(chunk: object) -> bytes:
        raise OSError("No space left on device")

    copy = Copy.of(folder, lambda chunk: chunk)
    with pytest.raises(OSError, match=r"takes no copy of model: No space left"):
        copy.unpacked(tmp_path / "cache", broken)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert contents_of(copy.unpacked(tmp_path / "cache", lambda chunk: chunk)) == contents_of(folder)


def test_a_file_is_copied_under_its_name(folder: Path, tmp_path: Path) -> None:
    copy = Copy.of(folder / "config.json", lambda chunk: chunk)
    there = copy.unpacked(tmp_path / "cache", lambda chunk: chunk)
    assert there.name == "config.json" and there.read_text() == "{}"


def test_a_copy_that_nobody_asks_for_is_removed_when_the_next_is_written(folder: Path, tmp_path: Path) -> None:
    cache, chunks = tmp_path / "cache", list[bytes]()

    def unpacked(text: str) -> Path:
        (folder / "config.json").write_text(text)
        return Copy.of(folder, lambda chunk: chunks.append(chunk) or len(chunks) - 1).unpacked(
            cache, chunks.__getitem__
        )

    old, asked_for, in_work, young = map(unpacked, ("1", "2", "3", "4"))
    long_ago = time.time() - (UNUSED_DAYS + 1) * 86400
    for copy in (old, asked_for, in_work):
        os.utime(copy.parent, (long_ago, long_ago))
    assert unpacked("2") == asked_for
    with FileLock(cache / f"{in_work.parent.name}.lock"):
        unpacked("5")
    assert [copy.exists() for copy in (old, asked_for, in_work, young)] == [False, True, True, True]
    assert not list(cache.glob(".*.partial"))
