"""A sweep's folder: no row is lost or repeated, whenever a process is killed, and no file of the user's is touched."""

import json
import multiprocessing
import random
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from written_sweeps import CONFIGS, graded_table, planned_rows, sweep_record, timed_table, write_parts

from mbd_core import files as files_room
from mbd_core.batch.parts import Part, cut
from mbd_core.batch.rows import TIMED_COLUMNS, config_text
from mbd_core.batch.timed_cases import Timing
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.evaluation.report.summary import rewrite_summary, summarize_sweeps, write_summary
from mbd_core.evaluation.sweep import gathered_samples
from mbd_core.evaluation.sweep.folder import (
    FAILURE,
    LOCK,
    RECORD,
    REPORT,
    SweepFolder,
    check_sweep_folder,
    part_name,
    read_report,
    read_samples,
    read_times,
)
from mbd_core.evaluation.sweep.gathered_samples import load_samples
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.files import MANIFEST, is_named, write_json

pytestmark = pytest.mark.usefixtures("unrendered_pictures")

ROWS = planned_rows()
PARTS = cut(ROWS, rows_per_part=4)
RECORDED = sweep_record(ROWS, PARTS)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def report_bytes(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in (REPORT, "report.md", "report.html", "plot.png")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps") / "whole"
    write_parts(folder)
    return folder


def test_what_is_written_is_read_back(uninterrupted: Path) -> None:
    parts = {part_name(part.number) for part in PARTS}
    assert files(uninterrupted) == {*parts, "plot.png", "report.md", "report.html", REPORT, RECORD, LOCK, MANIFEST}
    samples = sorted(read_samples(uninterrupted), key=lambda row: row["sample"])
    assert [row["sample"] for row in samples] == list(range(len(ROWS)))
    assert samples == sorted((r for p in PARTS for r in graded_table(p).to_pylist()), key=lambda row: row["sample"])
    report = read_report(uninterrupted)
    assert sum(row["n"] for row in report["rows"]) == len(ROWS)
    assert report["times"] == []


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_a_sweep_that_is_killed_at_random_points_ends_as_if_it_were_not(
    seed: int, uninterrupted: Path, tmp_path: Path
) -> None:
    """SIGKILL at random moments, again and again, until a run gets through."""
    draw, out, exit_codes = random.Random(seed), tmp_path / "out", list[int | None]()
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    while 0 not in exit_codes:
        process = context.Process(target=write_parts, args=(out,), kwargs={"seconds": 0.01, "done": writer.send})
        process.start()
        process.join(draw.random() * 0.08 if len(exit_codes) < 8 else None)
        process.kill()
        process.join()
        exit_codes.append(process.exitcode)
    assert -signal.SIGKILL in exit_codes
    computed = Counter[int]()
    while reader.poll():
        computed.update([reader.recv()])
    assert max(computed.values()) == 1, "what was written is not computed again"
    assert report_bytes(out) == report_bytes(uninterrupted)
    assert Counter(row["sample"] for row in read_samples(out)) == Counter(range(len(ROWS)))
    assert files(out) == files(uninterrupted), "nothing half-written is left"


def test_a_finished_sweep_has_nothing_missing_and_its_report_comes_from_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_parts(out)
    before = report_bytes(out)
    for name in (REPORT, "report.md", "report.html", "plot.png"):
        (out / name).unlink()
    with SweepFolder.claim(out, RECORDED) as folder:
        assert folder.missing() == []
        write_summary(folder)
    assert report_bytes(out) == before


def test_a_part_is_written_once(tmp_path: Path) -> None:
    with SweepFolder.claim(tmp_path / "out", RECORDED) as folder:
        folder.write_part(0, graded_table(PARTS[0]))
        folder.write_part(0, graded_table(PARTS[1]))
        assert folder.missing() == [part.number for part in PARTS[1:]]
    assert list(read_samples(tmp_path / "out")) == graded_table(PARTS[0]).to_pylist()


def test_timed_cases_are_missing_until_they_are_written_and_the_report_waits_for_them(tmp_path: Path) -> None:
    out, record = tmp_path / "out", sweep_record(ROWS, PARTS, num_cases=3)
    timed = {"model": "m", "method": "MBD", "task": "a", "config": ROWS[0]["config"], "run": "together"}
    timed |= {"concurrency": 1, "num_tokens": 4, "num_forwards": 1, "begun": 0.0, "ended": 2.0, "decode_seconds": 1.0}
    table = pa.Table.from_pylist([timed], schema=TIMED_COLUMNS)
    with SweepFolder.claim(out, record) as folder:
        for part in PARTS:
            folder.write_part(part.number, graded_table(part))
        folder.write_case(1, table)
        assert folder.missing() == [] and folder.missing_cases() == [0, 2]
        write_summary(folder)
    (out / "times" / "case-00009.parquet").write_text("precious")
    with SweepFolder.claim(out, record, overwrite=True) as folder:
        assert folder.missing_cases() == [0, 2], "it is not finished, so it is gone on with"
        assert not (out / REPORT).exists()
        for number in folder.missing_cases():
            folder.write_case(number, table)
        write_summary(folder)
    assert [row["num_tokens"] for row in read_times(out)] == [4, 4, 4]
    check_sweep_folder(out, record)
    with pytest.raises(ValueError, match="case-00009"):
        check_sweep_folder(out, record, overwrite=True)
    assert (out / "times" / "case-00009.parquet").read_text() == "precious"


def test_other_timing_is_the_same_sweep_whose_times_stay(tmp_path: Path) -> None:
    timed, untimed = sweep_record(ROWS, PARTS, num_cases=2), sweep_record(ROWS, PARTS, timing=Timing(problems=0))
    with SweepFolder.claim(tmp_path, untimed) as folder:
        folder.write_part(0, graded_table(PARTS[0]))
    with SweepFolder.claim(tmp_path, timed) as folder:
        assert 0 not in folder.missing() and folder.missing_cases() == [0, 1]
        folder.write_case(0, timed_table(ROWS[0]))
    with SweepFolder.claim(tmp_path, untimed) as folder:
        assert folder.missing_cases() == [1]
    assert len(list(read_times(tmp_path))) == 3
    other = sweep_record(ROWS, PARTS, num_cases=2, timing=Timing(problems=2, concurrency=8))
    with pytest.raises(ValueError, match="--concurrency 3"):
        check_sweep_folder(tmp_path, other)


@pytest.mark.parametrize(
    ("of_old", "of_new"),
    [
        ({"block_size": 4, "tau_m2t": 1}, {"block_size": 4, "tau_m2t": 1.0}),
        ({"block_size": 4, "buffer_size": 2}, {"block_size": 4, "buffer_size": 2}),
    ],
    ids=["wrote 1 for 1.0", "knew two fields"],
)
def test_what_an_earlier_version_wrote_is_gone_on_with_and_joined(
    of_old: dict[str, Any], of_new: dict[str, Any], tmp_path: Path
) -> None:
    """Its texts of the same configurations differ; they are compared as values."""
    other = json.dumps({"block_size": 4, "tau_m2t": 0.9})
    texts = [(json.dumps(of_old), other), (config_text(DecodingConfig(**of_new)), CONFIGS[1])]
    plans = [{"configurations": {"m": [["MBD", text] for text in of_version]}} for of_version in texts]

    def part_of(version: int, number: int) -> Part:
        by_text = dict(zip(CONFIGS, texts[version], strict=True))
        part = PARTS[number]
        return replace(part, rows=[{**row, "config": by_text[row["config"]]} for row in part.rows])

    with SweepFolder.claim(tmp_path / "one", sweep_record(ROWS, PARTS, **plans[0])) as folder:
        folder.write_part(0, graded_table(part_of(0, 0)))
    with SweepFolder.claim(tmp_path / "one", sweep_record(ROWS, PARTS, **plans[1])) as folder:
        folder.write_part(2, graded_table(part_of(1, 2)))
        assert 0 not in folder.missing()
    shards = [SweepShard(index=index, count=2) for index in (1, 2)]
    for version, shard in enumerate(shards):
        with SweepFolder.claim(
            tmp_path / f"{version}", sweep_record(ROWS, PARTS, shard=shard, **plans[version])
        ) as each:
            for number in each.missing():
                each.write_part(number, graded_table(part_of(version, number)))
    joined = [tmp_path / "one", tmp_path / "0", tmp_path / "1"]
    samples = load_samples(joined)
    assert {key.config for key in samples} == {*texts[1]}
    assert sum(map(len, samples.values())) == len(ROWS), "each sample once"
    assert summarize_sweeps(joined).num_planned == len(ROWS), "one plan"


def test_two_processes_do_not_write_in_one_folder(tmp_path: Path) -> None:
    with (
        SweepFolder.claim(tmp_path / "out", RECORDED),
        pytest.raises(ValueError),
    ):
        SweepFolder.claim(tmp_path / "out", RECORDED)
    SweepFolder.claim(tmp_path / "out", RECORDED).close()


def test_another_sweep_is_refused_in_a_sentence_that_says_what_differs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_parts(out)
    listed = files(out)
    tasks = RECORDED.plan["tasks"]
    configurations = RECORDED.plan["configurations"]
    for plan, sentence in (
        ({"seed": 3}, "its seed is 0, not 3"),
        ({"max_rows": 8}, "its max_rows is 4, not 8"),
        ({"models": {"n": "digest"}}, "its models are m, not n"),
        ({"models": {"m": "another"}}, "the files of model 'm' are others"),
        ({"tasks": {"a": tasks["a"]}}, "its tasks are a, b, not a"),
        ({"tasks": {**tasks, "b": {**tasks["b"], "problems": 9}}}, "task 'b' has 10 problems, not 9"),
        ({"tasks": {**tasks, "b": {**tasks["b"], "max_tokens": 9}}}, "the max_tokens of task 'b' is 8, not 9"),
        ({"tasks": {**tasks, "b": {**tasks["b"], "sha256": "1"}}}, "prompts or rule of task 'b' are others"),
        ({"configurations": {"m": configurations["m"][:1]}}, "has 2 configurations, not 1, and has another of MBD"),
        ({"configurations": {"m": configurations["m"][::-1]}}, "has its configurations in another order"),
        ({"draft_model": "digest"}, "its draft model is another"),
        ({"num_pages": 8}, "its num_pages is None, not 8"),
        ({"kv_memory_fraction": 0.5}, "its kv_memory_fraction is 0.9, not 0.5"),
        ({"versions": {**RECORDED.plan["versions"], "torch": "2"}}, "it was made with torch 1, not 2"),
    ):
        with pytest.raises(ValueError) as refusal:
            check_sweep_folder(out, sweep_record(ROWS, PARTS, **plan))
        assert sentence in str(refusal.value)
        assert str(refusal.value).endswith("; give another folder, or --overwrite")
    with pytest.raises(ValueError, match="1/1, not 2/2"):
        check_sweep_folder(out, replace(RECORDED, shard=SweepShard(index=2, count=2)))
    assert files(out) == listed


def test_a_sweep_is_replaced_when_told_to_and_one_that_was_interrupted_is_ended(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_parts(out)
    with pytest.raises(ValueError, match="--overwrite"):
        check_sweep_folder(out)
    check_sweep_folder(out, overwrite=True)
    with SweepFolder.claim(out, RECORDED, overwrite=True) as folder:
        assert folder.missing() == [part.number for part in PARTS], "a finished one is computed again"
        assert files(out) == {RECORD, LOCK, MANIFEST}
        folder.write_part(2, graded_table(PARTS[2]))
    with SweepFolder.claim(out, RECORDED, overwrite=True) as folder:
        assert 2 not in folder.missing()
    with SweepFolder.claim(out, sweep_record(ROWS, PARTS, seed=9), overwrite=True) as folder:
        assert 2 in folder.missing()


def test_a_replacement_that_is_killed_midway_keeps_no_row_of_what_it_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_parts(out)

    def killed(_: SweepFolder) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SweepFolder, "_clear", killed)
        with pytest.raises(KeyboardInterrupt):
            SweepFolder.claim(out, RECORDED, overwrite=True)
    with SweepFolder.claim(out, RECORDED, overwrite=True) as folder:
        assert len(folder.missing()) == len(PARTS)
        assert files(out) == {RECORD, LOCK, MANIFEST}


OURS = (REPORT, "plot.png", FAILURE, part_name(1))  # refused at once, which takes no time


@pytest.mark.parametrize(
    ("name", "overwrite"),
    [
        *((name, overwrite) for name in OURS for overwrite in (False, True)),
        ("notes.txt", False),
        ("notes.txt", True),
        (".notes.txt.7.partial", True),
        ("samples/.notes.7.partial.parquet", False),
        ("samples/notes.parquet", True),
        (part_name(99), False),
        pytest.param(".notes.txt.7.partial", False, marks=pytest.mark.slow),
        pytest.param("samples/.notes.7.partial.parquet", True, marks=pytest.mark.slow),
        pytest.param("samples/notes.parquet", False, marks=pytest.mark.slow),
        pytest.param(part_name(99), True, marks=pytest.mark.slow),
    ],
)
def test_a_file_of_the_user_s_is_never_read_replaced_or_removed(name: str, overwrite: bool, tmp_path: Path) -> None:
    """Neither in an interrupted sweep, nor in one that is to be replaced, nor without a sweep at all."""
    out, foreign = tmp_path / "out", tmp_path / "foreign"
    with SweepFolder.claim(out, RECORDED) as folder:
        folder.write_part(0, graded_table(PARTS[0]))
    for place in (out, foreign):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("parquet"):
            pq.write_table(pa.table({"sample": [7]}), place / name)
        else:
            (place / name).write_text("precious")
    precious, listed = (out / name).read_bytes(), files(out)
    alone = files(foreign)
    with pytest.raises(ValueError, match="foreign exists already and was not written by this project"):
        SweepFolder.claim(foreign, RECORDED, overwrite=overwrite)
    assert (foreign / name).read_bytes() == (out / name).read_bytes() and files(foreign) == alone
    if name in OURS:
        with pytest.raises(ValueError, match="move it"):
            SweepFolder.claim(out, RECORDED, overwrite=overwrite)
    else:
        write_parts(out, overwrite=overwrite)
        assert Counter(row["sample"] for row in read_samples(out)) == Counter(range(len(ROWS)))
    with pytest.raises(ValueError, match="move it"):
        SweepFolder.claim(out, sweep_record(ROWS, PARTS, seed=9), overwrite=True)
    assert (out / name).read_bytes() == precious
    assert listed <= files(out)


def test_a_file_that_appears_while_a_sweep_runs_is_not_replaced(tmp_path: Path) -> None:
    with SweepFolder.claim(tmp_path / "out", RECORDED) as folder:
        folder.write_part(0, graded_table(PARTS[0]))
        for name in (part_name(1), "report.md"):
            (tmp_path / "out" / name).write_text("precious")
        with pytest.raises(OSError, match="part-00001"):
            folder.write_part(1, graded_table(PARTS[1]))
        with pytest.raises(OSError, match=r"report\.md"):
            write_summary(folder)
    assert {(tmp_path / "out" / name).read_text() for name in (part_name(1), "report.md")} == {"precious"}


def test_the_record_outlives_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(files_room, "sync", lambda path: synced.append(path.name))
    SweepFolder.claim(tmp_path / "out", RECORDED).close()
    assert [bool(is_named(name, RECORD)) for name in synced] == [True, False] and synced[1] == "out"


def test_a_report_of_a_failed_sweep_keeps_its_traceback(tmp_path: Path) -> None:
    with SweepFolder.claim(tmp_path, RECORDED) as folder:
        folder.write_part(0, graded_table(PARTS[0]))
        folder.write_files({FAILURE: b"Traceback"})
    rewrite_summary(tmp_path)
    assert (tmp_path / FAILURE).read_bytes() == b"Traceback" and (tmp_path / REPORT).exists()


def test_folders_that_hold_no_sweep_of_ours_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"report.json"):
        read_report(tmp_path)
    with pytest.raises(ValueError, match="holds no sweep: it has no"):
        list(read_samples(tmp_path))
    write_json(tmp_path / MANIFEST, {"kind": "sweep", "files": ["samples/part-*.parquet"]})
    check_sweep_folder(tmp_path, RECORDED)  # it was killed before it wrote its record
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "part-00000.parquet").write_text("of an earlier version")
    with pytest.raises(ValueError, match="move that"):
        check_sweep_folder(tmp_path, RECORDED, overwrite=True)
    (tmp_path / RECORD).write_text(json.dumps({"mine": 1}))
    with pytest.raises(ValueError, match=r"sweep.json"):
        check_sweep_folder(tmp_path, RECORDED)


@pytest.mark.parametrize(
    ("task", "is_drawn"),
    [
        ("gsm-mini", True),
        ("gsm8k", False),
        ("livecodebench:2024-08..2025-01", False),
        ("harness:arc_easy", False),
        ("bfcl:irrelevance", False),
        ("bfcl-free:simple_python", False),
        ("a task of another version", True),
    ],
)
def test_a_seed_decides_the_problems_of_generated_tasks_alone(task: str, is_drawn: bool) -> None:
    assert gathered_samples._is_drawn(task) == is_drawn
