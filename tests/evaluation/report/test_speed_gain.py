"""The predicted gain in TPS beside the measured one: hand-computed, and from the engine's own timed rows."""

import json
from dataclasses import replace

import pytest
from sweep_rows import report_rows
from written_sweeps import timed_table

from mbd_core.evaluation.measures.speed import MeasuredSpeed, speeds
from mbd_core.evaluation.measures.summary import ReportKey, token_efficiency
from mbd_core.evaluation.report.contents import SweepNumbers, report_files, report_tables
from mbd_core.evaluation.report.shown_samples import ShownSamples
from mbd_core.evaluation.report.speeds import SpeedGain, gain_table, speed_gains
from mbd_core.tables import markdown

NOTHING_SHOWN = ShownSamples(samples={}, prompts=[], total=0, each=0, left_out=0)


def timed(key: ReportKey, *, tpf: float, forward_ms: float, tps: float) -> MeasuredSpeed:
    (speed,) = speeds(timed_table({**vars(key), "problem_id": "p"}).to_pylist())
    return replace(speed, tpf_alone=tpf, forward_ms_batch_1=forward_ms, tps_batch_1=tps)


def test_the_paper_s_own_row_is_predicted_as_the_paper_does() -> None:
    """Table 3 and Section 4.5: 1.78 / 1.24 = 1.44, and 517.16 to 745.92 is 1.44 too."""
    rows = [row for row in report_rows() if row.key.task == "a"]
    times = [
        timed(rows[0].key, tpf=3.47, forward_ms=7.07, tps=517.16),
        timed(rows[1].key, tpf=6.19, forward_ms=8.78, tps=745.92),
    ]
    gains = speed_gains(times, rows)
    assert gains[rows[0].key] == SpeedGain(
        baseline="bd, SingleBD", tpf_gain=1, latency_cost=1, predicted_tps_gain=1, measured_tps_gain=1
    )
    gain = gains[rows[1].key]
    assert (round(gain.tpf_gain, 2), round(gain.latency_cost, 2)) == (1.78, 1.24)
    assert (round(gain.predicted_tps_gain, 2), round(gain.measured_tps_gain, 2)) == (1.44, 1.44)
    assert gain.measured_tps_gain == pytest.approx(745.92 / 517.16)
    assert gain.predicted_tps_gain == pytest.approx(6.19 / 3.47 * 7.07 / 8.78)
    lines = markdown([gain_table(gains, {"a": "A"}, {row.key: row.varied for row in rows})]).splitlines()
    assert lines[-1] == "| mbd | MBD | A | tau_m2t=0.9 | 1.78x | 1.24x | 1.44x | 1.44x | 1.00 |"
    assert "- A: bd, SingleBD" in lines


def test_the_baseline_is_the_first_method_s_most_accurate_timed_configuration() -> None:
    rows = [row for row in report_rows() if row.key.model == "mbd" and row.key.task == "b"]
    times = [timed(row.key, tpf=2, forward_ms=3, tps=4 + n) for n, row in enumerate(rows)]
    assert {gain.baseline for gain in speed_gains(times, rows).values()} == {"mbd, MBD, tau_m2t=0.9"}
    assert {gain.baseline for gain in speed_gains(times[1:], rows).values()} == {"mbd, MBD, tau_m2t=0.7"}
    assert speed_gains([timed(rows[0].key, tpf=0, forward_ms=1, tps=0)], rows) == {}


def test_the_report_has_the_gain_with_the_times_and_the_token_efficiency_of_each_row() -> None:
    rows = report_rows()
    times = [timed(row.key, tpf=row.summary.tpf, forward_ms=2.0, tps=10.0) for row in rows[:3]]
    numbers = SweepNumbers(rows=rows, times=times, labels={"a": "A", "b": "B"}, settings={})
    report = json.loads(report_files(numbers, report_tables(numbers), NOTHING_SHOWN)["report.json"])
    assert [entry["gain"]["tpf_gain"] for entry in report["times"]] == pytest.approx([1, 1, 2])
    assert [row["token_efficiency"] for row in report["rows"][:3]] == pytest.approx([2 / 8, 2 / 8, 4 / 8])
    wide = replace(rows[0], config={**rows[0].config, "buffer_size": 4})
    assert token_efficiency(wide) == pytest.approx(2 / 32)
    assert token_efficiency(replace(rows[0], config={"block_size": 8, "canvas": {}})) is None
