"""The data of the study on a real model: splits apart, answers right by rule, bad input in a sentence."""

import json
import subprocess
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mbd_core.multitf.recipes.choice import find_recipe
from research.real import data

PARAGRAPHS = "\n\n".join(
    f"Package: tool-{number}\nVersion: 1.{number}\nInstalled-Size: {number}\nMaintainer: Tool Makers <m@example.org>\n"
    f"Description: Tool with the number {number}\nSection: utils\nHomepage: https://example.org/{number}"
    for number in range(200)
)


@pytest.fixture(autouse=True)
def package_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.shutil, "which", lambda name: f"/usr/bin/{name}")
    answer = subprocess.CompletedProcess([], 0, stdout=PARAGRAPHS)
    monkeypatch.setattr(data.subprocess, "run", lambda *_, **__: answer)


def test_an_answer_holds_what_the_text_says_and_null_for_the_rest() -> None:
    rows = list(data.package_fields(split="train", seed=1))
    assert len(rows) > 100
    for row in rows:
        text, fields = row["question"].removeprefix(data.EXTRACT), json.loads(row["answer"])
        assert tuple(fields) == data.FIELDS
        assert all(str(value) in text for value in fields.values() if value is not None)
        assert (fields["homepage"] is None) == ("https://" not in text)
    assert any(None in json.loads(row["answer"]).values() for row in rows)


def test_a_package_less_changes_no_other_question(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(data.package_fields(split="train", seed=1))
    fewer = subprocess.CompletedProcess([], 0, stdout=PARAGRAPHS.split("\n\n", 100)[-1])
    monkeypatch.setattr(data.subprocess, "run", lambda *_, **__: fewer)
    after = list(data.package_fields(split="train", seed=1))
    assert 0 < len(after) < len(before)
    assert after == [row for row in before if row in after]


def test_splits_share_no_problem() -> None:
    for stream in data.streams(None).values():
        train, test = ({row["question"] for row in islice(stream(split), 300)} for split in ("train", "test"))
        assert train and test and not train & test


@pytest.mark.slow
def test_the_whole_library_has_sentences_for_every_split() -> None:
    data._imperatives.cache_clear()
    found = [
        {row["question"] for row in data.third_person(split=split, seed=0)} for split in ("train", "valid", "test")
    ]
    assert len(found[0]) > 1_000 and min(map(len, found)) > 100
    assert len(set.union(*found)) == sum(map(len, found))
    data._imperatives.cache_clear()


def test_the_third_person_follows_the_verb() -> None:
    assert [data._third(verb) for verb in ("Return", "Pass", "Copy", "Display", "Fetch", "Do")] == [
        "Returns",
        "Passes",
        "Copies",
        "Displays",
        "Fetches",
        "Does",
    ]
    for row in data.third_person(split="test", seed=0):
        assert row["answer"].split(" ", 1)[1] == row["question"].removeprefix(data.REWRITE).split(" ", 1)[1]


def test_gsm8k_s_training_file_gives_train_and_valid(tmp_path: Path) -> None:
    rows = [{"question": f"q{number}", "answer": f"a <<1+{number}=2>>b\n#### 2"} for number in range(60)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, valid = ({row["question"] for row in data.gsm8k(tmp_path, split)} for split in ("train", "valid"))
    assert train and valid and not train & valid and len(train | valid) == 60
    assert next(data.gsm8k(tmp_path, "test")) == {"question": "q0", "answer": "a b\n#### 2"}


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        ('["q", "a"]', "line 2: a list, not a JSON object"),
        ('{"question": "q"}', "line 2: question and answer must be texts"),
        ('{"question": "q", "answer": 5}', "line 2: question and answer must be texts"),
        ('{"question": "q", "answ', "line 2: it is not valid JSON"),
    ],
)
def test_a_bad_row_of_gsm8k_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], second: str, fault: str
) -> None:
    good = json.dumps({"question": "one\u2028two\x85three", "answer": "#### 2"}, ensure_ascii=False)
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(f"{good}\n", encoding="utf-8")
    assert [row["question"] for row in data.gsm8k(tmp_path, "test")] == ["one\u2028two\x85three"]
    (tmp_path / "train.jsonl").write_text(f"{good}\n{second}\n", encoding="utf-8")
    assert data.main(["--out", str(tmp_path / "out"), "--gsm8k", str(tmp_path)]) == 2
    assert f"{tmp_path / 'train.jsonl'}, {fault}" in capsys.readouterr().err


def test_a_package_may_lack_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PARAGRAPHS.split("\n\n")[0]
    lacking = whole.replace("Version: 1.0\n", "").replace("Maintainer: Tool Makers <m@example.org>\n", "")
    odd = [lacking.replace("Installed-Size: 0", "Installed-Size: a lot"), lacking.replace("Package: tool-0\n", "")]
    answer = subprocess.CompletedProcess([], 0, stdout="\n\n".join([lacking, *odd]))
    monkeypatch.setattr(data.subprocess, "run", lambda *_, **__: answer)
    (package,) = data._packages()
    assert (package["package"], package["version"], package["maintainer"]) == ("tool-0", None, None)


def test_an_apt_cache_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess(
        [], 100, stdout="", stderr="W: old\nE: The list of sources could not be read.\n"
    )
    monkeypatch.setattr(data.subprocess, "run", lambda *_, **__: failed)
    assert data.main(["--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.rstrip().endswith("failed: E: The list of sources could not be read.")
    assert not (tmp_path / "out").exists()


def test_a_python_below_a_folder_named_test_has_sentences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "test" / "lib"
    for folder in (library, library / "test"):
        folder.mkdir(parents=True)
        functions = [f'def f{n}():\n    """Return the {folder.name} of number {n}."""\n' for n in range(3)]
        (folder / "module.py").write_text("\n".join(functions))
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(library))
    assert sorted(data._imperatives.__wrapped__()) == [f"Return the lib of number {n}." for n in range(3)]


def test_the_command_writes_once_and_refuses_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "data"
    assert data.main(["--out", str(out)]) == 0
    samples: list[dict[str, Any]] = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert {message["role"] for message in samples[0]["messages"]} == {"user", "assistant"}
    assert not (out / "gsm8k-test.jsonl").exists() and (out / "gsm-mini-test.jsonl").exists()
    capsys.readouterr()
    assert data.main(["--out", str(out)]) == 2
    assert data.main(["--out", str(tmp_path / "b"), "--gsm8k", str(tmp_path / "none")]) == 2
    assert "holds no train.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["AR", "BD", "MBD", "TF"])
def test_arms_are_adapters_of_one_size(name: str) -> None:
    arm = find_recipe(f"research/real/recipes.py:{name}")
    base = find_recipe("research/real/recipes.py:BD")
    assert arm.train.lora == base.train.lora and arm.max_length == base.max_length
