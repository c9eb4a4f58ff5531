"""Files on remote storage: fsspec's filesystem of the storage, and the path of a folder there."""

import hashlib
import json
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec

from mbd_core.files import MANIFEST

UNFINISHED = f".{MANIFEST}.0.partial"
FLAT = tuple(f"{scheme}://" for scheme in ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"))
"""Prefixes of URLs at which a file needs no folder."""
PROBE = ".mbd-probe-"
VERSION_FIELDS = (
    "size",
    "ETag",
    "etag",
    "md5",
    "generation",
    "mtime",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "created",
)
NUM_QUESTIONS = 8  # requests at once, about files whose size is not in the listing


# An endpoint that does not answer is given up within a minute, not after ten.
CONNECTION = {"connect_timeout": 10, "retries": {"max_attempts": 2, "mode": "standard"}}
OPTIONS: dict[str, dict[str, Any]] = {scheme: {"config_kwargs": CONNECTION} for scheme in ("s3", "s3a")}
"""The arguments of fsspec's filesystems, by scheme."""


def open_storage(location: str) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the path there."""
    options = OPTIONS.get(location.partition("://")[0], {})
    # A cached listing would hide files that others write.
    return fsspec.core.url_to_fs(location, use_listings_cache=False, **options)


def put(system: Any, location: str, file: str, content: bytes) -> None:
    """Write a file of the folder at the URL `location`."""
    make_parent(system, location, file)
    system.pipe_file(file, content)


def make_parent(system: Any, location: str, file: str) -> None:
    """Make the folder of a file on the fsspec filesystem of the URL `location`; not on `FLAT` storage, where this
    would make a bucket."""
    if not location.startswith(FLAT):
        system.makedirs(file.rpartition("/")[0], exist_ok=True)


def probe_folder(system: Any, location: str, path: str) -> None:
    """Make a file in the folder `path` of the URL `location` and remove it. Raises the storage's errors."""
    file = f"{path}/{PROBE}{secrets.token_hex(4)}"
    make_parent(system, location, file)
    system.pipe_file(file, b"")
    system.rm_file(file)


def list_files(system: Any, path: str) -> dict[str, Mapping[str, Any]]:
    """Every file below the path, by its name relative to it; the empty name if the path itself is a file.

    The list of an HTTP server has only names, so size and version of each file are requested.
    """
    try:
        paths = system.find(path, detail=True)
    except FileNotFoundError:
        return {}
    unsized = [file for file, information in paths.items() if information.get("size") is None]
    if unsized:
        with ThreadPoolExecutor(NUM_QUESTIONS) as threads:
            paths |= zip(unsized, threads.map(system.info, unsized), strict=True)
    start = len(path.strip("/"))
    names = {file.strip("/")[start:].strip("/"): information for file, information in paths.items()}
    return {name: information for name, information in names.items() if not name.startswith(PROBE)}


def read_manifest(system: Any, path: str, files: Mapping[str, Any]) -> str | None:
    """The manifest's text, or the unfinished manifest's if the folder is incomplete."""
    name = next((name for name in (UNFINISHED, MANIFEST) if name in files), None)
    return None if name is None else str(system.cat_file(f"{path}/{name}").decode("utf-8"))


def version_of(location: str, files: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """The digest of a folder's URL, and the digest of its version, which is the `file_version` of all its files."""
    versions = [(name, file_version(files[name])) for name in sorted(files)]
    return _digest(location)[:8], _digest(versions)[:16]


def file_version(information: Mapping[str, Any]) -> list[str]:
    """The part of the storage's information on a file that changes with the file."""
    return [str(information.get(field)) for field in VERSION_FIELDS]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
