"""Reports from rows alone: shards give the sweep's own, and what cannot be joined is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from written_sweeps import WHOLE, graded_table, planned_rows, sweep_record, timed_table, write_parts

from jobs.report_sweep import main
from mbd_core.batch.parts import cut
from mbd_core.batch.timed_cases import Timing
from mbd_core.evaluation.report.summary import summarize_sweeps
from mbd_core.evaluation.sandbox.processes import MEANING
from mbd_core.evaluation.sweep.folder import REPORT, SweepFolder, read_report
from mbd_core.evaluation.sweep.grading.graded_rows import GRADED_COLUMNS, ISOLATION
from mbd_core.evaluation.sweep.shard import SweepShard

pytestmark = pytest.mark.usefixtures("unrendered_pictures")

ASKED = {"form": "turn", "prompt": "{question}", "examples": 1, "examples_sha256": "0", "stop": ["Q:"]}
NAMES = (REPORT, "report.md", "report.html", "plot.png")


def test_shards_give_the_report_of_the_sweep_in_any_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_parts(tmp_path / "whole")
    for index in (1, 2, 3):
        write_parts(tmp_path / str(index), shard=SweepShard(index=index, count=3))
    assert main([str(tmp_path / name) for name in "312"] + ["--out", str(tmp_path / "joined")]) == 0
    for name in NAMES:
        assert (tmp_path / "joined" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    part = read_report(tmp_path / "2")
    assert part["settings"]["shard"] == "2/3"
    assert part["settings"]["incomplete"] == f"{sum(row['n'] for row in part['rows'])} of 40 samples are there"
    assert "incomplete" not in capsys.readouterr().out
    assert main([str(tmp_path / name) for name in "12"] + ["--out", str(tmp_path / "joined"), "--overwrite"]) == 0
    assert "of 40 samples are there" in capsys.readouterr().err
    assert main([str(tmp_path / "1"), "--overwrite"]) == 2
    assert "give --out, or leave --overwrite out" in capsys.readouterr().err


def test_a_report_has_the_accuracy_by_each_rule_of_a_task(tmp_path: Path) -> None:
    rows = planned_rows(problems=4)
    parts = cut(rows, rows_per_part=4)
    with SweepFolder.claim(tmp_path, sweep_record(rows, parts)) as folder:
        for part in parts:
            graded = graded_table(part).to_pylist()
            for row in graded:  # task a as one of EvalPlus's, task b as one of numbers
                first, second = ("base", "plus") if row["task"] == "a" else ("flexible", "strict")
                row |= {f"{first}_correct": True, f"{second}_correct": int(row["problem_id"][2:]) < 1}
            folder.write_part(part.number, pa.Table.from_pylist(graded, schema=GRADED_COLUMNS))
    files = summarize_sweeps([tmp_path]).files
    (first, *_, last) = json.loads(files[REPORT])["rows"]
    assert (set(first["by_rule"]), set(last["by_rule"])) == ({"base", "plus"}, {"strict", "flexible"})
    assert first["by_rule"]["plus"] == pytest.approx({"accuracy": 25, "low": 4.5587, "high": 69.9358}, abs=1e-3)
    section = files["report.md"].decode().partition("## Accuracy by rule")[2].partition("\n## ")[0]
    heads, _, *lines = [line for line in section.splitlines() if line.startswith("|")]
    assert heads.endswith("| Strict [95 %] | Flexible [95 %] | Base [95 %] | Plus [95 %] |")
    whole, part_right = "100.00 [51.0, 100.0]", "25.00 [4.6, 69.9]"
    assert lines[0] == f"| m | MBD | A | tau_m2t=0.7 | 4 | - | - | {whole} | {part_right} |"
    assert lines[-1] == f"| m | MBD | B | tau_m2t=0.9 | 4 | {part_right} | {whole} | - | - |"
    assert b">Accuracy by rule</h2>" in files["report.html"]


def test_a_report_says_why_requests_could_not_be_decoded(tmp_path: Path) -> None:
    rows = planned_rows(problems=4, tasks=("a",))
    [part] = cut(rows, rows_per_part=len(rows))
    graded = graded_table(part).to_pylist()
    for row, reason in zip(graded, ("no tools", "too long", "no tools", *("abc")), strict=False):
        row |= {"error": reason, "text": None, "correct": False}
    with SweepFolder.claim(tmp_path, sweep_record(rows, [part])) as folder:
        folder.write_part(0, pa.Table.from_pylist(graded, schema=GRADED_COLUMNS))
    files = summarize_sweeps([tmp_path]).files
    said = json.loads(files[REPORT])["settings"]["not decoded"]
    assert said[0] == "m on a, 2 of 6: no tools" and len(said) == 3 and all(", 1 of 6: " in each for each in said[1:])
    assert b"not decoded: m on a, 2 of 6: no tools" in files["report.md"]


def test_a_report_says_of_which_weights_it_is_and_how_programs_were_contained(tmp_path: Path) -> None:
    rows = planned_rows()
    parts = cut(rows, rows_per_part=4)
    for name, shard in (("whole", WHOLE), ("1", SweepShard(index=1, count=2)), ("2", SweepShard(index=2, count=2))):
        record = replace(sweep_record(rows, parts, shard=shard), settings={"models": {"m": {"dtype": "float32"}}})
        with SweepFolder.claim(tmp_path / name, record) as folder:
            for number in folder.missing():
                way = {ISOLATION: "filter" if number % 2 else "bubblewrap"}
                folder.write_part(number, graded_table(parts[number]).replace_schema_metadata(way))
    joined, whole = summarize_sweeps([tmp_path / "1", tmp_path / "2"]), summarize_sweeps([tmp_path / "whole"])
    settings = json.loads(whole.files[REPORT])["settings"]
    assert settings["models"] == {"m": {"digest": "digest", "dtype": "float32"}}
    assert settings["isolation"] == [MEANING["bubblewrap"], MEANING["filter"]]
    assert joined.files == whole.files and f"- isolation: {MEANING['bubblewrap']}; {MEANING['filter']}" in whole.text
    alone = json.loads(summarize_sweeps([tmp_path / "1"]).files[REPORT])["settings"]
    assert alone["isolation"] == [MEANING["bubblewrap"]]


def write_timed(path: Path, *, num_cases: int = 2, cases: Sequence[int] = (0,), **changes: Any) -> None:
    """A sweep with times of some of its two configurations on task a."""
    rows = planned_rows(tasks=("a",), problems=3)
    parts = cut(rows, rows_per_part=4)
    with SweepFolder.claim(path, sweep_record(rows, parts, num_cases=num_cases, **changes)) as folder:
        for number in folder.missing():
            folder.write_part(number, graded_table(parts[number]))
        for number in cases:
            if number in folder.missing_cases():
                folder.write_case(number, timed_table(rows[number]))


def test_a_folder_named_twice_counts_once(tmp_path: Path) -> None:
    write_timed(tmp_path / "whole")
    once, twice = summarize_sweeps([tmp_path / "whole"]), summarize_sweeps([tmp_path / "whole"] * 2)
    (speed,) = json.loads(once.files[REPORT])["times"]
    assert (speed["num_alone"], speed["num_together"]) == (1, 2)
    assert once.files == twice.files


def test_shards_that_are_timed_otherwise_are_one_sweep_and_what_is_not_timed_is_named(tmp_path: Path) -> None:
    write_timed(tmp_path / "1", shard=SweepShard(index=1, count=2))
    write_timed(tmp_path / "2", shard=SweepShard(index=2, count=2), cases=(), timing=Timing(problems=2, concurrency=8))
    report = json.loads(summarize_sweeps([tmp_path / "1", tmp_path / "2"]).files[REPORT])
    assert "incomplete" not in report["settings"] and sum(row["n"] for row in report["rows"]) == 6
    assert report["settings"]["not timed"] == ["m, MBD on a: tau_m2t=0.9"]
    write_timed(
        tmp_path / "3", shard=SweepShard(index=2, count=2), cases=(1,), timing=Timing(problems=2, concurrency=8)
    )
    report = json.loads(summarize_sweeps([tmp_path / "1", tmp_path / "3"]).files[REPORT])
    assert "not timed" not in report["settings"] and len(report["times"]) == 2


def test_a_report_is_written_anew_in_place_also_of_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned_rows()
    parts = cut(rows, rows_per_part=4)
    out = tmp_path / "out"
    with SweepFolder.claim(out, sweep_record(rows, parts)) as folder:
        assert main([str(out)]) == 2
        assert "another process is writing in" in capsys.readouterr().err
        folder.write_part(0, graded_table(parts[0]))
    assert main([str(out)]) == 0
    assert "4 of 40 samples are there" in capsys.readouterr().err
    report = read_report(out)
    assert sum(row["n"] for row in report["rows"]) == 4
    write_parts(out)
    assert "incomplete" not in read_report(out)["settings"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"tasks": {"a": {**ASKED, "prompt": "Q: {question}"}}},
            "prompts, examples or stop strings of task 'a' differ",
        ),
        ({"tasks": {"a": {**ASKED, "examples_sha256": "1"}}}, "prompts, examples or stop strings of task 'a' differ"),
        ({"methods": {"mine": '{"tau_m2t": 0.5}'}}, "the fields of method 'mine' differ"),
        ({"tasks": {"a": {**ASKED, "examples_from": "there", "sha256": "1"}}}, None),
    ],
)
def test_one_name_means_one_thing_in_all_that_is_joined(
    settings: dict[str, Any], sentence: str | None, tmp_path: Path
) -> None:
    own = {"tasks": {"a": ASKED}, "methods": {"mine": '{"tau_m2t": 0.9}'}}
    for name, model, said in (("1", "m", own), ("2", "n", {**own, **settings})):
        rows = planned_rows(models=(model,), tasks=("a",), problems=2)
        parts = cut(rows, rows_per_part=4)
        with SweepFolder.claim(tmp_path / name, replace(sweep_record(rows, parts), settings=said)) as folder:
            for part in parts:
                folder.write_part(part.number, graded_table(part))
    if sentence is None:
        assert summarize_sweeps([tmp_path / "1", tmp_path / "2"]).num_samples == 8
    else:
        with pytest.raises(ValueError, match=f"{sentence}"):
            summarize_sweeps([tmp_path / "1", tmp_path / "2"])


def test_sweeps_of_different_models_and_tasks_are_joined(tmp_path: Path) -> None:
    write_parts(tmp_path / "m", models=("m",))
    write_parts(tmp_path / "n", models=("n",), tasks=("a",), problems=3)
    summary = summarize_sweeps([tmp_path / "m", tmp_path / "n"])
    report = json.loads(summary.files[REPORT])
    counts = {(row["model"], row["task"]): row["n"] for row in report["rows"]}
    assert counts == {("m", "a"): 10, ("m", "b"): 10, ("n", "a"): 3}
    assert set(report["settings"]) == {str(tmp_path / "m"), str(tmp_path / "n")}
    table = [line for line in summary.headlines.splitlines() if line.startswith("| MBD")]
    assert [cell.strip() for cell in table[1].split("|")][4:6] == ["-", "-"]
    headings = [line for line in summary.headlines.splitlines() if line.startswith("#")]
    assert headings == ["# Evaluation sweep", "## Every configuration"]


def test_seeds_of_a_task_that_reads_a_file_are_not_joined(tmp_path: Path) -> None:
    """Their rows are the same, so that they would narrow each interval for nothing."""
    for task in ("gsm-mini", "gsm8k"):
        for seed in (0, 1):
            rows = [{**row, "task": task, "seed": seed} for row in planned_rows(tasks=("a",), problems=3)]
            parts = cut(rows, rows_per_part=4)
            with SweepFolder.claim(tmp_path / f"{task}-{seed}", sweep_record(rows, parts, seed=seed)) as folder:
                for part in parts:
                    folder.write_part(part.number, graded_table(part))
    assert summarize_sweeps([tmp_path / "gsm-mini-0", tmp_path / "gsm-mini-1"]).num_samples == 12
    with pytest.raises(ValueError):
        summarize_sweeps([tmp_path / "gsm8k-0", tmp_path / "gsm8k-1"])


def test_models_on_other_problems_of_the_same_ids_are_not_joined(tmp_path: Path) -> None:
    """A file's problems have their ids from its lines, so that of two files the first problems have one id."""
    for name, mark in (("m", "?"), ("same", "?"), ("n", "!")):
        rows = [{**row, "prompt": mark + row["prompt"]} for row in planned_rows(models=(name,), problems=3)]
        parts = cut(rows, rows_per_part=4)
        with SweepFolder.claim(tmp_path / name, sweep_record(rows, parts)) as folder:
            for part in parts:
                folder.write_part(part.number, graded_table(part))
    assert summarize_sweeps([tmp_path / "m", tmp_path / "same"]).num_samples == 24
    with pytest.raises(
        ValueError, match=r"n and an earlier folder cannot be joined: a/\d of task 'a' is another prob"
    ):
        summarize_sweeps([tmp_path / "m", tmp_path / "n"])


def test_what_cannot_be_joined_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned_rows(problems=3)
    parts = cut(rows, rows_per_part=4)
    task = {"problems": 3, "rule": "strict", "max_tokens": 8, "sha256": "0"}
    for name, plan in (
        ("one", {}),
        ("rows", {"max_rows": 8}),
        ("model", {"models": {"m": "another"}}),
        ("tokens", {"tasks": {"a": {**task, "max_tokens": 9}, "b": task}}),
    ):
        with SweepFolder.claim(tmp_path / name, sweep_record(rows, parts, shard=WHOLE, **plan)) as folder:
            for part in parts:
                folder.write_part(part.number, graded_table(part))
    for other, sentence in (
        ("rows", "hold a/2 of model 'm' by method 'MBD', from sweeps that differ"),
        ("model", "cannot be joined: the files of model 'm' differ"),
        ("tokens", "cannot be joined: the rule or max_tokens of task 'a' differ"),
        ("none", "holds no sweep"),
    ):
        assert main([str(tmp_path / "one"), str(tmp_path / other), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert sentence in error and len(error.splitlines()) == 1
    assert main([str(tmp_path / "one"), str(tmp_path / "rows")]) == 2
    assert "give --out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
