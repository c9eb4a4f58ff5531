"""A job's paths on the machines of its cluster: checked before the work, and copied to nodes if they are small.

A cluster's machines may share no disk. So each option that is a path says who opens it (`Flag.opened_by`). Before any
work, a small task on each node with room for the job's processes reports the contents of these paths. Workers read the
same contents as the job. If a node lacks them, they go through Ray's object store into that node's cache when a worker
there first asks for them. The job is refused if a path is too large to copy, or if a shared folder is not one folder
for all. A worker on a node that joins later checks the paths itself (`JobPaths.fetch`, `JobPaths.check_shared`).
`serve deploy` leaves no process that could hold a copy, so all nodes must have its paths (`check_everywhere`).
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os.path import isabs
from pathlib import Path
from typing import NamedTuple

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.failures import reason
from cluster.topology import Resources, fits
from mbd_core.checkpoint.shipped import named_model
from mbd_core.multitf.config import BASE_TEACHER, TeacherSettings
from mbd_core.storage.cache import user_cache
from mbd_core.storage.contents import Contents, Copy, contents_of
from mbd_core.storage.folder import SCHEME, Folder
from mbd_core.storage.models import UrlWeights, fetch_model
from mbd_core.storage.remote_files import PROBE

MOST_CARRIED = 2**30
"""The most bytes of a path that are carried to the nodes; a larger path needs a URL or a volume."""
LOOK_SECONDS = 300.0  # to wait for a node's answer; a busy node may need minutes
MARK_DAYS = 30.0  # an older mark was left by a killed job
NAMED_HOSTS = 4  # hosts that a message names


class OpenedPath(NamedTuple):
    """A path that an option names. `name` is the text by which workers ask for the path, if it differs from the
    path."""

    option: str
    path: str
    name: str = ""


def model_paths(option: str, *models: str | None) -> list[OpenedPath]:
    """The folders of models that are not at URLs and not shipped; `None` is no model. Raises `ValueError` for an
    unknown model."""
    named = {model: named_model(model) for model in models if model is not None and SCHEME.match(model) is None}
    return [OpenedPath(option, path, model) for model, path in named.items() if isabs(path)]


def teacher_paths(teacher: TeacherSettings | None) -> list[OpenedPath]:
    """The teacher's folder, as in `model_paths`; no path if the base teaches."""
    return [] if teacher is None or teacher.model == BASE_TEACHER else model_paths("--teacher", teacher.model)


@dataclass(frozen=True, kw_only=True)
class KnownPath:
    """The contents of a path on the job's machine, `host`, and their `copy` if another node lacks them."""

    opened: OpenedPath
    contents: Contents
    host: str
    copy: Copy | None = None

    def here(self) -> str:
        """The path of the same contents, or of their copy, on this machine. Raises `ValueError` if it has neither."""
        if contents_of(Path(self.opened.path)) == self.contents:
            return self.opened.path
        if self.copy is None:
            raise self.refusal([this_host()])
        return str(self.copy.unpacked(user_cache("carried"), _get))

    def refusal(self, lacking: Sequence[str], owners: Sequence[str] = ()) -> ValueError:
        return ValueError(
            f"{_unlike(self.opened, [self.host, *owners], lacking)}: give a URL as s3://bucket/path, put it on a "
            f"volume that all of them mount, or use one node (it has {self.contents.size / 1e9:.1f} GB; up to "
            f"{MOST_CARRIED / 1e9:.1f} GB are copied to the nodes)"
        )


@dataclass(frozen=True)
class Mark:
    """A file that the job put into a folder that all must share."""

    option: str
    folder: str
    file: str
    host: str

    def refusal(self, hosts: Sequence[str]) -> ValueError:
        return ValueError(
            f"{self.option} {self.folder} is not one folder for all: {_listed(hosts)} "
            f"{'does' if len(hosts) == 1 else 'do'} not see what "
            f"{self.host} writes there; give a URL as s3://bucket/path, a folder on a volume that all of them mount, "
            "or use one node"
        )


@dataclass(frozen=True)
class JobPaths:
    """The paths and marks that were found before the work; each worker gets them."""

    read: tuple[KnownPath, ...] = ()
    marks: tuple[Mark, ...] = ()

    def fetch(self, model: str, *, url_weights: UrlWeights = "cache") -> str:
        """Like `fetch_model`, but a path of the job gives its contents on this machine, or a copy. Raises
        `ValueError`."""
        for known in self.read:
            if model in (known.opened.path, known.opened.name):
                return known.here()
        return fetch_model(model, url_weights=url_weights)

    def check_shared(self) -> None:
        """Raise `ValueError` if this machine does not see a folder that all share."""
        for mark in self.marks:
            if not Path(mark.file).exists():
                raise mark.refusal([this_host()])


NO_PATHS = JobPaths()


class Sight(NamedTuple):
    """The contents of paths on a machine, and whether it sees certain files."""

    contents: list[Contents | None]
    seen: list[bool]


def sight(paths: Sequence[str], files: Sequence[str]) -> Sight:
    return Sight([contents_of(Path(path)) for path in paths], [Path(file).exists() for file in files])


@contextmanager
def known_paths(
    read: Sequence[OpenedPath],
    shared: Sequence[tuple[str, Folder]] = (),
    *,
    bundle: Resources,
    say: Callable[[str], object] = print,
) -> Iterator[JobPaths]:
    """The paths that workers read, checked on all nodes of the connected cluster with room for a `bundle`.

    `shared` are options with the folders that the job and its workers write and read. Raises `ValueError`, one
    sentence, for a path that workers cannot read, or for a folder that they do not share.
    """
    paths = [opened for opened in read if SCHEME.match(opened.path) is None]
    here = this_host()
    with _marked([(option, folder) for option, folder in shared if not folder.is_remote], here) as marks:
        sights = look([opened.path for opened in paths], [mark.file for mark in marks], bundle=bundle)
        for number, mark in enumerate(marks):
            if blind := [host for host, each in sights.items() if not each.seen[number]]:
                raise mark.refusal(blind)
        known = []
        for number, opened in enumerate(paths):
            contents = contents_of(Path(opened.path))
            if contents is None:
                owners = [host for host, each in sights.items() if each.contents[number] is not None]
                there = f"; it is on {_listed(owners)}" if owners else ""
                raise ValueError(f"{opened.option} {opened.path} cannot be read on {here}{there}")
            lacking = [host for host, each in sights.items() if each.contents[number] != contents]
            path = KnownPath(opened=opened, contents=contents, host=here)
            known.append(_carried(path, lacking, list(sights), say) if lacking else path)
        yield JobPaths(tuple(known), tuple(marks))


def check_everywhere(read: Sequence[OpenedPath], present: Sequence[OpenedPath] = (), *, bundle: Resources) -> None:
    """Raise `ValueError`, one sentence, unless every node with room for a `bundle` has the same contents at each path.

    The files of `present` must only exist on every node. Relative paths are not checked, nor is a cluster without such
    a node.
    """
    read, present = ([opened for opened in each if isabs(opened.path)] for each in (read, present))
    sights = look([opened.path for opened in read], [opened.path for opened in present], bundle=bundle, own=True)
    for number, opened in enumerate(read):
        found = {host: each.contents[number] for host, each in sights.items()}
        first = next(filter(None, found.values()), None)
        _check_owners(opened, {host: contents is not None and contents == first for host, contents in found.items()})
    for number, opened in enumerate(present):
        _check_owners(opened, {host: each.seen[number] for host, each in sights.items()})


def _check_owners(opened: OpenedPath, has: Mapping[str, bool]) -> None:
    owners, lacking = ([host for host in has if has[host] is wanted] for wanted in (True, False))
    if lacking:
        there = _unlike(opened, owners, lacking) if owners else f"{opened.option} {opened.path} is on no node"
        raise ValueError(
            f"{there}: give a URL as s3://bucket/path, or put the same on every node or on a volume that all mount"
        )


def _unlike(opened: OpenedPath, owners: Sequence[str], lacking: Sequence[str]) -> str:
    verbs = "lacks it or holds" if len(lacking) == 1 else "lack it or hold"
    return f"{opened.option} {opened.path} is on {_listed(owners)}, and {_listed(lacking)} {verbs} another"


def _carried(path: KnownPath, lacking: Sequence[str], hosts: Sequence[str], say: Callable[[str], object]) -> KnownPath:
    """The path with a copy for the hosts that lack it."""
    opened, size = path.opened, path.contents.size
    if size > MOST_CARRIED:
        raise path.refusal(lacking, [host for host in hosts if host not in lacking])
    copy = Copy.of(Path(opened.path), _put)
    say(f"{opened.option} {opened.path}: {size / 1e6:.1f} MB go from {path.host} to {_listed(lacking)}, through Ray")
    return KnownPath(opened=opened, contents=path.contents, host=path.host, copy=copy)


def _put(chunk: bytes) -> bytes:
    """A reference to an object of this process, pickled: Ray keeps such an object as long as the process lives, and
    warns of references among the arguments of actors that may start again."""
    return cloudpickle.dumps(ray.put(chunk))


def _get(reference: bytes) -> bytes:
    chunk: bytes = ray.get(cloudpickle.loads(reference))
    return chunk


def look(paths: Sequence[str], files: Sequence[str], *, bundle: Resources, own: bool = False) -> Mapping[str, Sight]:
    """The sight of each other node with room for a bundle, by its host's name; with `own` this node too if it has
    room.

    No node is asked if there are neither paths nor files. Raises `RuntimeError` for a node that does not answer.
    """
    if not paths and not files:
        return {}
    this_node = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and fits(bundle, node["Resources"])]
    others = sorted(
        (node for node in nodes if node["NodeID"] != this_node),
        key=lambda node: (node["NodeManagerHostname"], node["NodeManagerAddress"]),
    )
    task = ray.remote(num_cpus=0)(sight)
    answers = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            paths, files
        )
        for node in others
    ]
    sights = {this_host(): sight(paths, files)} if own and len(others) < len(nodes) else {}
    try:
        return sights | dict(zip(_names(others), ray.get(answers, timeout=LOOK_SECONDS), strict=True))
    except RayError as error:
        raise RuntimeError(
            f"not every node of the cluster says within {LOOK_SECONDS:g} s what it has of the job's paths: "
            f"{reason(error)}"
        ) from error


def _names(nodes: Sequence[Mapping[str, str]]) -> list[str]:
    """The hosts of nodes, with their address if several have one name."""
    names = [node["NodeManagerHostname"] for node in nodes]
    return [
        f"{name} ({node['NodeManagerAddress']}:{node['NodeManagerPort']})" if names.count(name) > 1 else name
        for name, node in zip(names, nodes, strict=True)
    ]


@contextmanager
def _marked(shared: Sequence[tuple[str, Folder]], host: str) -> Iterator[list[Mark]]:
    """A file of the job in each folder, for as long as the block lasts."""
    marks: list[Mark] = []
    try:
        for option, folder in shared:
            folder.path.mkdir(parents=True, exist_ok=True)
            _forget_marks(folder.path)
            file = folder.path / f"{PROBE}{secrets.token_hex(8)}"
            file.touch()
            marks.append(Mark(option, str(folder), str(file), host))
        yield marks
    finally:
        for mark in marks:
            with suppress(OSError):
                os.unlink(mark.file)


def _forget_marks(folder: Path) -> None:
    """Remove the marks that killed jobs have left in a folder."""
    for mark in folder.glob(f"{PROBE}*"):
        with suppress(OSError):
            if mark.stat().st_mtime < time.time() - MARK_DAYS * 86400:
                mark.unlink()


def this_host() -> str:
    return socket.gethostname()


def _listed(hosts: Sequence[str]) -> str:
    named, others = hosts[:NAMED_HOSTS], len(hosts) - NAMED_HOSTS
    return ", ".join(named) + (f" and {others} more" if others > 0 else "")
