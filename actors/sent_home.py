"""A worker's files for the job's machine: they go there through Ray, and take their place when all have arrived."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.paths import this_host
from mbd_core.files import MANIFEST, folder_beside
from mbd_core.storage.contents import read_chunks
from mbd_core.storage.folder import Folder


@dataclass(frozen=True)
class Home:
    """The machine of a job's own process."""

    node: str
    host: str

    @classmethod
    def here(cls) -> Self:
        return cls(ray.get_runtime_context().get_node_id(), this_host())

    @contextmanager
    def staged(self, folder: Folder, kind: str, *, overwrite: bool) -> Iterator[Path]:
        """Like `Folder.staged`, but for calls on any machine: a local folder is a folder on the job's machine.

        Raises the errors of `folder_beside`, and Ray's errors if the job's machine is lost.
        """
        if folder.is_remote or ray.get_runtime_context().get_node_id() == self.node:
            with folder.staged(kind, overwrite=overwrite) as path:
                yield path
            return
        stage = Path(tempfile.mkdtemp(prefix="mbd-home-"))
        try:
            yield stage / folder.name
            self._send(stage / folder.name, folder, kind, overwrite=overwrite)
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def _send(self, source: Path, folder: Folder, kind: str, *, overwrite: bool) -> None:
        place = NodeAffinitySchedulingStrategy(self.node, soft=False)
        receiver = ray.remote(Receiver).options(num_cpus=0, scheduling_strategy=place)
        actor = receiver.remote(folder.path, kind, overwrite=overwrite)
        try:
            for file in sorted(source.rglob("*")):
                if file.is_file() and file.name != MANIFEST:
                    name = file.relative_to(source).as_posix()
                    for chunk in read_chunks(file) if file.stat().st_size else [b""]:
                        ray.get(actor.take.remote(name, chunk))
            ray.get(actor.finish.remote())
        finally:
            ray.kill(actor)


class Receiver:
    """Fills a folder on the job's machine beside its place, and moves it there at the end."""

    def __init__(self, folder: Path, kind: str, *, overwrite: bool) -> None:
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(folder_beside(folder, kind, overwrite=overwrite))

    def take(self, name: str, chunk: bytes) -> None:
        """Append to a file."""
        file = self._folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as opened:
            opened.write(chunk)

    def finish(self) -> None:
        """Put the folder in its place."""
        self._stack.close()
