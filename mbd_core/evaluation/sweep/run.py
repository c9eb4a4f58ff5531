"""A sweep's run: an executor decodes, grades and times the folder's missing parts, and a report follows.

A repeated run goes on from the parts in the folder. Endpoints are asked from this process, because only it has their
keys.
"""

import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import pyarrow as pa
from tqdm import tqdm

from mbd_core.batch.deaths import DEATH_TEXT, decode_parts
from mbd_core.batch.decoding_model import ModelRefused
from mbd_core.batch.executor import Executor, ExecutorFailed
from mbd_core.batch.parts import NumberedTable, Part, cut, part_size
from mbd_core.batch.rows import PlannedRow
from mbd_core.batch.timed_cases import TimedCase, Timing, timed_cases
from mbd_core.evaluation.sweep.endpoints.endpoint import EndpointLost, EndpointStage
from mbd_core.evaluation.sweep.folder import FAILURE, SweepFolder, is_computed, read_samples
from mbd_core.evaluation.sweep.record import SweepRecord, record_of, timed_rows
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.evaluation.sweep.sweep import Sweep

ReportType = TypeVar("ReportType")


@dataclass(frozen=True)
class SweepRun:
    """A sweep, its record, and its parts and timed cases, which do not depend on the number of engines."""

    sweep: Sweep
    record: SweepRecord
    parts: Sequence[Part]
    cases: Sequence[TimedCase]

    @classmethod
    def of(cls, sweep: Sweep, *, shard: SweepShard, timing: Timing) -> Self:
        """The run of a shard."""
        rows = list(sweep.rows())
        parts = cut(rows, rows_per_part=part_size(len(rows), max_rows=sweep.engine.max_rows))
        record = record_of(sweep, rows, parts, shard=shard, timing=timing)
        return cls(sweep, record, parts, timed_cases(timed_rows(sweep, rows), timing))

    def run(
        self,
        path: Path,
        start: Callable[[], AbstractContextManager[Executor]],
        *,
        stage: EndpointStage,
        report: Callable[[SweepFolder], ReportType],
        overwrite: bool = False,
        publish: Callable[[str], None] = lambda _: None,
        name: str | None = None,
    ) -> ReportType:
        """Compute the missing parts and cases of the folder at `path`. The report is written once all samples are
        there, and again with the times.

        `start` starts an executor, if anything is to be computed. `publish` is passed to `SweepFolder.claim`. `name`
        stands for the folder in messages (default: `path`). Raises `RuntimeError`, one sentence, if the executor fails
        (the traceback is in the folder), and, after the report, if a model cannot be loaded for timing. Raises
        `EndpointLost`, and the `ValueError` of `SweepFolder.claim`.
        """
        place = name or str(path)
        with ExitStack() as stack:
            record, executor = self.record, None
            if not is_computed(path, record, overwrite=overwrite):
                executor = stack.enter_context(start())
                machine = machine_text(executor.cluster_cpus, ranks=self.sweep.tensor_parallel)
                settings = self.sweep.settings(
                    engine=executor.engine, num_actors=executor.num_engines, on_gpu=executor.on_gpu, machine=machine
                )
                record = replace(record, settings=settings)
            folder = stack.enter_context(SweepFolder.claim(path, record, overwrite=overwrite, publish=publish))
            folder.remove(FAILURE)  # of an earlier run
            missing_numbers, refusal = set(folder.missing()), None
            if len(missing_numbers) < len(record.parts):
                num_there = len(record.parts) - len(missing_numbers)
                print(f"eval_sweep: {num_there} of {len(record.parts)} parts are there", file=sys.stderr)
            if executor is None:
                return report(folder)
            folder.note_machine(machine)
            try:
                parts = [self.parts[number] for number in record.parts]
                tables = self._compute(parts, missing_numbers, executor, stage)
                collect_samples(tables, folder, parts, num_engines=executor.num_engines)
                content = report(folder)  # before the timing, which may fail
                if folder.missing_cases():
                    refusal = self._time(folder, executor)
                    content = report(folder)
            except ExecutorFailed as error:
                folder.write_files({FAILURE: error.traceback.encode()})
                raise RuntimeError(
                    f"the sweep failed: {error}; what was computed lies in {place}, with the traceback in {FAILURE}; "
                    "the same command computes the rest"
                ) from error
        if refusal is not None:
            raise RuntimeError(f"not all could be timed: {refusal}; the report is in {place}")
        return content

    def _compute(
        self, parts: Sequence[Part], missing: Collection[int], executor: Executor, stage: EndpointStage
    ) -> Iterator[NumberedTable]:
        """The numbers and graded samples of the missing parts: models' first, then endpoints'."""
        missing_parts = [part for part in parts if part.number in missing]
        decoding = {part.model for part in parts if part.number not in missing}
        if model_parts := [part for part in missing_parts if part.model in self.sweep.models]:
            yield from decode_parts(model_parts, executor, decoding=decoding)
        yield from ask_parts([part for part in missing_parts if part.model in self.sweep.endpoints], executor, stage)

    def _time(self, folder: SweepFolder, executor: Executor) -> ModelRefused | None:
        """Time the missing cases, without the samples that killed an engine. Returns the refusal if a model cannot be
        loaded."""
        missing_cases = set(folder.missing_cases())
        cases = [case for case in self.cases if case.number in missing_cases]
        try:
            collect_times(executor.time(cases, left_out=dead_samples(folder.path)), folder, cases)
        except ModelRefused as error:
            return error
        return None


def ask_parts(parts: Sequence[Part], executor: Executor, stage: EndpointStage) -> Iterator[NumberedTable]:
    """Ask endpoints for parts, one after the other; each part is graded while the next part is asked.

    Raises `EndpointLost` after the parts that were answered before are graded.
    """
    losses = []

    def ask_each() -> Iterator[NumberedTable]:
        for part in parts:
            try:
                yield part.number, stage(part.table())
            except EndpointLost as error:
                losses.append(error)
                return

    yield from executor.process(ask_each())
    if losses:
        raise losses[0]


def machine_text(cluster_cpus: float | None, *, ranks: int) -> str:
    """The machine of the job in words, with the CPUs of its Ray cluster if it has one."""
    place = "without Ray" if cluster_cpus is None else f"Ray sees {cluster_cpus:g} CPUs"
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores; {place}, each engine runs on {ranks}"


def collect_samples(
    tables: Iterable[tuple[int, pa.Table]], folder: SweepFolder, parts: Sequence[Part], *, num_engines: int = 1
) -> None:
    """Write each table, with the number of its part, and show progress; `parts` are all parts of the folder.

    Raises `RuntimeError` if some are missing at the end.
    """
    missing_numbers = set(folder.missing())
    progress = SweepProgress(parts, missing_numbers, num_engines=num_engines)
    total = sum(len(part.rows) for part in parts if part.number in missing_numbers)
    with tqdm(total=total, unit="sample", desc="sweep", mininterval=1.0) as bar:
        for number, table in tables:
            folder.write_part(number, table)
            bar.update(len(table))
            for line in progress.done(number):
                bar.write(f"sweep: {line}", file=sys.stderr)
    if missing_parts := folder.missing():
        raise RuntimeError(
            f"{len(missing_parts)} of {len(parts)} parts did not come back; repeat the command for them"
        )


def collect_times(tables: Iterable[tuple[int, pa.Table]], folder: SweepFolder, cases: Sequence[TimedCase]) -> None:
    """Write the timed requests of each case, and show progress. A case that could not be timed is shown and not
    written, so the same command times it again."""
    with tqdm(total=len(cases), unit="configuration", desc="timing", disable=not cases) as bar:
        for number, table in tables:
            bar.update()
            errors = [error for error in table["error"].to_pylist() if error is not None]
            if not errors:
                folder.write_case(number, table)
            for error in errors:
                bar.write(f"{table['method'][0]} on {table['task'][0]} cannot be timed: {error}", file=sys.stderr)


def dead_samples(folder: Path) -> set[int]:
    """The samples of a sweep's folder that killed the engine."""
    return {row["sample"] for row in read_samples(folder, columns=("sample", "error")) if row["error"] == DEATH_TEXT}


# How far a sweep is: for each model and task the problems that all its configurations have done, and the time left.
#
# All configurations of a problem are in one part, so that they are equally far.

SECONDS = 30.0  # between two reports

ProgressSubject = tuple[str, str]  # model, task


class SweepProgress:
    """Counts the rows of `parts`. The parts with the numbers `missing` come from `num_engines` engines.

    The rate counts the rows after each engine's first part, because the seconds of the first parts include the start
    of the engines.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        missing: Collection[int],
        *,
        num_engines: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts, self._clock = {part.number: part for part in parts}, clock
        self._num_planned, self._num_left = Counter[ProgressSubject](), Counter[ProgressSubject]()
        self._configurations: dict[ProgressSubject, set[tuple[str, str, int]]] = {}
        for part in parts:
            rows = Counter(map(_subject, part.rows))
            self._num_planned += rows
            if part.number in missing:
                self._num_left += rows
            for row in part.rows:
                self._configurations.setdefault(_subject(row), set()).add(
                    (row["method"], row["config"], row.get("draw", 0))
                )
        self._shown_at = self._start = clock()
        self._num_first = num_engines  # parts until the rate begins
        self._num_done = 0  # rows since then

    def done(self, number: int) -> list[str]:
        """Count a finished part. Returns the lines to show: for tasks that a model has now finished, and every
        `SECONDS` also for all unfinished tasks."""
        rows = Counter(map(_subject, self._parts[number].rows))
        self._num_left -= rows
        subjects = [subject for subject in rows if not self._num_left[subject]]
        time_now = self._clock()
        if self._num_first:
            self._num_first -= 1
            self._start = time_now
        else:
            self._num_done += rows.total()
        if time_now - self._shown_at < SECONDS:
            return [self._line(subject) for subject in subjects]
        self._shown_at = time_now
        return [self._line(subject) for subject in self._num_planned if self._num_left[subject] or subject in subjects]

    def _line(self, subject: ProgressSubject) -> str:
        model, task = subject
        configurations = len(self._configurations[subject])
        num_problems, num_left = (
            self._num_planned[subject] // configurations,
            self._num_left[subject] // configurations,
        )
        text = f"{model} on {task}: {num_problems - num_left} of {num_problems} problems"
        methods = len({(method, config) for method, config, _ in self._configurations[subject]})
        text += f" by each of {methods} configurations"
        return text + (f", about {_duration(self._seconds_left(model))} left" if num_left and self._num_done else "")

    def _seconds_left(self, model: str) -> float:
        """Seconds until the model's last part; models are decoded in their order."""
        models = list(dict.fromkeys(name for name, _ in self._num_planned))
        queue = models[: models.index(model) + 1]
        rows = sum(num_rows for (name, _), num_rows in self._num_left.items() if name in queue)
        return rows * (self._clock() - self._start) / self._num_done


def _subject(row: PlannedRow) -> ProgressSubject:
    return (row["model"], row["task"])


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
