"""Writes a sweep's graded samples to its folder as they arrive, and gathers them by configuration for the report."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from mbd_core.evaluation.endpoint import ENDPOINT_DEFAULT
from mbd_core.evaluation.rates import RULES, GradedSample, SampleCounts
from mbd_core.evaluation.sample_tables import COUNTS
from mbd_core.evaluation.sweep_folder import SweepFolder, read_record, read_samples
from mbd_core.evaluation.sweep_parts import Part
from mbd_core.evaluation.sweep_progress import SweepProgress
from mbd_core.evaluation.sweep_report import ReportKey
from mbd_core.evaluation.tasks import TASKS
from mbd_core.evaluation.timed_cases import TimedCase

COLUMNS = (
    *("sample", "model", "method", "task", "config", "problem_id", "seed", "correct", "error", "finish_reason"),
    *(f"{rule}_correct" for rule in RULES),
    *COUNTS,
)

Samples = dict[ReportKey, list[GradedSample]]


def collect_samples(
    tables: Iterable[tuple[int, pa.Table]], folder: SweepFolder, parts: Sequence[Part], *, num_engines: int = 1
) -> None:
    """Write each table, with the number of its part, and show progress; `parts` are all parts of the folder.

    Raises `RuntimeError` if some are missing at the end.
    """
    missing = set(folder.missing())
    progress = SweepProgress(parts, missing, num_engines=num_engines)
    total = sum(len(part.rows) for part in parts if part.number in missing)
    with tqdm(total=total, unit="sample", desc="sweep", mininterval=1.0) as bar:
        for number, table in tables:
            folder.write_part(number, table)
            bar.update(len(table))
            for line in progress.done(number):
                bar.write(f"sweep: {line}", file=sys.stderr)
    if still := folder.missing():
        raise RuntimeError(f"{len(still)} of {len(parts)} parts did not come back; repeat the command for them")


def collect_times(tables: Iterable[tuple[int, pa.Table]], folder: SweepFolder, cases: Sequence[TimedCase]) -> None:
    """Write the timed requests of each case, and show progress and what could not be timed, which is not written and
    so timed again by the same command."""
    with tqdm(total=len(cases), unit="configuration", desc="timing", disable=not cases) as bar:
        for number, table in tables:
            bar.update()
            errors = [error for error in table["error"].to_pylist() if error is not None]
            if not errors:
                folder.write_case(number, table)
            for error in errors:
                bar.write(f"{table['method'][0]} on {table['task'][0]} cannot be timed: {error}", file=sys.stderr)


def load_samples(folders: Sequence[Path]) -> Samples:
    """The samples of sweeps by configuration, in the order of their plans, those of one configuration by number.

    A sample that several folders hold is counted once if their sweeps are the same. Raises `ValueError` if two sweeps
    that differ have a model's configuration and a problem in common: which of the rows counts? A seed makes another
    problem of it only if the task draws its problems; those of a file are the same under each, and so are the answers.
    """
    samples: Samples = {}
    plans: dict[tuple[ReportKey, str, int | None], int] = {}  # (configuration, problem, seed) -> the plan it is of
    found: list[tuple[int, int, ReportKey, GradedSample]] = []
    known: list[Any] = []
    for folder in folders:
        record = read_record(folder)
        for key in record.subjects():
            samples.setdefault(key, [])
        if record.plan not in known:
            known.append(record.plan)
        plan = known.index(record.plan)
        for row in read_samples(folder, columns=COLUMNS):
            key = ReportKey(row["model"], row["method"], row["task"], row["config"])
            subject = (key, row["problem_id"], row["seed"] if _is_drawn(key.task) else None)
            if subject in plans:
                if plans[subject] != plan:
                    raise ValueError(
                        f"{folder} and an earlier folder hold {row['problem_id']} of model '{key.model}' by method "
                        f"'{key.method}', from sweeps that differ; join sweeps of different problems or models"
                        f"{'' if _is_drawn(key.task) else ' (a seed changes nothing of the problems of a file)'}"
                    )
                continue
            plans[subject] = plan
            found.append((plan, row["sample"], key, graded_sample(row)))
    for _, _, key, sample in sorted(found, key=lambda one: one[:2]):
        samples[key].append(sample)
    return {key: _counted(graded) for key, graded in samples.items() if graded}


def _is_drawn(task: str) -> bool:
    """Whether a seed decides the problems of a task."""
    return task not in TASKS or TASKS[task].generate is not None


def _counted(graded: list[GradedSample]) -> list[GradedSample]:
    """A configuration's samples: an error of an endpoint that says forwards with others makes it no bare one."""
    if all(sample.is_bare for sample in graded):
        return graded
    return [replace(sample, is_bare=False) for sample in graded]


def graded_sample(row: dict[str, Any]) -> GradedSample:
    """The sample of a row of `GRADED_COLUMNS`."""
    counts = None
    if row["error"] is None:
        counts = SampleCounts(**{name: row[name] for name in COUNTS})
    return GradedSample(
        problem=row["problem_id"],
        correct=row["correct"],
        counts=counts,
        cut=row["finish_reason"] == "length",
        **{f"{rule}_correct": row[f"{rule}_correct"] for rule in RULES},
        is_bare=row["method"] == ENDPOINT_DEFAULT and row["num_forwards"] is None,
        seed=row["seed"],
    )
