"""The study on calls: its questions, how it judges answers, its tables."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mbd_core.evaluation.sweep import folder as sweep_folder
from mbd_core.evaluation.tasks.kinds.function_calls import named_task
from mbd_core.tasks.split import split_of
from research.calls import data, report
from research.calls.report import JudgedAnswer, TimedAnswer, judged

FREE, GRAMMAR, NONE_FITS = "bfcl-free:multiple", "bfcl:multiple", "bfcl:irrelevance"


def asked(split: Any, number: int) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    return list(itertools.islice(data.questions(split), number))


def test_no_function_of_the_test_is_shown_in_training() -> None:
    shown = {
        split: {function["name"] for row, _ in asked(split, 300) for function in row["function"]}
        for split in ("train", "test")
    }
    assert len(shown["train"]) > 50 and len(shown["test"]) > 10
    assert all(split_of(name) == "train" for name in shown["train"])
    assert all(split_of(name) != "train" for name in shown["test"])


def test_the_trained_call_is_judged_right_and_each_part_of_it_counts() -> None:
    task = named_task("bfcl:multiple")
    for number, (row, right) in enumerate(asked("train", 40)):
        sample = data.conversation(row, right)
        answer = sample["messages"][-1]
        names = {function["name"] for function in row["function"]}
        if right is None:
            assert answer["content"] == data.NO_CALL and "tool_calls" not in answer
            continue
        assert set(right) <= names
        (call,) = (call["function"] for call in answer["tool_calls"])
        problem = task.problem(str(number), {"id": str(number), **row, "ground_truth": [right]})
        for given, is_right in ((call["arguments"], True), ({}, False)):
            text = json.dumps({"content": "", "calls": [{"name": call["name"], "arguments": json.dumps(given)}]})
            assert task.grader.judge(problem, text).correct is is_right


def sample(text: str, *, correct: bool = False) -> dict[str, Any]:
    functions = [{"name": name, "parameters": {"properties": {"path": {}}}} for name in ("os_link", "os_open")]
    return {
        "model": "m",
        "method": "single",
        "task": GRAMMAR,
        "problem_id": "0",
        "correct": correct,
        "reference": json.dumps({"functions": functions, "right": [{"os_link": {"path": ["a"]}}]}),
        "text": text,
        "num_tokens": 12,
        "num_forwards": 4,
    }


def calls(*named: tuple[str, str]) -> str:
    return json.dumps({"content": "", "calls": [{"name": name, "arguments": text} for name, text in named]})


@pytest.mark.parametrize(
    ("text", "is_valid", "is_function"),
    [
        (calls(("os_link", '{"path": "a"}')), True, True),
        (calls(("os_open", '{"path": "a"}')), True, False),
        (calls(("os_link", '{"path": "a"')), False, False),
        (calls(("os_link", '["a"]')), False, False),
        (calls(("os_link", '{"place": "a"}')), False, False),
        (calls(("os_unlink", "{}")), False, False),
        (calls(), False, False),
        (calls(("os_link", "{}"), ("os_link", "{}")), False, False),
    ],
)
def test_an_answer_is_valid_before_its_function_counts(text: str, is_valid: bool, is_function: bool) -> None:
    row = judged(sample(text))
    assert (row.is_valid, row.is_function, row.is_right) == (is_valid, is_function, False)


def test_tables_pair_the_same_questions_and_compare_the_times() -> None:
    def answer(model: str, task: str, problem: int, right: bool) -> JudgedAnswer:
        values = {"is_call": task != NONE_FITS, "is_valid": True, "is_function": right, "is_right": right}
        return JudgedAnswer(
            model=model, method="multi", task=task, problem=str(problem), tokens=12, forwards=4, **values
        )

    rows = [answer("control", task, n, True) for task in (FREE, GRAMMAR) for n in range(6)]
    rows += [answer("mbd", task, n, task == GRAMMAR and n < 3) for task in (FREE, GRAMMAR) for n in range(6)]
    rows += [answer("mbd", NONE_FITS, 0, True)]
    times = [
        TimedAnswer(model="mbd", method="multi", task=task, forwards=10, seconds=s)
        for task, s in ((FREE, 0.1), (GRAMMAR, 0.11))
    ]
    text = report.report(rows, times)
    assert "| mbd | multi | yes | 100.0 | 100.0 | 50.0 | 50.0 | 3.00 |" in text
    assert "| mbd | multi | yes, none fits | 0.0 | | | 100.0 | 3.00 |" in text
    assert "| right call, with a grammar | control multi | mbd multi | 3 | 0 | 0.250 |" in text
    assert "| right call | mbd multi, with a grammar | mbd multi, free | 3 | 0 | 0.250 |" in text
    assert "| mbd | multi | 10.0 | 11.0 | 1.100 |" in text
    simple = [replace(row, task=row.task.replace("multiple", "simple_python"), is_right=True) for row in rows]
    assert report.report(rows + simple, times) == text
    of_simple = report.report(rows + simple, times, "simple_python")
    assert "| mbd | multi | yes | 100.0 | 100.0 | 50.0 | 100.0 | 3.00 |" in of_simple
    assert "| mbd | multi | yes, none fits | 0.0 | | | 100.0 | 3.00 |" in of_simple
    with pytest.raises(ValueError, match="bfcl:simple_python; there are bfcl-free:multiple, bfcl:irrelevance"):
        report.report(rows, times, "simple_python")


def a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep that any folder holds: of a task with calls, and of one with numbers."""
    graded = [
        sample(calls(("os_link", '{"path": "a"}')), correct=True),
        sample(calls(("os_link", '{"path": "a"}')), correct=True) | {"task": FREE},
        sample("#### 5") | {"task": "gsm-mini", "reference": "5"},
    ]
    timed = {"model": "m", "method": "single", "num_forwards": 4, "decode_seconds": 0.1, "run": "alone", "error": None}
    monkeypatch.setattr(sweep_folder, "read_samples", lambda _: [row | {"error": None} for row in graded])
    monkeypatch.setattr(sweep_folder, "read_times", lambda _: [timed | {"task": row["task"]} for row in graded])


def test_a_sweep_may_have_other_tasks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_sweep(monkeypatch)
    argv = ["--sweep", str(tmp_path), "--out", str(tmp_path / "out")]
    assert report.main([*argv, "--category", "simpel"]) == 2
    assert "no answer is to bfcl:simpel; there are bfcl-free:multiple, bfcl:multiple" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert report.main(argv) == 0
    assert "| m | single | yes | 100.0 | 100.0 | 100.0 | 100.0 | 3.00 |" in capsys.readouterr().out
    assert {row.task for rows in report.kept(tmp_path / "out") for row in rows} == {FREE, GRAMMAR}
    with (tmp_path / "out" / report.TIMES).open("a") as file:
        file.write("{\n")
    assert report.main(["--report-only", str(tmp_path / "out")]) == 2
    assert "times.jsonl, line 3: it is not valid JSON" in capsys.readouterr().err


def test_bad_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--report-only", str(tmp_path)])
    assert "rows.jsonl" in capsys.readouterr().err
    assert report.main([])
    assert "--sweep" in capsys.readouterr().err


@pytest.mark.parametrize("table", ["calls", "calls-longer", "calls-bfcl multiple", "calls-bfcl simple_python"])
def test_the_page_has_the_arms_of_the_published_rows(table: str) -> None:
    root = Path(report.__file__).resolve().parents[2]
    folder, _, category = table.partition(" ")
    lines = report.report(*report.kept(root / "research/published" / folder), category or report.CATEGORY)
    page = (root / "research/calls/README.md").read_text(encoding="utf-8")
    assert page.split(f"<!-- {table} -->\n")[1].split("<!-- end -->")[0].splitlines() == lines[: lines.index("")]
