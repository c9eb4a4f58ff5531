"""Rows of a benchmark as hubs have them: every file format, folders of splits, data sets of the hub itself."""

import bz2
import gzip
import json
import lzma
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.evaluation.tasks.prompts import load_examples

ROWS = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def write_parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def arrow_bytes(new: Any) -> bytes:
    sink, table = pa.BufferOutputStream(), pa.Table.from_pylist(ROWS)
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def questions(data: Path | str) -> list[str]:
    return [problem.prompt for problem in load_problems(find_task("gsm8k"), data=str(data)).problems]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("test.jsonl", LINES.encode()),
        ("rows", b"\xef\xbb\xbf" + LINES.encode()),
        ("test.json", LINES.encode()),
        ("list.json", json.dumps(ROWS).encode()),
        ("list.jsonl", json.dumps(ROWS, indent=2).encode()),
        ("list.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("named-plain.jsonl", gzip.compress(LINES.encode(), mtime=0)),
        ("test.jsonl.bz2", bz2.compress(LINES.encode())),
        ("test.jsonl.xz", lzma.compress(LINES.encode())),
        ("data.arrow", arrow_bytes(pa.ipc.new_stream)),
        ("file.arrow", arrow_bytes(pa.ipc.new_file)),
        ("stream.arrow.gz", gzip.compress(arrow_bytes(pa.ipc.new_stream), mtime=0)),
    ],
)
def test_a_file_s_content_decides_its_format(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert questions(tmp_path / name) == ["0 + 1?", "1 + 1?", "2 + 1?"]


def test_a_name_that_stands_twice_in_a_table_is_refused(tmp_path: Path) -> None:
    question, answer = pa.array(["1 + 1?"]), pa.array(["2"])
    two_columns = pa.Table.from_arrays([question, answer, answer], ["question", "answer", "answer"])
    struct = pa.StructArray.from_arrays([question, answer], ["text", "text"])
    for table, named in ((two_columns, "columns have the name 'answer'"), (pa.table({"a": struct}), "'text' twice")):
        with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(ValueError, match=f"rows.arrow cannot be read: .*{named}"):
            questions(tmp_path / "rows.arrow")


def test_parquet_is_read_whatever_its_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "test-00000-of-00001.parquet")
    assert questions(path) == questions(f"file://{path}") == questions(path.rename(tmp_path / "rows"))


def test_one_object_over_several_lines_is_a_row(tmp_path: Path) -> None:
    for number, row in enumerate(ROWS):
        (tmp_path / f"{number}.json").write_text(json.dumps(row, indent=2))
    assert questions(tmp_path / "*.json") == ["0 + 1?", "1 + 1?", "2 + 1?"]


def test_a_folder_is_one_split_or_names_what_it_holds(tmp_path: Path) -> None:
    for part in range(2):
        write_parquet(tmp_path / f"main/test-0000{part}-of-00002.parquet", ROWS[part : part + 1])
    (tmp_path / "README.md").write_text("---")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/other.json").write_text("[]")
    assert questions(tmp_path) == ["0 + 1?", "1 + 1?"]
    found = load_problems(find_task("gsm8k"), data=str(tmp_path)).problems
    assert [problem.problem_id for problem in found] == ["gsm8k/1", "gsm8k/2"]
    write_parquet(tmp_path / "main/train-00000-of-00001.parquet")
    with pytest.raises(ValueError, match="name one, as ") as refused:
        questions(tmp_path)
    named = str(refused.value).rpartition("'")[0].rpartition("'")[2]
    assert questions(named) == ["0 + 1?", "1 + 1?"], "the sentence's own example works"
    with pytest.raises(ValueError):
        questions(tmp_path / "valid*")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError):
        questions(tmp_path / "empty")


def test_a_data_set_that_was_saved_to_disk_is_its_files(tmp_path: Path) -> None:
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(arrow_bytes(pa.ipc.new_stream))
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    assert len(questions(tmp_path)) == 3


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "download the file itself"),
        (b"PK\x03\x04rest", "unpack it"),
        (b"question,answer\n1 + 1?,2\n", r"read_csv\('FILE'\).to_parquet"),
        (b"[{]", "rows, line|not valid JSON"),
        (b'[{"question": "1?"}]', "rows, row 1: no column 'answer'; a row needs question, answer, and has question"),
        (b"[1]", "rows, row 1: a int, not a JSON object"),
        (b"PAR1 cut", "rows cannot be read"),
        (b"ARROW1 cut", "rows cannot be read"),
        (gzip.compress(b"PAR1 cut", mtime=0), "rows cannot be read"),
    ],
)
def test_what_holds_no_rows_is_one_sentence(tmp_path: Path, content: bytes, remedy: str) -> None:
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(ValueError, match=remedy) as refused:
        questions(tmp_path / "rows")
    assert "\n" not in str(refused.value)


def test_the_hub_s_forms_of_code_benchmarks(tmp_path: Path) -> None:
    mbpp = {"task_id": 2, "prompt": "Double it.", "test_imports": [], "test_list": ["assert double(2) == 4"]}
    (tmp_path / "sanitized-mbpp.json").write_text(json.dumps([mbpp]))
    full = {"task_id": 2, "text": "Double it.", "test_list": mbpp["test_list"], "test_setup_code": "", "prompt": None}
    parquet = write_parquet(tmp_path / "mbpp.parquet", [full])
    sanitized, whole = (
        load_problems(find_task("mbpp"), data=str(path)).problems
        for path in (tmp_path / "sanitized-mbpp.json", parquet)
    )
    assert sanitized == whole and sanitized[0].entry_point == "double"
    plus = {
        "task_id": "HumanEval/0",
        "prompt": "def f(x):\n",
        "canonical_solution": "",
        "entry_point": "f",
        "test": "",
    }
    with pytest.raises(ValueError, match="evalplus/humanevalplus"):
        load_problems(find_task("humaneval-plus"), data=str(write_parquet(tmp_path / "plus.parquet", [plus])))


def hub_package(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """A stand-in for `datasets`, with what it is asked for."""
    asked: list[tuple[Any, ...]] = []
    package = ModuleType("datasets")

    def load_dataset(name: str, configuration: str | None, *, split: str) -> list[dict[str, Any]]:
        asked.append((name, configuration, split))
        if name == "no/such":
            raise FileNotFoundError("Couldn't find 'no/such'\nand more")
        return rows

    package.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    return asked


class Closed(fsspec.AbstractFileSystem):
    """A storage that lets nobody in, and says so by a type of its own, as S3's library does without credentials."""

    protocol = "closed"

    def _open(self, path: str, mode: str = "rb", **options: object) -> None:
        raise RuntimeError("Unable to locate credentials")


def test_a_storage_that_refuses_is_one_sentence() -> None:
    fsspec.register_implementation("closed", Closed, clobber=True)
    sentence = "^closed://rows.jsonl cannot be read: RuntimeError: Unable to locate credentials$"
    with pytest.raises(ValueError, match=sentence):
        load_problems(find_task("gsm8k"), data="closed://rows.jsonl")
    with pytest.raises(ValueError, match=sentence):
        load_examples(find_task("gsm8k"), "closed://rows.jsonl")


def test_a_data_set_of_the_hub_gives_the_same_problems_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub_package(
        monkeypatch, [{"question": "2 + 2?", "answer": "#### 4"}, {"question": "1?", "answer": "#### 1"}]
    )
    task = find_task("gsm8k")
    found = load_problems(task, data="hub:openai/gsm8k:main:test", limit=1)
    assert [(p.problem_id, p.prompt, p.reference) for p in found.problems] == [("gsm8k/1", "2 + 2?", "4")]
    load_problems(task, data="hub:openai/gsm8k")
    load_problems(task, data="hub:openai/gsm8k:main")
    assert asked == [
        ("openai/gsm8k", "main", "test"),
        ("openai/gsm8k", None, "test"),
        ("openai/gsm8k", "main", "test"),
    ]


def test_what_the_hub_cannot_give_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_package(monkeypatch, [{"question": "2 + 2?"}])
    task = find_task("gsm8k")
    with pytest.raises(ValueError, match=r"row 1: .*'answer'"):
        load_problems(task, data="hub:x/y")
    with pytest.raises(ValueError, match="no/such"):
        load_problems(task, data="hub:no/such")
    with pytest.raises(ValueError):
        load_problems(task, data="hub:")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="the package datasets"):
        load_problems(task, data="hub:x/y")
