"""Data files that a user names: a file, or the files of one split in a folder, here or at a URL that fsspec knows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import fsspec
import yaml

from mbd_core.json_text import parse_json
from mbd_core.row_files.opening import one_sentence
from mbd_core.row_files.paths import NOT_ROWS, saved_files
from mbd_core.row_files.rows import FORMATS, SUFFIXES

OTHER_FORMATS = (".csv", ".tsv", ".xlsx", ".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".pkl")
SPLIT_WORDS = (
    *("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"),
    *("heldout", "holdout"),
)
"""The words that name a split in a file's or a folder's name, training's words first."""
SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}")
MOST_NAMED = 5  # files in a sentence


def find_files(path: str, *, split: str | None = None) -> list[str]:
    """The data files at a path or URL, in order: the file itself, or the files of a folder's `split`.

    A folder's splits come from a saved dataset, from a README's `configs`, or from the names of its files and folders.
    Raises `ValueError` if there are no files, and for a folder of several splits without `split`.
    """
    with one_sentence(path):
        system, root = fsspec.core.url_to_fs(path)
        if system.isfile(root):
            if split is not None:
                raise ValueError(f"{path} is a file, which has no splits; leave --split out")
            files = [root]
        elif not system.exists(root):
            raise ValueError(f"{path} does not exist")
        else:
            files = _folder_files(system, root, path, split)
    if not files:
        raise ValueError(f"{path} is a folder without a file of rows ({FORMATS})")
    return [system.unstrip_protocol(name) if "://" in path else name for name in files]


def _folder_files(system: Any, root: str, path: str, split: str | None) -> list[str]:
    if system.exists(f"{root}/dataset_dict.json"):
        splits = parse_json(system.cat_file(f"{root}/dataset_dict.json"), f"{path}/dataset_dict.json")["splits"]
        root, split = f"{root}/{_choose(path, splits, split)}", None
    if system.exists(f"{root}/state.json"):
        if split is not None:
            raise ValueError(f"{path} has no splits; leave --split out")
        return saved_files(system, root, path)
    files = _listing(system, root, path)
    return _split_files(_described_files(system, root, path, files) or files, path, split)


@dataclass(frozen=True)
class DataFile:
    """A file of a folder.

    inside         its path within the folder
    split          its split by its own name, or else by the name of the nearest folder around it that names a split
    configuration  the folder that holds the split's files
    """

    path: str
    inside: str
    split: str | None
    configuration: str

    @classmethod
    def of(cls, path: str, inside: str) -> "DataFile":
        *folders, name = inside.split("/")
        stem = name.partition(".")[0] if SHARD.match(name) else _without_suffix(name)
        if shard := SHARD.match(stem):
            prefix = shard[1]
            split = None if prefix in ("data", "part", "shard") else prefix
            if split is not None and (word := _split_word(last := prefix.rpartition("-")[2])):
                split = last if last.startswith(word) else word
        else:
            split = _split_name(stem)
        depth = len(folders)
        while split is None and depth:
            depth -= 1
            split = _split_name(folders[depth])
        return cls(path, inside, split, "/".join(folders[:depth]) if split is not None else "")


def _without_suffix(name: str) -> str:
    suffix = next((suffix for suffix in (*SUFFIXES, *OTHER_FORMATS) if name.endswith(suffix)), "")
    return name.removesuffix(suffix)


def _split_word(name: str) -> str | None:
    words = re.split(r"[^a-z]+", name.lower())
    return next((word for word in SPLIT_WORDS if word in words), None)


def _split_name(name: str) -> str | None:
    """The split in a name: `train` in `train_01` and `chats-train`, `train_sft` in `train_sft`, `None` if no word is
    a split's."""
    word = _split_word(name)
    if word is None or not name.lower().startswith(word):
        return word
    return re.sub(r"[^A-Za-z]*\d.*$", "", name)


def _listing(system: Any, root: str, path: str) -> list[DataFile]:
    """The folder's data files in order, without hidden files and descriptions.

    Of a saved dataset's folder only the files that its `state.json` names are listed.
    """
    names = sorted(system.find(root))
    saved: dict[str, list[str]] = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        if last == "state.json":
            saved[folder] = saved_files(system, folder, path)
    files = []
    for name in names:
        inside = name.removeprefix(root).lstrip("/")
        folder, _, last = name.rpartition("/")
        is_hidden = any(part.startswith((".", "__")) for part in inside.split("/"))
        if is_hidden or last in NOT_ROWS or name not in saved.get(folder, [name]):
            continue
        if last.endswith((*SUFFIXES, *OTHER_FORMATS)):
            files.append(DataFile.of(name, inside))
    return files


def _described_files(system: Any, root: str, path: str, files: Sequence[DataFile]) -> list[DataFile]:
    """The files that the `configs` of a data set's README name, each with its split. Empty if it has no `configs`.

    Of several configurations the default is taken. Raises `ValueError` if none is the default.
    """
    if not system.exists(f"{root}/README.md"):
        return []
    configs = _card(system.cat_file(f"{root}/README.md").decode("utf-8", errors="replace")).get("configs")
    described: dict[str, list[DataFile]] = {}
    defaults = []
    for config in configs if isinstance(configs, list) else ():
        if not isinstance(config, Mapping) or "data_files" not in config:
            continue
        name = str(config.get("config_name", "default"))
        for split, pattern in _patterns(config["data_files"]):
            matches = [file for file in files if fnmatchcase(file.inside, pattern.removeprefix("./"))]
            described.setdefault(name, []).extend(replace(file, split=split, configuration="") for file in matches)
        if name == "default" or config.get("default"):
            defaults.append(name)
    found = [name for name, matches in described.items() if matches]
    if not found:
        return []
    chosen = found[0] if len(found) == 1 else next((name for name in defaults if name in found), None)
    if chosen is None:
        example = described[found[0]][0].inside
        raise ValueError(
            f"{path} has the configurations {', '.join(found)} (README.md); name the files of one, as {path}/{example}"
        )
    return list(dict.fromkeys(described[chosen]))


def _card(text: str) -> Mapping[str, Any]:
    """The YAML at the beginning of a README; empty without one."""
    parts = text.removeprefix("\ufeff").split("---\n", 2)
    try:
        card = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except yaml.YAMLError:
        card = None
    return card if isinstance(card, Mapping) else {}


def _patterns(data_files: Any) -> Iterator[tuple[str, str]]:
    """Splits and patterns of their files, from each of the forms in READMEs."""
    if isinstance(data_files, Mapping):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    for entry in [data_files] if isinstance(data_files, str) else data_files:
        paths = entry.get("path", ()) if isinstance(entry, Mapping) else entry
        split = str(entry.get("split", "train")) if isinstance(entry, Mapping) else "train"
        yield from ((split, str(path)) for path in ([paths] if isinstance(paths, str) else paths))


def _split_files(files: Sequence[DataFile], path: str, split: str | None) -> list[str]:
    splits = list(dict.fromkeys(file.split for file in files if file.split is not None))
    splits.sort(key=lambda name: (SPLIT_WORDS.index(_split_word(name) or SPLIT_WORDS[-1]), name))
    without = [file.inside for file in files if file.split is None]
    if split is not None and not splits:
        raise ValueError(f"{path} has no splits; leave --split out")
    if splits and without and split is None:
        raise ValueError(
            f"{path} has the split{'s' * (len(splits) > 1)} {', '.join(splits)} and files of no split "
            f"({_named(without)}); name one with --split, or name the files themselves"
        )
    if splits:
        taken = _choose(path, splits, split)
        files = [file for file in files if file.split == taken]
        configurations = list(dict.fromkeys(file.configuration for file in files))
        if len({name for name in configurations if name != "data"}) > 1:
            names = ", ".join(name or "." for name in configurations)
            raise ValueError(
                f"{path} has files of the split {taken} in several folders, {names}: name the folder of one "
                f"data set, as {path}/{configurations[-1]}, or each of them"
            )
    unread = [file.inside for file in files if not file.path.endswith(SUFFIXES)]
    if unread and len(unread) < len(files):
        raise ValueError(
            f"{path} holds files of formats that are not read ({_named(unread)}); name the files to read: {FORMATS}"
        )
    return [file.path for file in files if file.path.endswith(SUFFIXES)]


def _choose(path: str, splits: Sequence[str], split: str | None) -> str:
    """The name in `splits` that `split` names: the same name, or the only name with its word."""
    if split is None:
        if len(splits) > 1:
            raise ValueError(f"{path} has the splits {', '.join(splits)}; name one with --split")
        return splits[0]
    alike = [name for name in splits if name == split] or [n for n in splits if _split_word(n) == split]
    if len(alike) != 1:
        raise ValueError(f"{path} has no split {split!r}, only {', '.join(splits)}")
    return alike[0]


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
