"""A report of 100,000 rows stays within its memory; `pytest -s` prints its seconds."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import written_sweeps
from written_sweeps import graded_table, planned_rows, sweep_record

from mbd_core.evaluation.sweep_folder import SweepFolder
from mbd_core.evaluation.sweep_parts import cut

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS = 100_000
MOST_BYTES = 2_000_000_000


@pytest.mark.slow
def test_a_report_of_100_000_rows_takes_less_than_two_gigabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [json.dumps({"block_size": 4, "tau_m2t": 0.5 + i / 200, "buffer_size": 1 + i % 4}) for i in range(40)]
    monkeypatch.setattr(written_sweeps, "CONFIGS", tuple(settings))
    rows = planned_rows(problems=NUM_ROWS // 2 // len(settings))
    assert len(rows) == NUM_ROWS
    parts = cut(rows, rows_per_part=500)
    with SweepFolder.claim(tmp_path / "sweep", sweep_record(rows, parts)) as folder:
        for part in parts:
            folder.write_part(part.number, graded_table(part))
    begun = time.monotonic()
    command = [sys.executable, str(ROOT / "jobs" / "report_sweep.py"), str(tmp_path / "sweep")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    print(f"a report of {NUM_ROWS:,} rows: {time.monotonic() - begun:.1f} s, {usage.ru_maxrss * 1024 / 1e9:.2f} GB")
    assert status == 0
    assert len(json.loads((tmp_path / "sweep" / "report.json").read_text())["rows"]) == 2 * len(settings)
    assert usage.ru_maxrss * 1024 < MOST_BYTES
