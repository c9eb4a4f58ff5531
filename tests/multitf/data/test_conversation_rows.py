"""Rows of every kind of file that users have, each with its name; and what is wrong with the others."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mbd_core.multitf.data.conversation_rows import Columns
from mbd_core.multitf.data.data_files import find_files
from mbd_core.row_files.rows import FileRow, read_file

ROWS = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(5)]


def arrow_stream(path: Path, rows: list[dict]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def zstd(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content))


Pack = Callable[[bytes], bytes]
PACKED: dict[str, Pack] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}
KINDS = ("jsonl", *(f"jsonl.{ending}" for ending in PACKED), "json", "parquet", "arrow", "dataset", "folder")


def read_all(files: list[str]) -> list[FileRow]:
    return [row for file in files for row in read_file(file, unique=True)]


def write(kind: str, folder: Path) -> Path:
    """The rows as a file of that kind, or as a Hugging Face dataset that was saved to disk."""
    path = folder / f"rows.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if kind.partition(".")[2] in PACKED:
        path.write_bytes(PACKED[kind.partition(".")[2]](lines.encode()))
    elif kind == "jsonl":
        path.write_text(lines.replace("\n", "\n\n", 1))
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    elif kind == "arrow":
        table = pa.Table.from_pylist(ROWS)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    elif kind == "dataset":
        path.mkdir()
        names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        arrow_stream(path / names[0], ROWS[:3])
        arrow_stream(path / names[1], ROWS[3:])
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        (path / "dataset_info.json").write_text("{}")
    else:
        (path / "data").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(ROWS[:2]), path / "data" / "train-0.parquet")
        pq.write_table(pa.Table.from_pylist(ROWS[2:]), path / "data" / "train-1.parquet")
        (path / "README.md").write_text("a card")
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("url", [False, True], ids=["path", "url"])
def test_rows_of_every_kind_of_file_come_in_order(kind: str, url: bool, tmp_path: Path) -> None:
    path = write(kind, tmp_path)
    rows = read_all(find_files(f"file://{path}" if url else str(path)))
    assert [row.values for row in rows] == ROWS
    names = [row.name for row in rows]
    assert len(set(names)) == 5
    if kind == "jsonl":
        assert names == [f"rows.jsonl line {n}" for n in (1, 3, 4, 5, 6)]
    if kind == "folder":
        assert names[1:3] == ["train-0.parquet row 2", "train-1.parquet row 1"]


def test_a_dataset_of_several_splits_has_one_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    write("dataset", tmp_path).rename(tmp_path / "train")
    with pytest.raises(ValueError, match="name one with --split"):
        find_files(str(tmp_path))
    with pytest.raises(ValueError, match="only train, test"):
        find_files(str(tmp_path), split="dev")
    assert len(read_all(find_files(str(tmp_path), split="train"))) == 5


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"a": 1}\n{broken\n', r"a\.jsonl, line 2: it is not valid JSON"),
        ("a.jsonl", "[1]\n", r"a\.jsonl, row 1: a int, not a JSON object"),
        ("a.jsonl", '{"a": 1}\n[1]\n', r"a\.jsonl, line 2: a list, not a JSON object"),
        ("a.jsonl", '{"a": 1}\n{"a": "\\ud800"}\n', r"a\.jsonl, line 2: it holds .ud800, half of a surrogate pair"),
        (
            "a.jsonl",
            '{"a": 1}\n{"a": ' + "7" * 6000 + "}",
            r"a\.jsonl, line 2: it holds an integer of more than",
        ),
        ("a.jsonl", '{"a": 1}\n' + "[" * 100_000, r"a\.jsonl, line 2: it is nested too deeply"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}', r"a\.jsonl, line 2: it is not UTF-8: invalid start byte at byte 7"),
        ("a.json", '[{"a": "\\uDC00"}]', r"a\.json holds .udc00, half of a surrogate pair"),
        ("a.json", "[" * 100_000, r"a\.json is nested too deeply"),
        ("a.json", "[1]", r"a\.json, row 1: a int, not a JSON object"),
        ("a.parquet", "PAR1 nothing", "cannot be read"),
        ("a.arrow", "ARROW1 nothing", "cannot be read"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd nothing", "cannot be read"),
        ("a.jsonl.gz", "nothing", r"a\.jsonl\.gz, line 1: it is not valid JSON"),
        ("a.parquet", "nothing", "is in another format than those that are read: JSON lines"),
        ("a.csv", "prompt,response\n1+1?,2\n", r"read_csv\('FILE'\).to_parquet"),
        ("a.jsonl", "version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.jsonl", "<!DOCTYPE html><html>", "download the file itself"),
        ("a.jsonl", b"PK\x03\x04rest", "unpack it"),
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    ],
)
def test_a_file_that_holds_no_rows_is_one_sentence(
    tmp_path: Path, name: str, content: str | bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=sentence) as refusal:
        read_all(find_files(str(tmp_path / name)))
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", '{"a": "\\ud83d\\ude00"}'), ("a.json", '[{"a": "😀"}]')])
def test_a_byte_order_mark_is_taken(tmp_path: Path, name: str, content: str) -> None:
    """And a whole surrogate pair is a character."""
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert [row.values for row in read_file(str(tmp_path / name))] == [{"a": "😀"}]


def test_a_place_without_files_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        find_files(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="is a folder without a file of rows"):
        find_files(str(tmp_path))
    with pytest.raises(ValueError, match="leave --split out"):
        find_files(str(tmp_path), split="train")


class Closed(fsspec.AbstractFileSystem):
    """A storage that lets nobody in, and says so by a type of its own, as S3's library does."""

    protocol = "closed"

    def isfile(self, path: str) -> bool:
        raise RuntimeError("no credentials\nadvice")

    def _open(self, path: str, mode: str = "rb", **options: object) -> None:
        raise RuntimeError("no credentials\nadvice")


def test_a_storage_that_refuses_is_one_sentence() -> None:
    fsspec.register_implementation("closed", Closed, clobber=True)
    sentence = "^closed://rows.jsonl cannot be read: RuntimeError: no credentials$"
    with pytest.raises(ValueError, match=sentence):
        find_files("closed://rows.jsonl")
    with pytest.raises(ValueError, match=sentence):
        next(read_file("closed://rows.jsonl"))


def test_conversations_come_from_the_usual_columns() -> None:
    user, answer = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
    for row in (
        {"messages": [user, answer]},
        {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]},
        {"prompt": "1+1?", "response": "2", "system": None},
        {"instruction": "1+1?", "output": "2", "system": ""},
    ):
        assert Columns.of(row).messages(row) == [user, answer]
    row = {"q": "1+1?", "a": "2", "system": "Be brief."}
    system = {"role": "system", "content": "Be brief."}
    assert Columns(prompt="q", response="a").messages(row) == [system, user, answer]
    with pytest.raises(ValueError, match=r"'q', 'a', 'system'"):
        Columns.of(row)
    with pytest.raises(ValueError):
        Columns(prompt="q")


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "does not end with a user's message and the assistant's answer"),
        ([{"role": "user", "content": "x"}], "does not end with"),
        ([{"role": "assistant", "content": "x"}], "does not end with"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": " \n"}], "its answer is empty"),
        ([{"role": "user", "content": "x"}, {"role": "robot", "content": "y"}], "its message 2 needs a role"),
        ([{"role": "user", "content": None}, {"role": "assistant", "content": "y"}], "its message 1 needs"),
        ("text", "is no list of messages"),
        (None, "it has no 'messages'"),
    ],
)
def test_what_is_no_conversation_says_why(messages: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Columns(chat="messages").messages({"messages": messages})


def test_rows_that_a_model_answers_end_before_their_answer() -> None:
    user, answer = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
    for row in (
        {"messages": [user, answer]},
        {"messages": [user]},
        {"prompt": "1+1?"},
        {"question": "1+1?", "answer": ""},
        {"question": "1+1?", "answer": None},
    ):
        assert Columns.of(row, answered=False).messages(row) == [user]
    assert Columns(prompt="q", answered=False).messages({"q": "1+1?"}) == [user]
    turns = [user, answer, user]
    assert Columns(chat="messages", answered=False).messages({"messages": [*turns, answer]}) == turns
    for bad in ([], [answer], [user, answer, answer]):
        with pytest.raises(ValueError):
            Columns(chat="messages", answered=False).messages({"messages": bad})
