"""Rows of data files in the formats that hubs have: JSON lines, a JSON list, Parquet, Arrow; plain or compressed.

The content decides the format, not the name. A path is a file, a pattern with `*`, a folder with the files of one
split, or any of these at a URL that fsspec knows.
"""

import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.compression import compr

from mbd_core.json_text import parse_json

FORMATS = "JSON lines, a JSON list, Parquet or Arrow, plain or compressed"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
ENDINGS = ("", ".gz", ".bz2", ".xz", ".zst")
NOT_ROWS = frozenset(("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"))
ROWS_AT_ONCE = 256  # of a table; so many are Python objects at once
HEAD = 64  # bytes that show the format
MOST_NAMES = 6  # of a folder's files in a sentence

NumberedRow = tuple[int, str, dict[str, Any]]


def read_row_files(path: str) -> Iterator[NumberedRow]:
    """The rows of the file or files at a path, each with its number and its place in words: `FILE, line N`, or
    `FILE, row N` where rows are not lines. The numbers of a file's rows follow those of the file before.

    Raises `ValueError`, one sentence, for what cannot be read, with what to do where the format is another one.
    """
    before = 0
    for file in _files(path):
        number = 0
        for number, place, row in _file_rows(file):
            yield before + number, place, row
        before += number


def _files(path: str) -> list[str]:
    """The files that a path names; a path that is no folder and no pattern stands for itself."""
    if path.startswith(("http://", "https://")):
        return [path]  # it lists no folders
    with _one_sentence(path):
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
    """The files of a folder that holds one file, the parts of one, or a data set that `save_to_disk` wrote."""
    if system.exists(f"{root}/state.json"):
        state = parse_json(system.cat_file(f"{root}/state.json"), f"{path}/state.json")
        return [f"{root}/{file['filename']}" for file in state["_data_files"]]
    sets: dict[str, list[str]] = {}
    for name in sorted(system.find(root)):
        inside = name.removeprefix(root).lstrip("/")
        is_hidden = any(part.startswith((".", "_")) for part in inside.split("/"))
        if is_hidden or name.rpartition("/")[2] in NOT_ROWS or not _has_suffix(name):
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


def _has_suffix(name: str) -> bool:
    return any(name.endswith(suffix + ending) for suffix in SUFFIXES for ending in ENDINGS)


@contextmanager
def _one_sentence(path: str) -> Iterator[None]:
    """Make a `ValueError` of whatever a storage or a format's library raises. One of ours is a sentence already."""
    try:
        yield
    except pa.ArrowException as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or ' '.join(str(error).split())}") from None
    except ImportError as error:
        raise ValueError(f"{path} cannot be read without a package that is not installed: {error}") from None
    except ValueError:
        raise
    except Exception as error:  # each storage raises types of its own, as S3's without credentials
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}") from None


def _file_rows(path: str) -> Iterator[NumberedRow]:
    with _one_sentence(path), fsspec.open(path, "rb") as stored:
        file: Any = stored if stored.seekable() else io.BytesIO(stored.read())
        head = _head(file)
        for magic, compression in COMPRESSED.items():
            if head.startswith(magic):
                yield from _unpacked_rows(path, file, compression)
                return
        yield from _rows(path, file, head)


def _unpacked_rows(path: str, packed: Any, compression: str) -> Iterator[NumberedRow]:
    if compression not in compr:
        raise ValueError(f"{path} is compressed by {compression}, whose package is not installed; unpack the file")
    number = 0
    try:
        with compr[compression](packed, mode="rb") as file:
            for number, place, row in _rows(path, file, _head(file)):
                yield number, place, row
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path}, after row {number}: damaged {compression} data ({error})") from None


def _head(file: Any) -> bytes:
    head: bytes = file.read(HEAD)
    file.seek(0)
    return head


def _rows(path: str, file: Any, head: bytes) -> Iterator[NumberedRow]:
    """The rows of an unpacked file that begins with `head`."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"PAR1"):
        yield from _table_rows(path, pq.ParquetFile(file).iter_batches(ROWS_AT_ONCE))
    elif head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        yield from _table_rows(path, _arrow_batches(file, is_stream=head.startswith(b"\xff")))
    elif text.startswith(b"["):
        yield from _list_rows(path, file.read())
    elif text.startswith(b"{") or not text:
        yield from _lines(path, file)
    else:
        raise ValueError(f"{path} {_other_format(path, text)}")


def _other_format(path: str, text: bytes) -> str:
    """What a file is that holds no rows, and what to do."""
    if text.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, not the file itself; fetch it with: git lfs pull"
    if text.startswith(b"<"):
        return "is a web page, not a data file; download the file itself, on a hub by its address with /resolve/"
    if text.startswith(b"PK\x03\x04"):
        return f"is a zip archive; unpack it, and name the file in it ({FORMATS})"
    reader = "read_table" if path.endswith(".tsv") else "read_csv"
    return (
        f"is in another format than those that are read: {FORMATS}; convert it, a table of text with: "
        f"python -c \"import pandas; pandas.{reader}('FILE').to_parquet('rows.parquet')\""
    )


def _lines(path: str, file: Any) -> Iterator[NumberedRow]:
    """The rows of JSON lines that are not blank; an object that fills the whole file is one row."""
    is_first = True
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = parse_json(line, f"{place}: it")
        except ValueError:
            if not is_first:
                raise
            row = _whole_object(line + file.read())
            if row is None:
                raise
        is_first = False
        yield number, place, _row(row, place)


def _whole_object(content: bytes) -> Any:
    """The object that is written over several lines; `None` for any other content."""
    try:
        return parse_json(content, "it")
    except ValueError:
        return None


def _list_rows(path: str, content: bytes) -> Iterator[NumberedRow]:
    for number, row in enumerate(parse_json(content, f"{path}: it"), start=1):
        place = f"{path}, row {number}"
        yield number, place, _row(row, place)


def _row(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a {type(row).__name__}, not a JSON object")
    return row


def _table_rows(path: str, batches: Iterator[pa.RecordBatch]) -> Iterator[NumberedRow]:
    number = 0
    for batch in batches:
        for start in range(0, len(batch), ROWS_AT_ONCE):
            for row in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                number += 1
                yield number, f"{path}, row {number}", row


def _arrow_batches(file: Any, *, is_stream: bool) -> Iterator[pa.RecordBatch]:
    """Arrow's stream format, which data sets of Hugging Face have, or its file format."""
    if is_stream:
        yield from pa.ipc.open_stream(file)
        return
    reader = pa.ipc.open_file(file)
    yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
