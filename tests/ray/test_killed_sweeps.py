"""Sweeps whose processes are killed, by a sample or from outside: each row once, the uninterrupted one's report."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from actors.evaluation import sweep as evaluation
from actors.evaluation.sweep import DecodeActor, TimingActor
from jobs.eval_sweep import main
from mbd_core.batch.deaths import DEATH_TEXT
from mbd_core.batch.timed_cases import TimedCase
from mbd_core.evaluation.sweep.folder import read_report, read_samples

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "ray::MapWorker(MapBatches(DecodeActor))"
NUM_PROBLEMS, PATIENCE = 48, 240.0

pytestmark = pytest.mark.slow


def sweep_command(folder: Path, out: Path, *, limit: int, max_rows: int, timed: int = 0) -> list[str]:
    command = ["--models", str(folder), "--tasks", "gsm-mini", "--methods", "single", "--max-tokens", "8"]
    return [*command, "--limit", str(limit), "--max-rows", str(max_rows), "--timed", str(timed), "--out", str(out)]


def kill_engines(monkeypatch: pytest.MonkeyPatch, *, at: set[int]) -> None:
    """From now on an engine's process dies of these samples."""

    class Mortal(DecodeActor):
        def decode(self, table: Any) -> Any:
            if at & set(table["sample"].to_pylist()):
                os._exit(1)
            return super().decode(table)

    class MortalTiming(TimingActor):
        def time(self, case: TimedCase, *, left_out: Collection[int] = ()) -> Any:
            if at & ({row["sample"] for row in case.rows} - set(left_out)):
                os._exit(1)
            return super().time(case, left_out=left_out)

    monkeypatch.setattr(evaluation, "DecodeActor", Mortal)
    monkeypatch.setattr(evaluation, "TimingActor", MortalTiming)


def texts(out: Path) -> dict[int, str | None]:
    return {row["sample"]: row["text"] for row in read_samples(out)}


def test_a_sample_that_kills_the_engine_s_process_is_a_row_with_the_reason(
    ray_cluster: Any, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(sweep_command(tiny_model_dir, whole, limit=6, max_rows=3)) == 0
    kill_engines(monkeypatch, at={4})
    assert main(sweep_command(tiny_model_dir, out, limit=6, max_rows=3, timed=6)) == 0
    assert [(row["sample"], row["error"]) for row in read_samples(out) if row["error"]] == [(4, DEATH_TEXT)]
    assert Counter(row["sample"] for row in read_samples(out)) == Counter(range(6))
    assert texts(out) == {**texts(whole), 4: None}
    report = read_report(out)
    assert [(row["n"], row["errors"]) for row in report["rows"]] == [(6, 1)]
    assert [row["num_alone"] for row in report["times"]] == [5]


def test_a_model_that_always_kills_the_engine_s_process_is_one_sentence(
    ray_cluster: Any,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill_engines(monkeypatch, at={0, 1})
    out = tmp_path / "out"
    assert main(sweep_command(tiny_model_dir, out, limit=2, max_rows=1)) == 1
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert sentence.startswith(
        "eval_sweep: model 'tiny-random' cannot be decoded: the engine's process died 2 times on"
    )
    assert "of part 0" in sentence
    assert not list(read_samples(out))
    monkeypatch.undo()
    assert main(sweep_command(tiny_model_dir, out, limit=2, max_rows=1)) == 0
    assert Counter(row["sample"] for row in read_samples(out)) == Counter(range(2))


class Job:
    """The sweep's command in a process of its own, with a cluster of its own."""

    def __init__(self, model: Path, out: Path) -> None:
        self.out, self.log = out, out.with_suffix(".log")
        command = sweep_command(model, out, limit=NUM_PROBLEMS, max_rows=4)
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with self.log.open("a") as log:
            self.driver = subprocess.Popen(
                [sys.executable, str(ROOT / "jobs" / "eval_sweep.py"), *command],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """Those below the driver."""
        try:
            return psutil.Process(self.driver.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def engine(self) -> psutil.Process:
        """The engine's process, once there is one."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.driver.poll() is None:
            for process in self.processes():
                try:
                    if process.cmdline()[:1] == [ENGINE]:
                        return process
                except psutil.Error:
                    continue
            time.sleep(0.05)
        raise AssertionError(f"no engine: {self.log.read_text()}")

    def end(self) -> None:
        assert self.driver.wait(PATIENCE) == 0, self.log.read_text()

    def kill(self, *, below: bool) -> None:
        """SIGKILL the driver, and with `below` at once all processes below it; none may stay."""
        children = self.processes()
        for process in [psutil.Process(self.driver.pid), *(children if below else [])]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.driver.wait()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive


@dataclass(frozen=True)
class Uninterrupted:
    """A sweep that nothing killed, and how long its engine lived and the whole job ran."""

    out: Path
    engine_seconds: float
    seconds: float


@pytest.fixture(scope="module")
def uninterrupted(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    begun = time.monotonic()
    job = Job(tiny_model_dir, tmp_path_factory.mktemp("whole") / "out")
    engine, seen = job.engine(), time.monotonic()
    psutil.wait_procs([engine], timeout=PATIENCE)
    died = time.monotonic()
    job.end()
    return Uninterrupted(job.out, engine_seconds=died - seen, seconds=time.monotonic() - begun)


@pytest.mark.parametrize("victim", ["engine", "driver", "job"])
def test_a_kill_at_a_drawn_moment_changes_no_byte_of_the_report(
    victim: Literal["engine", "driver", "job"], uninterrupted: Uninterrupted, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """SIGKILL of the engine's process, after which the sweep goes on; of the driver, or of all that the job started,
    and then the same command."""
    seed = random.randrange(2**32)
    moment = random.Random(seed).uniform(0, uninterrupted.engine_seconds)
    print(f"{victim}: seed {seed}, killed {moment:.2f} of {uninterrupted.engine_seconds:.2f} s after its engine began")
    job = Job(tiny_model_dir, tmp_path / "out")
    engine = job.engine()
    time.sleep(moment)
    if victim == "engine":
        if engine.is_running():
            engine.kill()
        job.end()
    elif job.driver.poll() is None:
        job.kill(below=victim == "job")
    written = {path.name: path.stat().st_ino for path in job.out.glob("samples/part-*.parquet")}
    if victim != "engine":
        Job(tiny_model_dir, job.out).end()
    assert {name: (job.out / "samples" / name).stat().st_ino for name in written} == written
    assert Counter(row["sample"] for row in read_samples(job.out)) == Counter(range(NUM_PROBLEMS))
    for name in ("report.json", "report.md"):
        assert (job.out / name).read_bytes() == (uninterrupted.out / name).read_bytes(), f"{name}, seed {seed}"
