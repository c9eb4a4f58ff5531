"""Folders as hubs and libraries leave them: their splits, their configurations, and what is no data."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mbd_core.multitf.data.data_files import find_files
from mbd_core.row_files.rows import SUFFIXES, read_file


def make(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return folder


def found(folder: Path, split: str | None = None) -> list[str]:
    return [Path(name).relative_to(folder).as_posix() for name in find_files(str(folder), split=split)]


HUB = ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet")
BESIDE = ("README.md", ".gitattributes", "dataset_infos.json", ".cache/huggingface/x.json", "__MACOSX/train.json")


@pytest.mark.parametrize(
    ("names", "splits", "train"),
    [
        (HUB, "train, test", "main/train-00000-of-00001.parquet"),
        (("train.jsonl", "test.jsonl"), "train, test", "train.jsonl"),
        (("data/train-00000-of-00002-a1b2.parquet", "data/valid-00000-of-00001.parquet"), "train, valid", None),
        (("train/part-0.parquet", "validation/part-0.parquet"), "train, validation", "train/part-0.parquet"),
        (("chats-train.jsonl", "chats_dev.jsonl"), "train, dev", "chats-train.jsonl"),
        (("default/train/0000.parquet", "default/test/0000.parquet"), "train, test", "default/train/0000.parquet"),
        (("gsm8k-train-00000-of-00001.arrow", "gsm8k-test.arrow"), "train, test", "gsm8k-train-00000-of-00001.arrow"),
        (("train_data.jsonl", "eval_data.jsonl"), "train_data, eval_data", "train_data.jsonl"),
        (
            ("train/data-00000-of-00001.arrow", "test/data-00000-of-00001.arrow", "train/state.json"),
            "train, test",
            None,
        ),
    ],
)
def test_a_folder_with_several_splits_is_never_one(
    tmp_path: Path, names: tuple[str, ...], splits: str, train: str | None
) -> None:
    make(tmp_path, *names, *BESIDE)
    for state in tmp_path.rglob("state.json"):
        state.write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    with pytest.raises(ValueError, match=f"{splits}; name one with --split$"):
        find_files(str(tmp_path))
    assert found(tmp_path, "train") == [train or next(name for name in names if name.endswith(SUFFIXES))]
    with pytest.raises(ValueError, match=f"'other', only {splits}"):
        find_files(str(tmp_path), split="other")


def test_splits_of_one_kind_are_apart(tmp_path: Path) -> None:
    names = [f"data/{split}-00000-of-00001.parquet" for split in ("train_sft", "train_gen", "test_sft")]
    make(tmp_path, *names)
    assert found(tmp_path, "train_sft") == names[:1]
    with pytest.raises(ValueError, match="'train', only train_gen"):
        find_files(str(tmp_path), split="train")


def test_files_of_no_split_beside_a_split_are_named(tmp_path: Path) -> None:
    make(tmp_path, "chats.jsonl", "test.jsonl")
    with pytest.raises(
        ValueError, match=r"has the split test and files of no split \(chats.jsonl\); name one with --split"
    ):
        find_files(str(tmp_path))
    assert found(tmp_path, "test") == ["test.jsonl"]


def test_configurations_are_apart(tmp_path: Path) -> None:
    make(tmp_path, *HUB, "socratic/train-00000-of-00001.parquet")
    with pytest.raises(ValueError, match="main, socratic: name the folder"):
        find_files(str(tmp_path), split="train")
    assert found(tmp_path / "main", "train") == ["train-00000-of-00001.parquet"]


def test_one_split_or_none_is_read_whole(tmp_path: Path) -> None:
    make(tmp_path / "one", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", *BESIDE[:4])
    assert len(found(tmp_path / "one")) == 2
    make(tmp_path / "none", "2024/a.jsonl", "2025/b.jsonl", "notes.txt")
    assert found(tmp_path / "none") == ["2024/a.jsonl", "2025/b.jsonl"]


def test_formats_that_are_not_read_are_named(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.csv")
    with pytest.raises(ValueError, match=r"b.csv.; name the files to read"):
        find_files(str(tmp_path))
    with pytest.raises(ValueError, match="splits"):
        find_files(str(tmp_path / "a.jsonl"), split="train")


def test_padding_of_structs_is_left_out_of_parquet_and_arrow(tmp_path: Path) -> None:
    plain = [
        {
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}],
            "x": {"a": {"b": [{"c": 1}]}},
        },
        {"messages": [{"role": "user", "content": "Hi"}], "x": {"d": {"z": 1}, "e": ["1", None]}},
    ]
    table = pa.Table.from_pylist(plain)
    assert table.to_pylist() != plain
    pq.write_table(table, tmp_path / "rows.parquet")
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("rows.parquet", "rows.arrow"):
        assert [row.values for row in read_file(str(tmp_path / name))] == plain


def test_values_of_the_type_json_keep_their_nulls(tmp_path: Path) -> None:
    """`Json()` of Hugging Face's datasets: a JSON text for each value, here in a list."""
    tools = [{"name": "f", "parameters": {"enum": ["a", None], "default": None}}]
    texts = pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(tool) for tool in tools]))
    one = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', None]))
    pairs = pa.array([{"k": 1}, None], pa.map_(pa.string(), pa.int64()))
    listed = pa.ListArray.from_arrays(pa.array([0, 1, 1], pa.int32()), texts)
    pq.write_table(pa.table({"tools": listed, "one": one, "map": pairs}), tmp_path / "rows.parquet")
    rows = [row.values for row in read_file(str(tmp_path / "rows.parquet"))]
    assert rows == [{"tools": tools, "one": {"a": 1}, "map": {"k": 1}}, {"tools": [], "one": None, "map": None}]


CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: [a.jsonl, "more/*.jsonl"]
  - split: exam
    path: b.jsonl
{other}---
A card.
"""


def test_a_readme_says_which_files_are_a_split(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.jsonl", "more/c.jsonl", "beside.jsonl", "README.md")
    (tmp_path / "README.md").write_text(CARD.format(other=""))
    with pytest.raises(ValueError, match="name one with --split"):
        find_files(str(tmp_path))
    assert found(tmp_path, "train") == ["a.jsonl", "more/c.jsonl"] and found(tmp_path, "exam") == ["b.jsonl"]
    other = "- config_name: second\n  data_files: beside.jsonl\n"
    (tmp_path / "README.md").write_text(CARD.format(other=other))
    with pytest.raises(ValueError, match="name the files of one"):
        find_files(str(tmp_path), split="train")
    (tmp_path / "README.md").write_text(CARD.format(other=other + "  default: true\n"))
    assert found(tmp_path) == ["beside.jsonl"]
    for card in ("---\nconfigs: 3\n---\n", "---\n: [\n---\n", "no card", "---\nconfigs:\n- data_files: z*\n---\n"):
        (tmp_path / "README.md").write_text(card)
        assert found(tmp_path) == ["a.jsonl", "b.jsonl", "beside.jsonl", "more/c.jsonl"]
