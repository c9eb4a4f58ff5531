"""A sweep without Ray, stage by stage: every sample is written, gathered under its configuration, and repeatable."""

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mbd_core.batch.decoding import DecodeStage
from mbd_core.batch.decoding_model import DecodingModel
from mbd_core.batch.executor import LocalExecutor
from mbd_core.batch.parts import Part, cut
from mbd_core.batch.rows import DECODED_COLUMNS
from mbd_core.batch.timed_cases import Timing
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.measures.rates import summarize
from mbd_core.evaluation.measures.summary import ReportKey
from mbd_core.evaluation.report.summary import write_summary
from mbd_core.evaluation.sweep.endpoints.endpoint import ENDPOINT_DEFAULT, Endpoint, EndpointStage
from mbd_core.evaluation.sweep.folder import SweepFolder, read_report, read_samples
from mbd_core.evaluation.sweep.gathered_samples import load_samples
from mbd_core.evaluation.sweep.grading.part_grading import Grading, grade_table
from mbd_core.evaluation.sweep.loading import load_inputs
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.plan import plan_sweep
from mbd_core.evaluation.sweep.record import SweepRecord, difference, record_of
from mbd_core.evaluation.sweep.run import SweepRun, collect_samples
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.evaluation.sweep.sweep import Sweep
from mbd_core.fields import load
from mbd_core.serving.tokens.load import load_engine

pytestmark = pytest.mark.usefixtures("unrendered_pictures")

ENGINE = EngineConfig(max_rows=4, num_pages=128, max_prefill_tokens=8)
TIMING = Timing(problems=2, concurrency=2)
OPTIONS: dict[str, Any] = {"tasks": ["gsm-mini"], "limit": 3, "max_tokens": 8, "engine": ENGINE}


def planned(folder: Path, *, limit: int = 3, rows_per_part: int = 2) -> tuple[Sweep, list[Part], SweepRecord]:
    sweep = plan_sweep(load_inputs(SweepOptions(**{**OPTIONS, "limit": limit}, models=[str(folder)])))
    rows = list(sweep.rows())
    parts = cut(rows, rows_per_part=rows_per_part)
    return sweep, parts, record_of(sweep, rows, parts, shard=SweepShard(), timing=TIMING)


def decode_stage(folder: Path) -> DecodeStage:
    def load(_name: str) -> DecodingModel:
        loaded = load_engine(folder, ENGINE)
        return DecodingModel(loaded.engine, loaded.tokenizer)

    return DecodeStage(load)


def test_a_grid_is_for_our_endpoint_beside_one_that_takes_none() -> None:
    bare = Endpoint(name="bare", url="http://h/v1", model="m")
    ours = Endpoint(name="ours", url="http://h/v1", model="m", defaults={"block_size": 4}, slots=4)
    asked = {**OPTIONS, "models": [], "methods": ["multi"], "grid": "tau_m2t=0.7,0.9"}
    sweep = plan_sweep(
        load_inputs(
            SweepOptions(
                **asked,
                endpoints=(
                    ours,
                    bare,
                ),
            )
        )
    )
    assert [len(sweep.variants[name]) for name in ("ours", "bare")] == [2, 1]
    with pytest.raises(ValueError):
        plan_sweep(load_inputs(SweepOptions(**asked, endpoints=(bare,))))


@pytest.mark.parametrize("forwards", [4, None])
def test_an_error_of_an_endpoint_that_says_forwards_hides_no_tpf(tmp_path: Path, forwards: int | None) -> None:
    endpoint = Endpoint(name="ours", url="http://h/v1", model="m", defaults={"block_size": 4})
    asked = {**OPTIONS, "models": [], "methods": [ENDPOINT_DEFAULT], "endpoints": (endpoint,)}
    sweep = plan_sweep(load_inputs(SweepOptions(**asked)))
    rows = list(sweep.rows())
    parts = cut(rows, rows_per_part=len(rows))
    record = record_of(sweep, rows, parts, shard=SweepShard(), timing=TIMING)
    answer = {"text": "4", "num_tokens": 8, "num_forwards": forwards}
    decoded = [{**row, **(answer if number else {"error": "a 500"})} for number, row in enumerate(rows)]
    table = grade_table(pa.Table.from_pylist(decoded, schema=DECODED_COLUMNS))
    with SweepFolder.claim(tmp_path / "out", record) as folder:
        collect_samples([(0, table)], folder, parts)
    (samples,) = load_samples([tmp_path / "out"]).values()
    summary = summarize(samples)
    assert (summary.n, summary.errors, summary.tpf) == (3, 1, None if forwards is None else 2)


@pytest.fixture(scope="module")
def graded(tiny_model_dir: Path) -> list[tuple[int, pa.Table]]:
    """The sweep's parts, decoded and graded one after the other."""
    _, parts, _ = planned(tiny_model_dir)
    stage = decode_stage(tiny_model_dir)
    return [(part.number, grade_table(stage(part.table()))) for part in parts]


def test_every_sample_is_written_and_gathered(
    tiny_model_dir: Path, graded: list[tuple[int, pa.Table]], tmp_path: Path
) -> None:
    sweep, parts, record = planned(tiny_model_dir)
    with SweepFolder.claim(tmp_path / "out", record) as folder:
        collect_samples(reversed(graded), folder, parts)
    rows = [row for _, table in graded for row in table.to_pylist()]
    assert list(read_samples(tmp_path / "out")) == rows
    samples = load_samples([tmp_path / "out"])
    assert list(samples) == list(record.subjects())
    assert sum(map(len, samples.values())) == len(rows) == sweep.num_samples == record.num_samples == 6
    for row in rows:
        gathered = samples[ReportKey(row["model"], row["method"], row["task"], row["config"])]
        counts = [(s.counts.num_tokens, s.counts.num_forwards) for s in gathered if s.counts is not None]
        assert len(gathered) == 3
        assert (row["num_tokens"], row["num_forwards"]) in counts
        assert sum(s.cut for s in gathered) == sum(r["finish_reason"] == "length" for r in rows) / 2 > 0


def test_missing_parts_are_an_error(tiny_model_dir: Path, graded: list[tuple[int, pa.Table]], tmp_path: Path) -> None:
    _, parts, record = planned(tiny_model_dir)
    with (
        SweepFolder.claim(tmp_path / "out", record) as folder,
        pytest.raises(RuntimeError, match="2 of 3 parts"),
    ):
        collect_samples(graded[:1], folder, parts)


def test_a_part_is_the_same_whatever_its_engine_decoded_before(
    tiny_model_dir: Path, graded: list[tuple[int, pa.Table]]
) -> None:
    """Also the forwards of prompts that an engine would otherwise find in its cache."""
    _, parts, _ = planned(tiny_model_dir)
    number, table = graded[-1]
    alone = grade_table(decode_stage(tiny_model_dir)(parts[number].table()))
    again = decode_stage(tiny_model_dir)
    again(parts[number].table())
    for other in (alone, grade_table(again(parts[number].table()))):
        assert other == table


def test_a_plain_loop_in_this_process_runs_a_sweep(
    tiny_model_dir: Path, graded: list[tuple[int, pa.Table]], tmp_path: Path
) -> None:
    sweep, _, _ = planned(tiny_model_dir)

    def load(_name: str, engine: EngineConfig) -> DecodingModel:
        loaded = load_engine(tiny_model_dir, engine)
        return DecodingModel(loaded.engine, loaded.tokenizer)

    executor = LocalExecutor(load, sweep.engine, Grading(), concurrency=TIMING.concurrency)
    run = SweepRun.of(sweep, shard=SweepShard(), timing=TIMING)
    for start in (lambda: nullcontext(executor), lambda: pytest.fail("all is there")):
        with EndpointStage({}, {}, concurrency=1) as stage:
            summary = run.run(tmp_path / "out", start, stage=stage, report=write_summary)
        assert "without Ray" in summary.text and summary.num_samples == summary.num_planned == sweep.num_samples
    columns = ("sample", "text", "num_forwards", "correct")
    rows = {tuple(row[name] for name in columns) for _, table in graded for row in table.to_pylist()}
    assert {tuple(row[name] for name in columns) for row in read_samples(tmp_path / "out")} == rows
    assert len(read_report(tmp_path / "out")["times"]) == 2


def test_a_record_outlives_its_file_and_knows_its_sweep(tiny_model_dir: Path) -> None:
    _, _, record = planned(tiny_model_dir)
    assert load(SweepRecord, json.loads(json.dumps(asdict(record)))) == record
    assert difference(record, planned(tiny_model_dir)[2]) is None
    assert difference(record, replace(record, settings={"machines": ["another"]})) is None
    smaller = plan_sweep(load_inputs(SweepOptions(**OPTIONS, models=[str(tiny_model_dir)])))
    larger = replace(smaller, engine=replace(ENGINE, num_pages=9))
    rows = list(larger.rows())
    other = record_of(larger, rows, cut(rows, rows_per_part=2), shard=SweepShard(), timing=TIMING)
    assert difference(record, other) == "its num_pages is 128, not 9"
    earlier = replace(record, plan={name: value for name, value in record.plan.items() if name != "rows"})
    begun = difference(earlier, record)
    assert begun == "another version of this program began it: its rows have form 1, not 2"
    fewer = planned(tiny_model_dir, limit=2)[2]
    assert difference(record, fewer) == "task 'gsm-mini' has 3 problems, not 2"


def test_a_killed_sweep_of_several_answers_goes_on_and_has_each_once(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are those of a sweep that was not killed, so no draw is repeated or made anew."""
    drawn = {**OPTIONS, "limit": 4, "samples": 3, "temperature": 1.0}
    sweep = plan_sweep(load_inputs(SweepOptions(**drawn, models=[str(tiny_model_dir)], methods=["multi"])))
    sweep = replace(sweep, engine=replace(ENGINE, max_rows=1))

    def load(_name: str, engine: EngineConfig) -> DecodingModel:
        loaded = load_engine(tiny_model_dir, engine)
        return DecodingModel(loaded.engine, loaded.tokenizer)

    def swept(place: Path) -> list[dict[str, Any]]:
        run = SweepRun.of(sweep, shard=SweepShard(), timing=Timing(problems=0))
        executor = LocalExecutor(load, sweep.engine, Grading(), concurrency=1)
        with EndpointStage({}, {}, concurrency=1) as stage:
            run.run(place, lambda: nullcontext(executor), stage=stage, report=lambda _: None)
        return sorted(read_samples(place), key=lambda row: row["sample"])

    write, written = SweepFolder.write_part, list[int]()

    def killed(self: SweepFolder, number: int, table: pa.Table) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(number)
        write(self, number, table)

    whole = swept(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(SweepFolder, "write_part", killed)
        with pytest.raises(KeyboardInterrupt):
            swept(tmp_path / "out")
    assert 0 < len(list(read_samples(tmp_path / "out"))) < 12
    assert swept(tmp_path / "out") == whole
    assert [row["draw"] for row in whole] == [0, 1, 2] * 4 and len({row["sampling"] for row in whole}) == 12
