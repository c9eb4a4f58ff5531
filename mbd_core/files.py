"""Safe writing of files and folders: nothing existing is lost, and no file is left half-written.

A command checks its target before it begins (`check_new_file`, `check_target_folder`). Files and folders are written
beside their place and renamed (`file_beside`, `folder_beside`), or, if results come one by one, into a folder that was
claimed for them (`PartsFolder`). A folder that the project wrote carries a manifest: its kind, and which files in it
are the project's. Only such a folder may be replaced, and only if it holds nothing else.
"""

import errno
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

MANIFEST = "mbd-manifest.json"
LOCK, REPLACED = "lock", "replaced"  # beside a folder that is being written, while it is hidden
PARTIAL = re.compile(r"\.(?P<name>.+)\.\d+\.partial(\.[^.]+)?")


def check_new_file(path: Path) -> None:
    """Raise `ValueError` if `path` is there already, or if a file cannot be written there."""
    check_name(path)
    if path.exists() or path.is_symlink():
        raise ValueError(f"{path} exists already; give a file that is yet to be written")
    check_writable(path.parent, path)


def check_target_folder(folder: Path, kind: str, *, overwrite: bool = False, in_place: bool = False) -> None:
    """Raise `ValueError` if a folder of `kind` cannot be written at `folder`.

    A folder that does not exist or is empty can be filled; so can a folder whose manifest a killed process did not
    finish. With `overwrite` a folder whose manifest says `kind` can be replaced, unless it holds a file that the
    manifest does not name. With `in_place` the folder will be filled by `claim_folder`. Otherwise `folder_beside`
    replaces the folder itself, which is refused for a mount point and for the current folder.
    """
    check_name(folder)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{folder} exists already and is not a folder; give a folder that is yet to be made")
    exists = folder.exists()
    if exists and not in_place and (folder.is_mount() or folder.samefile(Path.cwd())):
        raise ValueError(f"{folder} is a mount point or the current folder; give a folder in it")
    if exists and any(not is_leftover(path.name, ()) for path in folder.iterdir()):
        check_replaceable(folder, _manifest(folder), _files(folder), kind, overwrite=overwrite)
    check_writable(folder if exists and in_place else folder.parent, folder)


@contextmanager
def file_beside(path: Path) -> Iterator[Path]:
    """A file to write, beside `path`. It takes the place of `path` if the body succeeds, and vanishes if the body
    fails.

    A device or a pipe, such as /dev/null, is written itself: a rename would replace it for the whole machine.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new_file = path.with_name(f".{path.name}.{os.getpid()}.partial{path.suffix}")
    try:
        with naming(path):
            yield new_file
        new_file.replace(path)
    finally:
        new_file.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A full disk's error, which names no file, names what is written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextmanager
def durable_file(path: Path) -> Iterator[Path]:
    """`file_beside` for a file whose content survives a crash of the machine."""
    with file_beside(path) as new_file:
        yield new_file
        sync(new_file)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's names, to disk, so that they survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file beside its place, then rename it."""
    with file_beside(path) as new_file:
        new_file.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file beside its place, then rename it; `ValueError` for NaN and infinity, which JSON lacks."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextmanager
def folder_beside(folder: Path, kind: str, *, overwrite: bool = False) -> Iterator[Path]:
    """A new folder. With its manifest it takes the place of `folder` if the body succeeds; it vanishes if the body
    fails.

    Raises `ValueError` as `check_target_folder` does.
    """
    _end_killed(folder)
    check_target_folder(folder, kind, overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    new_folder, replaced, lock = place / "new", place / REPLACED, FileLock(place / LOCK)
    try:
        with suppress(OSError, NotImplementedError):  # some file systems have no locks
            lock.acquire(timeout=0)
        new_folder.mkdir()
        with naming(folder):
            yield new_folder
        new_folder.chmod(0o755)
        _write_manifest(new_folder, kind, sorted(map(glob.escape, _files(new_folder))))
        if folder.exists():
            check_target_folder(folder, kind, overwrite=overwrite)  # it may have been filled meanwhile
            folder.rename(replaced)
        new_folder.rename(folder)
    finally:
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)  # the new folder did not take its place
        lock.release()
        shutil.rmtree(place, ignore_errors=True)


def _end_killed(folder: Path) -> None:
    """Remove the files that killed processes were writing for `folder`; the files that they were replacing return to
    their places."""
    for place in folder.parent.glob(f".{glob.escape(folder.name)}-????????"):
        if not (place / LOCK).is_file():
            continue
        with suppress(Timeout, OSError, NotImplementedError), FileLock(place / LOCK, timeout=0):
            if (place / REPLACED).exists() and not folder.exists():
                (place / REPLACED).rename(folder)
            shutil.rmtree(place, ignore_errors=True)


def claim_folder(folder: Path, kind: str, files: Sequence[str]) -> Path:
    """Make `folder` for results that come one by one: `files`, patterns relative to it, will be the project's own.

    A folder that is claimed for this kind already keeps its files. Raises `ValueError` as `check_target_folder` does
    for any other folder that is not empty.
    """
    if folder_kind(folder) != kind:
        check_target_folder(folder, kind, in_place=True)
        folder.mkdir(parents=True, exist_ok=True)
    _write_manifest(folder, kind, files)
    return folder


class PartsFolder:
    """A claimed folder (`claim_folder`) that fills part by part: a killed job goes on from the parts that are there.

    One process at a time writes in it, each part once, by `durable_file`. Files that killed processes did not finish
    are removed. `lock` is one of `files`. Raises `ValueError` as `claim_folder`, and while another process writes
    there. Close it, or use it as a context.
    """

    def __init__(self, path: Path, kind: str, files: Sequence[str], *, lock: str) -> None:
        self.path = claim_folder(path, kind, files)
        self._lock = FileLock(path / lock)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            sentence = f"another process is writing in {path}; wait for its end, or give another folder"
            raise ValueError(sentence) from None
        for file in {file for pattern in files for file in path.glob(str(Path(pattern).with_name(".*")))}:
            if is_leftover(str(file.relative_to(path)), files):
                file.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process write there."""
        self._lock.release()


def is_leftover(name: str, files: Sequence[str]) -> bool:
    """Whether a killed process began this file of a claimed folder, by its relative name, and did not finish it."""
    return is_partial(Path(name)) and any(is_named(name, pattern) for pattern in (MANIFEST, *files))


def folder_kind(folder: Path) -> str | None:
    """The kind of folder that the project wrote at `folder`, by its manifest; `None` if it wrote nothing there."""
    return manifest_kind(_manifest(folder))


def manifest_kind(manifest: str | None) -> str | None:
    """The kind in a manifest's text; `None` for a text that is no manifest."""
    try:
        return str(json.loads(manifest or "")["kind"])
    except (ValueError, KeyError, TypeError):
        return None


def manifest_text(kind: str, files: Sequence[str]) -> str:
    """The manifest of a folder of `kind`, whose own files are the patterns `files`."""
    return json.dumps({"written_by": "mbd-cluster", "kind": kind, "files": list(files)}, indent=2) + "\n"


def is_partial(path: Path) -> bool:
    """Whether this is a file that `file_beside` began and a killed process did not finish."""
    return PARTIAL.fullmatch(path.name) is not None


def _write_manifest(folder: Path, kind: str, files: Sequence[str]) -> None:
    write_text(folder / MANIFEST, manifest_text(kind, files))


def check_replaceable(
    folder: Path | str, manifest: str | None, present: Iterable[str], kind: str, *, overwrite: bool
) -> None:
    """Raise `ValueError` unless the folder that holds the files `present` may be replaced by a folder of `kind`.

    `folder` is its name in sentences; `manifest` is its manifest's text, `None` without a manifest.
    """
    try:
        content = json.loads(manifest or "")
        present_kind, patterns = str(content["kind"]), list(content["files"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{folder} exists already and was not written by this project (it has no {MANIFEST}); "
            "give a folder that is yet to be made"
        ) from None
    holds = f"{folder} exists already and holds {_with_article(present_kind)}"
    if present_kind != kind:
        raise ValueError(f"{holds}, not {_with_article(kind)}; give another folder")
    if not overwrite:
        raise ValueError(f"{holds}; give another folder, or --overwrite")
    foreign = [n for n in present if n != MANIFEST and not any(is_named(n, p) for p in patterns)]
    if foreign:
        raise ValueError(f"{folder} cannot be replaced: {min(foreign)} in it was not written by this project; move it")


def _with_article(kind: str) -> str:
    if kind.endswith("s") or kind.startswith("data "):
        return kind
    return f"{'an' if kind.startswith(tuple('aeiou')) else 'a'} {kind}"


def _manifest(folder: Path) -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        return (folder / MANIFEST).read_text(encoding="utf-8")
    return None


def is_named(name: str, pattern: str) -> bool:
    """Whether a manifest's pattern, whose `*` does not reach into folders, names this file.

    A file that a killed process left beside its place (`file_beside`) counts as the file that it was to become.
    """
    path, parts = Path(name), Path(pattern).parts
    partial = PARTIAL.fullmatch(path.name)
    name_path = path if partial is None else path.with_name(partial["name"])
    return len(name_path.parts) == len(parts) and all(map(fnmatch, name_path.parts, parts))


def _files(folder: Path) -> list[str]:
    """Every file below `folder`, relative to it; links count as files."""
    return [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()]


def check_name(target: Path) -> None:
    """Raise `ValueError` for a path that is too long or not printable."""
    if len(target.name.encode()) > 200:
        raise ValueError(f"{target} cannot be written: its name is longer than 200 bytes")
    if any(len(name.encode()) > 255 for name in target.parts) or len(bytes(target.absolute())) > 3000:
        raise ValueError(f"{target} cannot be written: its path is longer than 3000 bytes, or a name in it than 255")
    if not str(target).isprintable():
        raise ValueError(f"{str(target)!r} cannot be written: it holds characters that are not printable")


def check_writable(folder: Path, target: Path) -> None:
    """Raise `ValueError` if no file can be made in `folder`, or in the nearest of its parents that exists."""
    check_name(target)
    parent = next(p for p in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(p))
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {parent}: {error.strerror}; give another place") from None
