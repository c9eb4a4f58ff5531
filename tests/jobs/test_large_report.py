"""A report of 100,000 rows stays within its memory; `pytest -s` prints its seconds."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import written_sweeps
from written_sweeps import graded_table, planned_rows, sweep_record

from mbd_core.batch.parts import cut
from mbd_core.evaluation.sweep.folder import SweepFolder

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS = 100_000
MOST_BYTES = 2_000_000_000
START = (
    "import os, subprocess, sys\n"
    "process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)\n"
    "_, status, usage = os.wait4(process.pid, 0)\n"
    "print(status, usage.ru_maxrss)\n"
)
"""A small process between this one and the command: the kernel counts as a child's what its parent had at `exec`."""


@dataclass(frozen=True)
class Measured:
    """`status` is that of `os.wait4`, 0 for success."""

    status: int
    seconds: float
    most_bytes: int


def measure(command: Sequence[str]) -> Measured:
    """Run a command to its end."""
    begun = time.monotonic()
    whole = subprocess.run([sys.executable, "-c", START, *command], stdout=subprocess.PIPE, text=True, check=True)
    status, kibibytes = map(int, whole.stdout.split())
    return Measured(status, time.monotonic() - begun, kibibytes * 1024)


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
    measured = measure([sys.executable, str(ROOT / "jobs" / "report_sweep.py"), str(tmp_path / "sweep")])
    print(f"a report of {NUM_ROWS:,} rows: {measured.seconds:.1f} s, {measured.most_bytes / 1e9:.2f} GB")
    assert measured.status == 0
    assert len(json.loads((tmp_path / "sweep" / "report.json").read_text())["rows"]) == 2 * len(settings)
    assert measured.most_bytes < MOST_BYTES


def test_the_memory_of_a_command_is_its_own() -> None:
    """Not that of this process, which is larger; and what the command takes counts."""
    held = b"x" * 400_000_000
    small = measure([sys.executable, "-c", "pass"])
    large = measure([sys.executable, "-c", f"len(b'x' * {len(held)})"])
    assert small.status == large.status == 0
    assert small.most_bytes < 100_000_000 < len(held) < large.most_bytes
    assert measure([sys.executable, "-c", "raise SystemExit(3)"]).status != 0
