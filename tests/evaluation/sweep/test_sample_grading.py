"""Samples from a file are graded without a model, and what is no sample is refused by line and reason."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.evaluation.packed_parts import pack, process_part
from jobs.eval_sweep import main as eval_sweep
from jobs.grade import main
from mbd_core.evaluation.sandbox import processes as sandbox
from mbd_core.evaluation.sandbox.processes import MEANING, describe_isolation
from mbd_core.evaluation.sweep.grading.part_grading import Grading
from mbd_core.evaluation.sweep.grading.sample_grading import load_samples
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.problems import load_problems

PLUS_ROW = {
    "task_id": "HumanEval/900",
    "prompt": 'def half(x):\n    """Half."""\n',
    "entry_point": "half",
    "canonical_solution": "    return x / 2\n",
    "base_input": [[2], [4]],
    "plus_input": [[5]],
    "atol": 0,
}


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_programs_are_graded_on_base_and_plus_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_lines(tmp_path / "data.jsonl", [PLUS_ROW, {**PLUS_ROW, "task_id": "HumanEval/901"}])
    name = {"task_id": "HumanEval/900"}
    samples = write_lines(
        tmp_path / "samples.jsonl",
        [
            {**name, "solution": "def half(x): return x / 2"},
            {**name, "completion": "    return x // 2\n"},
            {"doc_id": 0, "text": "Here:\n```python\ndef half(x):\n    return x * 0.5000000001\n```"},
            {**name, "text": "I cannot."},
        ],
    )
    out = tmp_path / "grades"
    command = ["--task", "humaneval-plus", "--data", str(data), "--samples", str(samples), "--out", str(out)]
    assert main(command) == 0
    rows = lines_of(out / "grades.jsonl")
    assert [(row["line"], row["base_correct"], row["plus_correct"]) for row in rows] == [
        (1, True, True),
        (2, True, False),  # 1 == 1.0: only the plus input tells them apart
        (3, True, True),  # within EvalPlus's tolerance
        (4, False, False),
    ]
    report = json.loads((out / "report.json").read_text())
    assert (report["samples"], report["correct"], report["base_correct"]) == (4, 2, 3)
    assert report["problems_without_a_sample"] == 1
    assert [row["task_id"] for row in lines_of(out / "evalplus.jsonl")] == ["HumanEval/900"] * 4
    assert "2 of 4 samples right (50.00 %, 95 % Wilson interval 15.0 to 85.0)" in capsys.readouterr().out
    assert main(command) == 2  # what is there is not replaced unasked
    assert main([*command, "--overwrite"]) == 0


def test_a_problem_that_breaks_its_grader_is_a_row_and_loses_no_other(tmp_path: Path) -> None:
    row = {**PLUS_ROW, "prompt": '"""\nHalve.\nassert half(2) == 1\n"""\n', "plus_input": []}
    row["canonical_solution"] = "def half(x): return x / 2\n"
    problems = [{**row, "task_id": "Mbpp/900"}, {**row, "task_id": "Mbpp/2", "base_input": [[2.5]]}]
    data = write_lines(tmp_path / "data.jsonl", problems)  # of Mbpp/2 an input's parts are lists, and 2.5 is none
    answer = {"solution": "def half(x): return x / 2"}
    asked = [{"task_id": "Mbpp/2", "text": "I cannot."}, {"task_id": "Mbpp/2", **answer}, {"doc_id": 0, **answer}]
    samples, out = write_lines(tmp_path / "samples.jsonl", asked), tmp_path / "grades"
    assert main(["--task", "mbpp-plus", "--data", str(data), "--samples", str(samples), "--out", str(out)]) == 0
    rows = lines_of(out / "grades.jsonl")
    assert [(row["correct"], row["reason"]) for row in rows] == [(False, "ungradable")] * 2 + [(True, "passed")]
    assert rows[0]["detail"] == rows[1]["detail"] == "TypeError: 'float' object is not iterable"
    assert json.loads((out / "report.json").read_text())["reasons"] == {"passed": 1, "ungradable": 2}


@pytest.mark.parametrize(
    ("task", "task_id", "reason"),
    [
        ("mbpp-plus", "HumanEval/900", "is a problem of HumanEval+; use task 'humaneval-plus'"),
        ("humaneval-plus", "Mbpp/2", "is a problem of MBPP+; use task 'mbpp-plus'"),
        ("mbpp-plus", "mine", "must be Mbpp/ and the problem's number"),
    ],
)
def test_the_other_file_of_evalplus_is_refused_before_anything_is_graded(
    task: str, task_id: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_lines(tmp_path / "data.jsonl", [{**PLUS_ROW, "task_id": task_id}])
    samples, out = write_lines(tmp_path / "samples.jsonl", [{"doc_id": 0, "solution": "x"}]), tmp_path / "out"
    assert main(["--task", task, "--data", str(data), "--samples", str(samples), "--out", str(out)]) == 2
    assert f"data.jsonl, line 1: '{task_id}' {reason}" in capsys.readouterr().err.replace("task_id '", "'")
    sweep = ["--models", "tiny-mbd", "--tasks", task, "--data", str(data), "--out", str(out)]
    assert eval_sweep(sweep) == 2 and "data.jsonl, line 1: " in capsys.readouterr().err
    assert not out.exists()


def test_math_samples_and_one_that_breaks_a_grader(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "gsm.jsonl", [{"question": "?", "answer": f"#### {n}"} for n in (18, 3)])
    samples = write_lines(
        tmp_path / "samples.jsonl",
        [
            {"doc_id": 0, "text": r"So \boxed{18}. She does this daily for 7 days."},
            {"problem_id": "gsm8k/2", "text": "#### " + "3" * 5000},
        ],
    )
    out = tmp_path / "grades"
    assert main(["--task", "gsm8k", "--data", str(data), "--samples", str(samples), "--out", str(out)]) == 0
    rows = lines_of(out / "grades.jsonl")
    assert [(row["correct"], row["strict_correct"]) for row in rows] == [(True, False), (False, False)]


def test_several_samples_of_a_problem_are_not_independent(tmp_path: Path) -> None:
    """Ten alike samples of each of four problems say as little as one."""
    data = write_lines(tmp_path / "gsm.jsonl", [{"question": "?", "answer": f"#### {n}"} for n in (1, 2, 3, 4)])
    once = [{"doc_id": number, "text": f"#### {1 + number % 2}"} for number in range(4)]
    found = {}
    for times in (1, 10):
        samples = write_lines(tmp_path / f"{times}.jsonl", once * times)
        out = tmp_path / f"out-{times}"
        assert main(["--task", "gsm8k", "--data", str(data), "--samples", str(samples), "--out", str(out)]) == 0
        found[times] = json.loads((out / "report.json").read_text())
    assert found[1]["wilson_interval"] == pytest.approx([0.150, 0.850], abs=1e-3)
    assert found[10]["correct"] == 20 and "wilson_interval" not in found[10]
    assert found[10]["bootstrap_interval"] == [0.0, 1.0]


def test_samples_are_read_in_the_formats_of_benchmarks(tmp_path: Path) -> None:
    rows = [
        {"task_id": "HumanEval/900", "completion": "    return x / 2"},
        {"task_id": "HumanEval/900", "text": "No."},
    ]
    problem_set = load_problems(find_task("humaneval-plus"), data=str(write_lines(tmp_path / "he.jsonl", [PLUS_ROW])))
    as_list, as_table = tmp_path / "samples.json", tmp_path / "samples.parquet"
    as_list.write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist([dict.fromkeys(("completion", "text")) | row for row in rows]), as_table)
    from_lines, from_list, from_table = (
        load_samples(path, problem_set) for path in (write_lines(tmp_path / "s.jsonl", rows), as_list, as_table)
    )
    assert from_lines == from_list == from_table
    assert [(sample.form, sample.line) for sample in from_lines] == [("completion", 1), ("text", 2)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not valid JSON"),
        ('{"doc_id": 0, "text": "\\ud800"}', "half of a surrogate pair"),
        ('{"doc_id": 0, "text": ' + "7" * 6000 + "}", "an integer of more than 4,300 digits"),
        ("[" * 100_000, "nested too deeply"),
        ("[1]", "a list, not a JSON object"),
        ('{"doc_id": 0}', "no column 'text'"),
        ('{"doc_id": 0, "text": 5}', "column 'text' must be text, not int"),
        ('{"text": "5"}', "no column that names the problem"),
        ('{"doc_id": 9, "text": "5"}', "doc_id 9 is no problem of task 'gsm8k'"),
        ('{"task_id": "x", "text": "5"}', "task_id 'x' is no problem"),
    ],
)
def test_what_is_no_sample_is_refused(
    row: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_lines(tmp_path / "gsm.jsonl", [{"question": "?", "answer": "#### 18"}])
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"doc_id": 0, "text": "18"}\n' + row + "\n")
    with pytest.raises(ValueError, match="line 2") as caught:
        load_samples(samples, load_problems(find_task("gsm8k"), data=str(data)))
    assert reason in str(caught.value)
    out = tmp_path / "grades"
    assert main(["--task", "gsm8k", "--data", str(data), "--samples", str(samples), "--out", str(out)]) == 2
    assert "line 2" in capsys.readouterr().err and not out.exists()


def test_programs_are_graded_behind_walls_only_where_these_are_required(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = write_lines(tmp_path / "samples.jsonl", [{"problem_id": "code-mini/0", "text": "x"}])
    command = ["--task", "code-mini", "--limit", "1", "--samples", str(samples)]
    problem = load_problems(find_task("code-mini"), limit=1).problems[0].problem_id
    write_lines(samples, [{"problem_id": problem, "text": "x"}])
    assert main([*command, "--isolation", "required", "--out", str(tmp_path / "graded")]) == 0
    assert capsys.readouterr().out.startswith(f"Programs run under {describe_isolation()}\n")
    for weaker in ("filter", "limits"):
        monkeypatch.setattr(sandbox, "available_isolation", lambda weaker=weaker: weaker)
        out = tmp_path / "refused"
        assert main([*command, "--isolation", "required", "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert "--isolation required: this machine has neither bubblewrap nor Landlock" in error
        assert MEANING[weaker] in error and error.count("\n") == 1 and not out.exists()
        table = pa.table({"task": ["code-mini"], "text": ["x"]})
        with pytest.raises(ValueError, match="bubblewrap"):
            process_part(pack(0, table), Grading(isolated=True))
