"""Downloads of a remote folder: in chunks, by several streams; an interrupted download resumes with its missing
chunks.

A chunk is written at its place in the file and then named in a journal beside the folder. The digests of a folder that
the project uploaded stand in its manifest (`add_digests`), and are compared at the end.
"""

import errno
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from tqdm import tqdm

from mbd_core.files import MANIFEST

CHUNK_BYTES = 32 * 2**20
NUM_STREAMS = 4
SILENT_SECONDS = 3.0  # a download that is done by then shows no progress
DIGESTS = "sha256"  # a manifest's field: the digest of each file, by its name
JOURNAL = "chunks"
WRITTEN_FIELDS = ("LastModified", "last_modified", "mtime", "updated", "created")


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a file; `end` is `None` if the storage does not say how long the file is."""

    name: str
    start: int
    end: int | None

    @property
    def num_bytes(self) -> int:
        return 0 if self.end is None else self.end - self.start

    def __str__(self) -> str:
        return json.dumps([self.name, self.start, self.end])


def chunks_of(files: Mapping[str, Mapping[str, Any]], *, whole: bool = False) -> Iterator[ByteRange]:
    """The chunks of files, by their names, with the storage's information on them; `whole` files are one chunk."""
    for name, information in files.items():
        size: int | None = information.get("size")
        length = (size or 1) if whole else CHUNK_BYTES
        if not size:
            yield ByteRange(name, 0, size)
        for start in range(0, size or 0, length):
            yield ByteRange(name, start, min(start + length, size or 0))


def serves_ranges(system: Any, path: str, files: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether parts of the files of a folder can be read. Some HTTP servers send the whole file instead."""
    protocols = (system.protocol,) if isinstance(system.protocol, str) else system.protocol
    sizes = {name: information.get("size") or 0 for name, information in files.items()}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    if "http" not in protocols or not sizes:
        return True
    smallest = min(sizes, key=sizes.__getitem__)
    return len(system.cat_file(f"{path}/{smallest}", start=0, end=1)) == 1


def download(
    system: Any, path: str, files: Mapping[str, Mapping[str, Any]], target: Path, *, location: str, remedy: str = ""
) -> None:
    """Download the files of the folder `path` on an fsspec filesystem to the folder `target`.

    Chunks that an earlier call has written there are kept. Messages name the folder by `location`; `remedy` ends the
    message about a full disk. Raises `ValueError` if the disk is full or a digest differs, and the storage's errors.
    """
    for name in files:
        if ".." in PurePosixPath(name).parts:
            raise ValueError(f"{path}/{name} would be written outside of its folder")
    target.mkdir(parents=True, exist_ok=True)
    journal = target.parent / JOURNAL
    known = set(journal.read_text().splitlines()) if journal.exists() else set()
    whole = not serves_ranges(system, path, files)
    if whole:
        print(f"{location}: its server sends whole files only, so a file that is cut comes again", file=sys.stderr)
    chunks = list(chunks_of(files, whole=whole))
    missing = [chunk for chunk in chunks if str(chunk) not in known]
    total, wanted = (sum(chunk.num_bytes for chunk in some) for some in (chunks, missing))
    free = shutil.disk_usage(target).free
    if free < wanted:
        raise ValueError(_full(location, target, f"{wanted:,} bytes are to come and {free:,} are free", remedy))
    for name in {chunk.name for chunk in chunks}:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).touch()

    def fetch(chunk: ByteRange) -> None:
        if whole:
            system.get_file(f"{path}/{chunk.name}", str(target / chunk.name))
            _check_length(chunk, (target / chunk.name).stat().st_size)
            return
        content = system.cat_file(f"{path}/{chunk.name}", start=chunk.start, end=chunk.end)
        _check_length(chunk, len(content))
        with (target / chunk.name).open("r+b") as file:
            file.seek(chunk.start)
            file.write(content)

    with (
        _errors_that_say_what_is_kept(location, target, remedy),
        journal.open("a") as done,
        _bar(location, total, total - wanted) as bar,
        ThreadPoolExecutor(NUM_STREAMS) as streams,
    ):
        noting = Lock()

        def fetch_and_note(chunk: ByteRange) -> None:
            fetch(chunk)
            with noting:  # in the chunk's own thread, so that another chunk's error does not lose it
                done.write(f"{chunk}\n")
                done.flush()
                bar.update(chunk.num_bytes)

        futures = [streams.submit(fetch_and_note, chunk) for chunk in missing]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            streams.shutdown(wait=False, cancel_futures=True)
            raise
    _check_digests(target, files, location)
    journal.unlink()


def _check_length(chunk: ByteRange, length: int) -> None:
    if chunk.end is not None and length != chunk.num_bytes:
        raise OSError(f"{chunk.name} gave {length:,} bytes where {chunk.num_bytes:,} were asked for")


def add_digests(manifest: dict[str, Any], folder: Path, names: list[str]) -> None:
    """Note in a manifest the digests of these files of a folder."""
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        manifest[DIGESTS] = dict(zip(names, threads.map(_digest, (folder / name for name in names)), strict=True))


def _check_digests(folder: Path, files: Mapping[str, Mapping[str, Any]], location: str) -> None:
    """Compare the files with the manifest's digests, except files that were written after the manifest."""
    try:
        digests = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))[DIGESTS]
    except (OSError, ValueError, KeyError, TypeError):  # there are no digests
        return
    noted_at = _written_at(files[MANIFEST])
    wanted = {name: digest for name, digest in digests.items() if name in files}
    wanted = {name: wanted[name] for name in wanted if noted_at is None or _written_at(files[name]) <= noted_at}
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        found = dict(zip(wanted, threads.map(_digest, (folder / name for name in wanted)), strict=True))
    for name, digest in wanted.items():
        if found[name] != digest:
            shutil.rmtree(folder.parent)
            raise ValueError(
                f"{location}/{name} has the sha256 {found[name]}, and its {MANIFEST} says {digest}: it was damaged on "
                "the way or lies there damaged; try again, or upload it again"
            )


def _written_at(information: Mapping[str, Any]) -> Any:
    """When a file was written, in the storage's own terms; `None` if it does not say."""
    return next((information[field] for field in WRITTEN_FIELDS if information.get(field) is not None), None)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextmanager
def _errors_that_say_what_is_kept(location: str, target: Path, remedy: str) -> Iterator[None]:
    """Adds to the storage's error that the chunks are kept. A full disk's error becomes a `ValueError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(_full(location, target, str(error.strerror), remedy)) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        kept = "what has come is kept, and the same command goes on from there"
        raise OSError(f"{reason} ({kept})") from error


def _full(location: str, target: Path, reason: str, remedy: str) -> str:
    return f"{location} does not fit on the disk of {target.parent.parent}: {reason}{remedy}"


def _bar(location: str, total: int, num_done: int) -> "tqdm[Any]":
    return tqdm(
        total=total,
        initial=num_done,
        unit="B",
        unit_scale=True,
        desc=f"fetching {location}",
        delay=SILENT_SECONDS,
        mininterval=0.5 if sys.stderr.isatty() else 15.0,
    )
