"""The user's cache on this machine: complete folders that were fetched or converted, one for each version.

models/KEY/NAME            an entry; KEY stands for the source and its version, so an older version stays beside it
models/.KEY.partial/NAME   an entry that is being written
models/KEY.lock            held by the process that writes the entry, while other processes wait

An entry's modification time is when it was last asked for.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

WAIT_SECONDS = 15.0  # between two lines that a waiting process prints


def user_cache(kind: str) -> Path:
    """The user's folder for files of a kind that can be fetched again (`XDG_CACHE_HOME`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mbd-cluster" / kind


@dataclass(frozen=True)
class FolderCache:
    """Entries below `path`."""

    path: Path

    @classmethod
    def of_user(cls) -> "FolderCache":
        return cls(user_cache("models"))

    def folder(self, key: str, name: str) -> Path:
        """Where the folder `name` of an entry lies, or will lie."""
        return self.path / key / name

    def filled(self, key: str, name: str, fill: Callable[[Path], None], *, resumes: bool = False) -> Path:
        """The folder `name` of an entry. If it is not there, `fill` gets a path and writes the folder there.

        One process of this machine writes it, and other processes wait. With `resumes` the path has the files of an
        interrupted call. Raises the errors of `fill`, and `ValueError` if the cache cannot be written.
        """
        target, stage = self.folder(key, name), self.path / f".{key}.partial"
        if target.exists():
            with suppress(OSError):  # a cache that another user fills
                os.utime(target.parent)
            return target
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from None
        with self._locked(key, target):
            if not target.exists():
                if not resumes:
                    shutil.rmtree(stage, ignore_errors=True)
                try:
                    stage.mkdir(exist_ok=True)
                except OSError as error:
                    raise self._unwritable(error) from None
                try:
                    fill(stage / name)
                except BaseException:
                    if not resumes:
                        shutil.rmtree(stage, ignore_errors=True)
                    raise
                stage.rename(target.parent)
        return target

    def forget_unfinished(self, source: str, key: str) -> None:
        """Remove the unfinished entries of a source's other versions, whose keys begin with `source`. An entry that is
        being written stays."""
        for stage in self.path.glob(f".{source}-*.partial"):
            other = stage.name.removeprefix(".").removesuffix(".partial")
            if other != key:
                with suppress(Timeout), FileLock(self.path / f"{other}.lock", timeout=0):
                    shutil.rmtree(stage, ignore_errors=True)

    def forget_unused(self, *, days: float) -> None:
        """Remove the entries that no process has asked for in the last `days` days."""
        oldest = time.time() - days * 86400
        for lock in self.path.glob("*.lock"):
            entry = lock.with_suffix("")
            with suppress(OSError, Timeout), FileLock(lock, timeout=0):
                if entry.stat().st_mtime < oldest:
                    stage = entry.with_name(f".{entry.name}.partial")
                    entry.rename(stage)  # at once: files that are then not removed belong to no entry
                    shutil.rmtree(stage)

    def others(self, source: str, key: str) -> list[Path]:
        """The entries of other versions of a source."""
        return [entry for entry in self.path.glob(f"{source}-*") if entry.is_dir() and entry.name != key]

    @contextmanager
    def _locked(self, key: str, target: Path) -> Iterator[None]:
        lock = FileLock(self.path / f"{key}.lock")
        while True:
            try:
                lock.acquire(timeout=WAIT_SECONDS)
                break
            except Timeout:
                print(f"another process of this machine writes {target}; waiting", file=sys.stderr, flush=True)
            except OSError as error:
                raise self._unwritable(error) from None
        try:
            yield
        finally:
            lock.release()

    def _unwritable(self, error: OSError) -> ValueError:
        return ValueError(
            f"the cache {self.path} cannot be written: {error.strerror}; set XDG_CACHE_HOME to a folder that can be"
        )
