"""Rows of a benchmark from the hub; files of JSON lines are tested where problems are read from them."""

import sys
from types import ModuleType
from typing import Any

import fsspec
import pytest

from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.evaluation.tasks.prompts import load_examples


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
    with pytest.raises(ValueError, match=r"^hub:x/y, row 1: no column 'answer'"):
        load_problems(task, data="hub:x/y")
    with pytest.raises(ValueError, match=r"^hub:no/such cannot be loaded: FileNotFoundError"):
        load_problems(task, data="hub:no/such")
    with pytest.raises(ValueError, match="hub: names no data set"):
        load_problems(task, data="hub:")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="the package datasets"):
        load_problems(task, data="hub:x/y")
