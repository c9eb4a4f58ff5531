"""Rows of the files at a path: a file, a pattern with `*`, a folder with the files of one split, or a URL."""

import re
from collections.abc import Iterator
from typing import Any

import fsspec

from mbd_core.json_text import parse_json
from mbd_core.row_files.opening import one_sentence
from mbd_core.row_files.rows import FORMATS, SUFFIXES, read_file

NOT_ROWS = frozenset(("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "croissant.json"))
"""Files in the folders of data sets that describe them."""
MOST_NAMES = 6  # names of a folder's files that a message lists

NumberedRow = tuple[int, str, dict[str, Any]]


def read_row_files(path: str) -> Iterator[NumberedRow]:
    """The rows of the file or files at a path, each with its number and its place in words: `FILE, line N`, or `FILE,
    row N` if rows are not lines. The numbers of a file's rows follow those of the file before.

    Raises `ValueError`, one sentence, for a file that cannot be read, and names the remedy for an unknown format.
    """
    before = 0
    for file in _files(path):
        number = 0
        for row in read_file(file):
            number = row.number
            yield before + number, row.place, row.values
        before += number


def saved_files(system: Any, folder: str, path: str) -> list[str]:
    """The files of a data set that `save_to_disk` wrote in a folder; error messages call the folder `path`."""
    state = parse_json(system.cat_file(f"{folder}/state.json"), f"{path}/state.json")
    return [f"{folder}/{file['filename']}" for file in state["_data_files"]]


def _files(path: str) -> list[str]:
    """The files at a path; a path that is neither a folder nor a pattern is a file."""
    if path.startswith(("http://", "https://")):
        return [path]  # HTTP lists no folders
    with one_sentence(path):
        system, root = fsspec.core.url_to_fs(path)
        try:
            is_folder, exists = system.isdir(root), system.exists(root)
        except Exception:  # each storage raises types of its own; opening the file says why
            return [path]
        if is_folder:
            names = _folder_files(system, root, path)
        elif "*" in path and not exists:
            names = sorted(system.glob(root))
            if not names:
                raise ValueError(f"{path} names no file; write a pattern that names one or more")
        else:
            return [path]
    return [system.unstrip_protocol(name) if "://" in path else name for name in names]


def _folder_files(system: Any, root: str, path: str) -> list[str]:
    """The files of a folder that holds one file, the parts of one file, or a data set that `save_to_disk` wrote."""
    if system.exists(f"{root}/state.json"):
        return saved_files(system, root, path)
    sets: dict[str, list[str]] = {}
    for name in sorted(system.find(root)):
        inside = name.removeprefix(root).lstrip("/")
        is_hidden = any(part.startswith((".", "_")) for part in inside.split("/"))
        if is_hidden or name.rpartition("/")[2] in NOT_ROWS or not name.endswith(SUFFIXES):
            continue
        sets.setdefault(re.sub(r"\d+-of-\d+", "*", inside), []).append(name)
    if not sets:
        raise ValueError(f"{path} is a folder without a file of rows ({FORMATS})")
    if len(sets) > 1:
        names = ", ".join(list(sets)[:MOST_NAMES]) + (", ..." if len(sets) > MOST_NAMES else "")
        example = next((name for name in sets if "test" in name), next(iter(sets)))
        raise ValueError(
            f"{path} is a folder with several files of rows or splits: {names}; name one, as '{path}/{example}'"
        )
    return next(iter(sets.values()))
