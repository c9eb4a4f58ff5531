"""A sweep without Ray, stage by stage: every sample is written and gathered under its configuration."""

from pathlib import Path

import pyarrow as pa
import pytest

from mbd_core.engine.engine_config import EngineConfig
from mbd_core.evaluation.decode_stage import DecodeStage, DecodingModel
from mbd_core.evaluation.grade_stage import grade_table
from mbd_core.evaluation.sample_tables import PLANNED_COLUMNS
from mbd_core.evaluation.sweep_folder import read_samples
from mbd_core.evaluation.sweep_plan import Sweep, SweepOptions, plan_sweep
from mbd_core.evaluation.sweep_report import ReportKey
from mbd_core.evaluation.sweep_samples import collect_samples
from mbd_core.serving.load import load_engine


@pytest.fixture(scope="module")
def sweep(tiny_model_dir: Path) -> Sweep:
    engine = EngineConfig(max_rows=4, num_pages=128)
    options = SweepOptions(models=[str(tiny_model_dir)], tasks=["gsm-mini"], limit=3, max_tokens=8, engine=engine)
    return plan_sweep(options)


@pytest.fixture(scope="module")
def graded(sweep: Sweep, tiny_model_dir: Path) -> list[pa.Table]:
    """The sweep's samples, decoded and graded, four at a time."""

    def load(_name: str) -> DecodingModel:
        loaded = load_engine(tiny_model_dir, sweep.engine)
        return DecodingModel(loaded.engine, loaded.tokenizer)

    planned, stage = pa.Table.from_pylist(list(sweep.rows()), schema=PLANNED_COLUMNS), DecodeStage(load)
    return [grade_table(stage(planned.slice(start, 4))) for start in range(0, len(planned), 4)]


def test_every_sample_is_written_and_gathered(sweep: Sweep, graded: list[pa.Table], tmp_path: Path) -> None:
    samples = collect_samples(graded, sweep, folder=tmp_path)
    rows = [row for table in graded for row in table.to_pylist()]
    assert list(read_samples(tmp_path)) == rows
    assert sum(map(len, samples.values())) == len(rows) == sweep.num_samples == 6
    for row in rows:
        gathered = samples[ReportKey(row["model"], row["method"], row["task"], row["config"])]
        counts = [(s.counts.num_tokens, s.counts.num_forwards) for s in gathered if s.counts is not None]
        assert len(gathered) == 3
        assert (row["num_tokens"], row["num_forwards"]) in counts
        assert sum(s.cut for s in gathered) == sum(r["finish_reason"] == "length" for r in rows) / 2 > 0


def test_missing_samples_are_an_error(sweep: Sweep, graded: list[pa.Table], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="4 of 6 samples came back"):
        collect_samples(graded[:1], sweep, folder=tmp_path)
