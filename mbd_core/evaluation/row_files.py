"""Rows from where a benchmark lies: JSON lines at a path or fsspec URL, or a data set of the Hugging Face hub."""

import gzip
import zlib
from collections.abc import Iterator
from typing import Any

import fsspec

from mbd_core.json_text import parse_json

HUB = "hub:"


def read_rows(path: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The rows of a benchmark, each with its number and its place in words, `FILE, line N`.

    `path` names a file of JSON lines, plain or gzipped, or `hub:NAME[:CONFIGURATION[:SPLIT]]` (by default the split
    `test`), which the package `datasets` loads. Raises `ValueError`, one sentence, for what cannot be read.
    """
    if path.startswith(HUB):
        yield from _hub_rows(path)
        return
    for number, line in _numbered_lines(path):
        place = f"{path}, line {number}"
        row = parse_json(line, f"{place}: it")
        if not isinstance(row, dict):
            raise ValueError(f"{place}: a {type(row).__name__}, not a JSON object")
        yield number, place, row


def _hub_rows(path: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    name, _, rest = path.removeprefix(HUB).partition(":")
    configuration, _, split = rest.partition(":")
    if not name:
        raise ValueError(f"{path} names no data set; write {HUB}NAME, or {HUB}NAME:CONFIGURATION:SPLIT")
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"{path} cannot be read without the package datasets (pip install 'mbd-cluster[hub]')"
        ) from None
    try:
        rows = load_dataset(name, configuration or None, split=split or "test")
    except Exception as error:  # it has no class of its own for a name, a network or a split that is not there
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path} cannot be loaded: {type(error).__name__}: {reason}") from None
    for number, row in enumerate(rows, start=1):
        yield number, f"{path}, row {number}", dict(row)


def _numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """The file's lines that are not blank, counted from 1."""
    number = 0
    try:
        with fsspec.open(path, "rb", compression="infer") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield number, raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}, after line {number}: damaged gzip data ({error})") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except ImportError as error:
        raise ValueError(f"{path} cannot be read without a package that is not installed: {error}") from None
    except ValueError:
        raise
    except Exception as error:  # each storage raises types of its own, as S3's without credentials
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}") from None
