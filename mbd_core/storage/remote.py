"""A folder on remote storage.

Object stores have no rename, so no folder can appear complete at one moment. A folder is written on this machine and
then uploaded: first an unfinished manifest, which claims the place, then the files, and the manifest last. A folder
with an unfinished manifest is not read, and may be replaced.
"""

import itertools
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbd_core.files import MANIFEST, check_replaceable, is_named, manifest_kind, manifest_text
from mbd_core.storage import remote_files
from mbd_core.storage.cache import FolderCache
from mbd_core.storage.download import add_digests, download, serves_ranges
from mbd_core.storage.errors import TakenOver, storage_errors
from mbd_core.storage.remote_files import (
    OPTIONS,
    UNFINISHED,
    list_files,
    make_parent,
    open_storage,
    put,
    read_manifest,
    version_of,
)
from mbd_core.storage.streamed import StreamedFile, is_streamed


@dataclass(frozen=True)
class RemotePlace:
    """A folder at a URL; its methods are described in `Folder`."""

    location: str

    @property
    def name(self) -> str:
        return self.location.rpartition("/")[2] or "folder"

    @property
    def options(self) -> Mapping[str, Any]:
        """The arguments of fsspec's filesystem for this folder."""
        return OPTIONS.get(self.location.partition("://")[0], {})

    def filesystem(self) -> tuple[Any, str]:
        return open_storage(self.location)

    def errors(self, trouble: str, kind: Callable[[str], Exception] = OSError) -> AbstractContextManager[None]:
        return storage_errors(self.location, trouble, kind)

    def exists(self) -> bool:
        with self.errors("cannot be read"):
            system, path = self.filesystem()
            return bool(system.exists(path))

    def read_bytes(self, name: str) -> bytes | None:
        with self.errors("cannot be read"), suppress(FileNotFoundError):
            system, path = self.filesystem()
            return bytes(system.cat_file(f"{path}/{name}"))
        return None

    def has(self, name: str) -> bool:
        with self.errors("cannot be read"):
            system, path = self.filesystem()
            return bool(system.isfile(f"{path}/{name}"))

    def files(self, pattern: str) -> list[str]:
        top = "/".join(itertools.takewhile(lambda part: "*" not in part, Path(pattern).parent.parts))
        with self.errors("cannot be read"):
            system, path = self.filesystem()
            names = (str(Path(top, name)) for name in list_files(system, f"{path}/{top}".rstrip("/")) if name)
            return [name for name in names if is_named(name, pattern)]

    @contextmanager
    def local_file(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="mbd-stage-") as stage:
            file = Path(stage, Path(name).name)
            with self.errors("cannot be read"):
                system, path = self.filesystem()
                system.get_file(f"{path}/{name}", str(file))
            yield file

    def check_writable(self) -> None:
        with self.errors("cannot be written", ValueError):
            system, path = self.filesystem()
            remote_files.probe_folder(system, self.location, path)

    def check_target(self, kind: str, *, overwrite: bool, in_place: bool) -> None:
        with self.errors("cannot be written", ValueError):
            system, path = self.filesystem()
            files = self._files(system, path)
            if files:
                manifest, names = read_manifest(system, path, files), files.keys() - {MANIFEST, UNFINISHED}
                check_replaceable(self.location, manifest, names, kind, overwrite=overwrite)
        self.check_writable()

    def write_bytes(self, name: str, content: bytes) -> None:
        with self.errors(f"takes no {name}"):
            system, path = self.filesystem()
            put(system, self.location, f"{path}/{name}", content)

    def write_file(self, name: str, source: Path) -> None:
        with self.errors(f"takes no {name}"):
            system, path = self.filesystem()
            make_parent(system, self.location, f"{path}/{name}")
            system.put_file(str(source), f"{path}/{name}")

    @contextmanager
    def staged_file(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="mbd-stage-") as stage:
            file = Path(stage, Path(name).name)
            yield file
            self.write_file(name, file)

    def remove(self, name: str) -> None:
        with self.errors("cannot be written"), suppress(FileNotFoundError):
            system, path = self.filesystem()
            system.rm_file(f"{path}/{name}")

    def claim(self, kind: str, files: Sequence[str], *, lock: str) -> "RemoteClaim":
        if manifest_kind((self.read_bytes(MANIFEST) or b"").decode()) != kind:
            self.check_target(kind, overwrite=False, in_place=True)
        with self.errors("cannot be written", ValueError):
            system, path = self.filesystem()
            put(system, self.location, f"{path}/{MANIFEST}", manifest_text(kind, files).encode())
        return RemoteClaim(self, lock)

    def growing(self, name: str) -> "RemoteText":
        return RemoteText(self, name)

    def workspace(self) -> "RemoteWorkspace":
        return RemoteWorkspace(self)

    @contextmanager
    def staged(self, kind: str, *, overwrite: bool, keep: bool) -> Iterator[Path]:
        stage = Path(tempfile.mkdtemp(prefix="mbd-stage-"))
        path = stage / self.name
        try:
            yield path
            self._upload(path, kind, overwrite=overwrite, has_copy=keep)
            keep = False
        finally:
            if not keep:
                shutil.rmtree(stage, ignore_errors=True)

    @contextmanager
    def mirrored(self, kind: str, files: Sequence[str]) -> Iterator["RemoteMirror"]:
        self.check_writable()
        with self.errors("cannot be read", ValueError):
            system, path = self.filesystem()
            files_there = self._files(system, path)
            manifest = read_manifest(system, path, files_there)
            if files_there:
                check_replaceable(self.location, manifest, (), kind, overwrite=True)
            stage = Path(tempfile.mkdtemp(prefix="mbd-mirror-"))
            try:
                mirror = RemoteMirror(self, stage / self.name)
                named_files = {
                    name: files_there[name]
                    for name in files_there
                    if any(is_named(name, pattern) for pattern in files)
                }
                if manifest is not None:
                    download(system, path, named_files, mirror.path, location=self.location)
                    mirror.path.mkdir(exist_ok=True)  # an interrupted first upload leaves no file
                    (mirror.path / MANIFEST).write_text(manifest, encoding="utf-8")
            except BaseException:
                shutil.rmtree(stage, ignore_errors=True)
                raise
        try:
            yield mirror
            mirror.close()
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def fetch(self, cache: Path, *, stubs: Path | None = None) -> Path:
        with self.errors("cannot be read", ValueError):
            system, path = self.filesystem()
            files = list_files(system, path)
            if not files or "" in files:
                raise ValueError(f"no folder lies at {self.location}; give the URL of one")
            if UNFINISHED in files:
                raise ValueError(f"{self.location} was not written to its end: another job writes it, or was stopped")
            source, version = version_of(self.location, files)
            entries, key, streamed = FolderCache(cache), f"{source}-{version}", set[str]()
            if stubs is not None and not entries.folder(key, self.name).exists():
                streamed = {name for name in files if is_streamed(name)}
            if stubs is not None and streamed and serves_ranges(system, path, files):
                entries = FolderCache(stubs)
            else:
                streamed.clear()

            def fill(target: Path) -> None:
                entries.forget_unfinished(source, key)
                old = ", ".join(map(str, entries.others(source, key)))
                remedy = f"; older versions of it can be removed: {old}" if old else "; set XDG_CACHE_HOME to another"
                wanted = {name: files[name] for name in files if name not in streamed}
                download(system, path, wanted, target, location=self.location, remedy=remedy)
                for name in sorted(streamed):
                    StreamedFile.asked(self.location, name).write_stub(target)
                if version_of(self.location, list_files(system, path)) != (source, version):
                    shutil.rmtree(target.parent)
                    raise ValueError(f"{self.location} was changed while it was read; try again")

            return entries.filled(key, self.name, fill, resumes=True)

    def _files(self, system: Any, path: str) -> dict[str, Mapping[str, Any]]:
        """The files of a folder that is to be written; `ValueError` if a file lies in its place."""
        files = list_files(system, path)
        if "" in files:
            raise ValueError(
                f"{self.location} exists already and is not a folder; give a folder that is yet to be made"
            )
        return files

    def _upload(self, folder: Path, kind: str, *, overwrite: bool, has_copy: bool) -> None:
        self.check_target(kind, overwrite=overwrite, in_place=False)  # it may have been filled meanwhile
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        add_digests(manifest, folder, names)
        with self.errors("cannot be written" + (f"; what should lie there is in {folder}" if has_copy else "")):
            system, path = self.filesystem()
            files = list_files(system, path)
            old_manifest = json.loads(read_manifest(system, path, files) or '{"files": []}')
            claim = {**manifest, "files": [*manifest["files"], *old_manifest["files"]]}
            put(system, self.location, f"{path}/{UNFINISHED}", json.dumps(claim).encode())
            if MANIFEST in files:
                system.rm_file(f"{path}/{MANIFEST}")
            for name in names:
                make_parent(system, self.location, f"{path}/{name}")
                system.put_file(str(folder / name), f"{path}/{name}")
            for name in files.keys() - {*names, MANIFEST, UNFINISHED}:
                system.rm_file(f"{path}/{name}")
            put(system, self.location, f"{path}/{MANIFEST}", json.dumps(manifest, indent=2).encode())
            system.rm_file(f"{path}/{UNFINISHED}")


class RemoteClaim:
    """The claim of the process that wrote its name into the folder last."""

    def __init__(self, place: RemotePlace, lock: str) -> None:
        self._place, self._lock = place, lock
        self._name = f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})".encode()
        place.write_bytes(lock, self._name)

    def check(self) -> None:
        name = self._place.read_bytes(self._lock)
        if name != self._name:
            other = "another process" if name is None else name.decode(errors="replace")
            raise TakenOver(f"{self._place.location} was taken over by {other}, and this process writes no more there")

    def close(self) -> None:
        with suppress(TakenOver, OSError):  # a process that has taken the folder over keeps it
            self.check()
            self._place.remove(self._lock)


class RemoteText:
    """A file that is written completely whenever `flush` is called: object stores cannot append."""

    def __init__(self, place: RemotePlace, name: str) -> None:
        self._place, self._name = place, name
        self._lines: list[str] = []

    def replace(self, text: str) -> None:
        self._lines = [text]
        self.flush()

    def append(self, line: str) -> None:
        self._lines.append(line)

    def flush(self) -> None:
        self._place.write_bytes(self._name, "".join(self._lines).encode())


class RemoteWorkspace:
    """A temporary folder whose files are uploaded. It ends with the process at the latest."""

    def __init__(self, place: RemotePlace) -> None:
        self._place = place
        self._temporary = tempfile.TemporaryDirectory(prefix="mbd-workspace-", ignore_cleanup_errors=True)
        self.path = Path(self._temporary.name)

    def flush(self) -> None:
        for file in self.path.iterdir():
            self._place.write_file(file.name, file)

    def close(self) -> None:
        self._temporary.cleanup()


class RemoteMirror:
    """A temporary folder whose files are uploaded one by one, below an unfinished manifest until it is closed."""

    def __init__(self, place: RemotePlace, path: Path) -> None:
        self._place, self.path, self._is_begun = place, path, False

    def publish(self, name: str) -> None:
        with self._place.errors("cannot be written"):
            system, path = self._place.filesystem()
            if not self._is_begun:
                put(system, self._place.location, f"{path}/{UNFINISHED}", (self.path / MANIFEST).read_bytes())
                if system.exists(f"{path}/{MANIFEST}"):
                    system.rm_file(f"{path}/{MANIFEST}")
                self._is_begun = True
            if (self.path / name).exists():
                make_parent(system, self._place.location, f"{path}/{name}")
                system.put_file(str(self.path / name), f"{path}/{name}")
            elif system.exists(f"{path}/{name}"):
                system.rm_file(f"{path}/{name}")

    def close(self) -> None:
        if not self._is_begun:
            return
        with self._place.errors("cannot be written"):
            system, path = self._place.filesystem()
            put(system, self._place.location, f"{path}/{MANIFEST}", (self.path / MANIFEST).read_bytes())
            system.rm_file(f"{path}/{UNFINISHED}")
