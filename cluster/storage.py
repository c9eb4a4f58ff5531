"""Folders here or on remote storage: run folders, models and reports at any URL that fsspec knows.

A `Folder` is an absolute path, or a URL such as `s3://bucket/path`. Credentials and endpoint come from the
environment, as the storage's own library takes them (for S3 `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
`AWS_ENDPOINT_URL`).

The rules of `mbd_core.files` hold there too: a folder that exists is refused before any work, and replaced only if
its manifest says that the project wrote all of it. Object stores have no rename, and so no moment at which a folder
appears whole: it is written here and then uploaded. First comes an unfinished manifest, which claims the place, then
the files, and the manifest last. A folder with an unfinished manifest is not read, and may be replaced.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow.fs
from filelock import FileLock
from fsspec.implementations.local import LocalFileSystem

from mbd_core.files import (
    MANIFEST,
    PROBE,
    check_replaceable,
    check_target_folder,
    check_writable,
    is_named,
    make_parent,
    probe_folder,
    write_text,
)
from mbd_core.proxies import connection_note

UNFINISHED = f".{MANIFEST}.0.partial"
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# An endpoint that does not answer is given up within a minute, not after ten.
CONNECTION = {"connect_timeout": 10, "retries": {"max_attempts": 2, "mode": "standard"}}
OPTIONS: dict[str, dict[str, Any]] = {scheme: {"config_kwargs": CONNECTION} for scheme in ("s3", "s3a")}
STORAGE_URL = "https://s3.amazonaws.com"  # where requests go, as far as the choice of a proxy depends on it
VERSION_FIELDS = ("size", "ETag", "etag", "md5", "generation", "mtime", "LastModified", "last_modified", "created")
JOB_COPY = "working_dir_files"  # the folder of Ray's copies of a submitted job's working directory


@dataclass(frozen=True)
class Folder:
    """A folder, which need not exist. `location` is an absolute path or a URL; `Folder.at` takes what a user gives."""

    location: str

    def __post_init__(self) -> None:
        assert self.is_remote or os.path.isabs(self.location), self.location

    @classmethod
    def at(cls, text: str | Path) -> "Folder":
        """The folder that a user names by a path or a URL; `file://` is a path.

        Raises `ValueError` for an empty name, for a scheme that is not known or whose package is missing, and for a
        relative path in a submitted job, whose working directory is a copy that goes with the job.
        """
        text = str(text)
        if not text.strip():
            raise ValueError("an empty name is no folder; give a path, or a URL as s3://bucket/path")
        scheme = SCHEME.match(text)
        if scheme is not None and scheme[1].lower() not in ("file", "local"):
            _check_scheme(text, scheme[1])
            path = text[scheme.end() :].rstrip("/")
            if not path:
                raise ValueError(f"{text} names no folder; give one as {scheme[0]}bucket/path")
            return cls(scheme[0].lower() + path)
        local_path = Path(text) if scheme is None else Path(LocalFileSystem._strip_protocol(text))
        if not local_path.is_absolute() and JOB_COPY in Path.cwd().parts:
            raise ValueError(
                f"{text} is relative, and a submitted job runs in a copy of its working directory that is removed "
                "afterwards; give an absolute path or a URL"
            )
        return cls(os.path.abspath(local_path))

    def __str__(self) -> str:
        return self.location

    def __truediv__(self, name: str) -> "Folder":
        return Folder(f"{self.location.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.location.rpartition("/")[2]

    @property
    def is_remote(self) -> bool:
        return SCHEME.match(self.location) is not None

    @property
    def is_shared(self) -> bool:
        """Whether other processes see what is written there; `memory://` is each process's own."""
        return not self.location.startswith("memory://")

    @property
    def path(self) -> Path:
        """A local folder's path."""
        assert not self.is_remote, self.location
        return Path(self.location)

    def holds(self, other: "Folder") -> bool:
        """Whether `other` is this folder or lies in it."""
        return f"{other.location}/".startswith(f"{self.location.rstrip('/')}/")

    # Reading

    def exists(self) -> bool:
        """Whether anything lies there."""
        if not self.is_remote:
            return self.path.exists()
        with self._errors("cannot be read"):
            system, path = self._remote()
            return bool(system.exists(path))

    def read_text(self, name: str) -> str | None:
        """A file's text; `None` if there is no such file."""
        if not self.is_remote:
            file = self.path / name
            return file.read_text(encoding="utf-8") if file.exists() else None
        with self._errors("cannot be read"), suppress(FileNotFoundError):
            system, path = self._remote()
            return str(system.cat_file(f"{path}/{name}").decode("utf-8"))
        return None

    # Writing

    def check_writable(self) -> None:
        """Raise `ValueError` if no file can be made in the folder; on remote storage one is made and removed."""
        with self._errors("cannot be written", ValueError):
            if not self.is_remote:
                check_writable(self.path if self.path.is_dir() else self.path.parent, self.path)
                return
            system, path = self._remote()
            probe_folder(system, self.location, path)

    def check_target(self, kind: str, *, overwrite: bool = False, in_place: bool = False) -> None:
        """Raise `ValueError` if a folder of `kind` cannot be written here, as `files.check_target_folder` does."""
        with self._errors("cannot be written", ValueError):
            if not self.is_remote:
                check_target_folder(self.path, kind, overwrite=overwrite, in_place=in_place)
                return
            system, path = self._remote()
            files = _files(system, path)
            if "" in files:
                raise ValueError(f"{self} exists already and is not a folder; give a folder that is yet to be made")
            if files:
                manifest, names = _manifest(system, path, files), files.keys() - {MANIFEST, UNFINISHED}
                check_replaceable(self.location, manifest, names, kind, overwrite=overwrite)
        self.check_writable()

    def write_text(self, name: str, text: str) -> None:
        """Write a text file, whole or not at all. Raises `OSError`."""
        if not self.is_remote:
            write_text(self.path / name, text)
            return
        with self._errors(f"takes no {name}"):
            system, path = self._remote()
            self._put(system, f"{path}/{name}", text.encode("utf-8"))

    @contextmanager
    def staged(self, kind: str, *, overwrite: bool = False, keep: bool = False) -> Iterator[Path]:
        """The path where this folder is written: its own, or for a remote one a temporary folder, uploaded at the end.

        What is written there must carry its manifest (`mbd_core.files`). With `keep` the temporary folder stays if the
        body or the upload fails. Raises `ValueError` as `check_target` does, and `OSError` if the upload fails.
        """
        if not self.is_remote:
            yield self.path
            return
        stage = Path(tempfile.mkdtemp(prefix="mbd-stage-"))
        path = stage / (self.name or "folder")
        try:
            yield path
            self._upload(path, kind, overwrite=overwrite, has_copy=keep)
            keep = False
        finally:
            if not keep:
                shutil.rmtree(stage, ignore_errors=True)

    @contextmanager
    def mirrored(self, kind: str, files: Sequence[str]) -> Iterator["Mirror"]:
        """Where this folder, a claimed one (`mbd_core.files.claim_folder`), is written file by file: its own path, or
        for a remote one a temporary folder that begins with what lies there of `files`, patterns of names.

        Raises `ValueError` if it cannot be written, or holds something else than a folder of `kind`.
        """
        self.check_writable()
        if not self.is_remote:
            yield Mirror(self, self.path)
            return
        with self._errors("cannot be read", ValueError):
            system, path = self._remote()
            files_there = _files(system, path)
            if "" in files_there:
                raise ValueError(f"{self} exists already and is not a folder; give a folder that is yet to be made")
            manifest = _manifest(system, path, files_there)
            if files_there:
                check_replaceable(self.location, manifest, (), kind, overwrite=True)
            stage = Path(tempfile.mkdtemp(prefix="mbd-mirror-"))
            try:
                mirror = Mirror(self, stage / (self.name or "folder"))
                named_files = {
                    name: files_there[name]
                    for name in files_there
                    if any(is_named(name, pattern) for pattern in files)
                }
                if manifest is not None:
                    _download(system, path, named_files, mirror.path)
                    mirror.path.mkdir(exist_ok=True)  # there is no file yet where the first upload was interrupted
                    (mirror.path / MANIFEST).write_text(manifest, encoding="utf-8")
            except BaseException:
                shutil.rmtree(stage, ignore_errors=True)
                raise
        try:
            yield mirror
            mirror.close()
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def _upload(self, folder: Path, kind: str, *, overwrite: bool, has_copy: bool) -> None:
        self.check_target(kind, overwrite=overwrite)  # it may have been filled meanwhile
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        with self._errors("cannot be written" + (f"; what should lie there is in {folder}" if has_copy else "")):
            system, path = self._remote()
            files = _files(system, path)
            old_manifest = json.loads(_manifest(system, path, files) or '{"files": []}')
            claim = {**manifest, "files": [*manifest["files"], *old_manifest["files"]]}
            self._put(system, f"{path}/{UNFINISHED}", json.dumps(claim).encode())
            if MANIFEST in files:
                system.rm_file(f"{path}/{MANIFEST}")
            for name in names:
                make_parent(system, self.location, f"{path}/{name}")
                system.put_file(str(folder / name), f"{path}/{name}")
            for name in files.keys() - {*names, MANIFEST, UNFINISHED}:
                system.rm_file(f"{path}/{name}")
            self._put(system, f"{path}/{MANIFEST}", json.dumps(manifest, indent=2).encode())
            system.rm_file(f"{path}/{UNFINISHED}")

    # For libraries

    @property
    def options(self) -> Mapping[str, Any]:
        """What fsspec's filesystem for this folder is made with."""
        return OPTIONS.get(self.location.partition("://")[0], {})

    def for_ray(self) -> tuple[str, "pyarrow.fs.FileSystem | None"]:
        """`storage_path` and `storage_filesystem` of Ray Train; without the latter it writes to a local path."""
        if not self.is_remote:
            return str(self.path), None
        system, path = self._remote()
        return path, pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(system))

    def fetch(self, cache: Path) -> Path:
        """A remote folder's files in a local one of the same name below `cache`, downloaded once for each version.

        A version is what the storage says of the files: sizes, times, checksums. Raises `ValueError` if nothing lies
        there, if it was not written to its end, or if it changes meanwhile; the local folder is whole or not there.
        """
        with self._errors("cannot be read", ValueError):
            system, path = self._remote()
            files = _files(system, path)
            if not files or "" in files:
                raise ValueError(f"no folder lies at {self}; give the URL of one")
            if UNFINISHED in files:
                raise ValueError(f"{self.location} was not written to its end: another job writes it, or was stopped")
            version = _version(self.location, files)
            target = cache / version / (self.name or "folder")
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / f"{version}.lock"):
                if not target.exists():
                    _download(system, path, files, target)
                    if _version(self.location, _files(system, path)) != version:
                        shutil.rmtree(target.parent)
                        raise ValueError(f"{self.location} was changed while it was read; try again")
            return target

    # The storage

    def _remote(self) -> tuple[Any, str]:
        """The filesystem and the path on it."""
        # A listing that is kept would hide what others write.
        return fsspec.core.url_to_fs(self.location, use_listings_cache=False, **self.options)

    def _put(self, system: Any, file: str, content: bytes) -> None:
        make_parent(system, self.location, file)
        system.pipe_file(file, content)

    @contextmanager
    def _errors(self, trouble: str, kind: Callable[[str], Exception] = OSError) -> Iterator[None]:
        """Make one sentence of what the storage raises. A `ValueError` is a sentence of ours already."""
        try:
            yield
        except ValueError:
            raise
        except Exception as error:  # each storage raises types of its own
            reason = " ".join(str(error).split()) or type(error).__name__
            note = connection_note(error, os.environ.get("AWS_ENDPOINT_URL", STORAGE_URL))
            raise kind(f"{self.location} {trouble}: {reason}{note}") from error


class Mirror:
    """A folder that fills file by file: its files are written at `path`, on this machine, and appear at `target`.

    A remote one holds the manifest of an unfinished folder until it is closed.
    """

    def __init__(self, target: Folder, path: Path) -> None:
        self.target, self.path, self._is_begun = target, path, False

    def publish(self, name: str) -> None:
        """Show at the target that a file was written, or removed. Raises `OSError`."""
        if not self.target.is_remote:
            return
        with self.target._errors("cannot be written"):
            system, path = self.target._remote()
            if not self._is_begun:
                self.target._put(system, f"{path}/{UNFINISHED}", (self.path / MANIFEST).read_bytes())
                if system.exists(f"{path}/{MANIFEST}"):
                    system.rm_file(f"{path}/{MANIFEST}")
                self._is_begun = True
            if (self.path / name).exists():
                make_parent(system, self.target.location, f"{path}/{name}")
                system.put_file(str(self.path / name), f"{path}/{name}")
            elif system.exists(f"{path}/{name}"):
                system.rm_file(f"{path}/{name}")

    def close(self) -> None:
        """Say that the folder is whole."""
        if not self._is_begun:
            return
        with self.target._errors("cannot be written"):
            system, path = self.target._remote()
            self.target._put(system, f"{path}/{MANIFEST}", (self.path / MANIFEST).read_bytes())
            system.rm_file(f"{path}/{UNFINISHED}")


def fetch_model(model: str, *, cache: Path | None = None) -> str:
    """What `model_folder` takes for a model that is given by name, path or URL: a remote folder is downloaded first.

    It goes to `cache`, by default the user's (`XDG_CACHE_HOME`), once for each version. Raises `ValueError` if it
    cannot be read.
    """
    if SCHEME.match(model) is None:
        return model
    folder = Folder.at(model)
    return str(folder.fetch(cache or _user_cache()) if folder.is_remote else folder.path)


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mbd-cluster" / "models"


def _check_scheme(url: str, scheme: str) -> None:
    """Raise `ValueError` for a scheme that fsspec does not know, or whose package is not installed."""
    try:
        fsspec.get_filesystem_class(scheme.lower())
    except ImportError as error:
        hint = "install mbd-cluster[s3]" if scheme.lower() in ("s3", "s3a") else str(error)
        raise ValueError(f"{url} needs a package that is not installed: {hint}") from error
    except ValueError:
        raise ValueError(
            f"{url} cannot be reached: unknown scheme '{scheme}'; give a path, or a URL as s3://..."
        ) from None


def _files(system: Any, path: str) -> dict[str, Mapping[str, Any]]:
    """Every file below the path, by its name relative to it; the empty name if the path itself is a file."""
    try:
        paths = system.find(path, detail=True)
    except FileNotFoundError:
        return {}
    start = len(path.strip("/"))
    names = {file.strip("/")[start:].strip("/"): information for file, information in paths.items()}
    return {name: information for name, information in names.items() if not name.startswith(PROBE)}


def _manifest(system: Any, path: str, files: Mapping[str, Any]) -> str | None:
    """The manifest's text, the unfinished one's where a folder was not written to its end."""
    name = next((name for name in (UNFINISHED, MANIFEST) if name in files), None)
    return None if name is None else str(system.cat_file(f"{path}/{name}").decode("utf-8"))


def _version(location: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    versions = [(name, [str(files[name].get(field)) for field in VERSION_FIELDS]) for name in sorted(files)]
    return hashlib.sha256(json.dumps([location, versions]).encode()).hexdigest()[:16]


def _download(system: Any, path: str, files: Mapping[str, Any], target: Path) -> None:
    """Download the files to a folder beside the target, which then takes the target's name."""
    stage = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent.parent))
    try:
        for name in files:
            if ".." in PurePosixPath(name).parts:
                raise ValueError(f"{path}/{name} would be written outside of its folder")
            file = stage / target.name / name
            file.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(f"{path}/{name}", str(file))
        stage.chmod(0o755)
        stage.rename(target.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
