"""A sweep's report from its rows alone, without a model: the folders of sweeps are joined, measured and written."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mbd_core.evaluation.measures.rates import GradedSample
from mbd_core.evaluation.measures.repeated import Repeated, measure_repeated
from mbd_core.evaluation.measures.speed import MeasuredSpeed, config_of, speeds
from mbd_core.evaluation.measures.summary import (
    ReportKey,
    ReportRow,
    build_aup,
    build_rows,
    with_intervals,
)
from mbd_core.evaluation.report.accuracy_gaps import accuracy_gaps
from mbd_core.evaluation.report.contents import SweepNumbers, report_files, report_tables
from mbd_core.evaluation.report.harness_table import harness_numbers
from mbd_core.evaluation.report.shown_samples import choose_samples
from mbd_core.evaluation.report.speeds import (
    endpoint_seconds,
    key_of,
)
from mbd_core.evaluation.sandbox.processes import MEANING
from mbd_core.evaluation.sweep.endpoints.endpoint import is_endpoint
from mbd_core.evaluation.sweep.folder import SweepFolder, isolations, read_record, read_times
from mbd_core.evaluation.sweep.gathered_samples import load_samples
from mbd_core.evaluation.sweep.record import SweepRecord
from mbd_core.tables import Table, markdown

MOST_REASONS = 3  # shown reasons why a model's requests to a task failed
PROMPT_FIELDS = ("form", "prompt", "examples", "examples_sha256", "stop")  # fields of a task's settings on its prompts


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    """A report's tables, the contents of its files by name, and its numbers of present and of planned samples."""

    tables: Sequence[Table]
    files: dict[str, bytes]
    num_samples: int
    num_planned: int

    @property
    def text(self) -> str:
        return self.files["report.md"].decode()

    @property
    def headlines(self) -> str:
        """The tables for a terminal. The other tables only detail the same samples, or define the numbers."""
        return markdown(replace(table, see="") for table in self.tables if table.brief)


def summarize_sweeps(folders: Sequence[Path]) -> SweepSummary:
    """The report of the rows in the folders. All shards of one sweep together give the sweep's report.

    Raises `ValueError` for a folder without a sweep, for sweeps that cannot be joined, and if there are no rows.
    """
    records = joinable_records(folders)
    samples = load_samples(folders)
    rows = build_rows(samples)
    if not rows:
        raise ValueError(f"{', '.join(map(str, folders))}: no sample is there yet")
    labels = {task: label for record in records for task, label in record.labels.items()}
    labels = {task: label for task, label in labels.items() if any(row.key.task == task for row in rows)}
    num_samples = sum(row.summary.n for row in rows)
    num_planned = planned_samples(records)
    settings = _joined_settings(folders, records)
    if num_samples < num_planned:
        settings = {"incomplete": f"{num_samples} of {num_planned} samples are there", **settings}
    if errors := _errors(samples):
        settings = {"not decoded": errors, **settings}
    times = times_of(folders, rows)
    if any(record.num_cases for record in records) and (
        without_time := _configurations_without_time(rows, times, records)
    ):
        settings = {"not timed": without_time, **settings}
    aups, aup_means = with_intervals([*build_aup(rows), *build_aup(rows, by_slots=True)], samples)
    numbers = SweepNumbers(
        rows=rows,
        labels=labels,
        settings=settings,
        aups=aups,
        aup_means=aup_means,
        times=times,
        gaps=accuracy_gaps(rows, samples),
        seconds=endpoint_seconds(folders),
        repeated=repeated_of(samples),
        harness=harness_numbers(folders, list(samples)),
    )
    tables = report_tables(numbers)
    files = report_files(numbers, tables, choose_samples(folders))
    return SweepSummary(tables=tables, files=files, num_samples=num_samples, num_planned=num_planned)


def _errors(samples: Mapping[ReportKey, Sequence[GradedSample]]) -> list[str]:
    """Why requests of each model to each task could not be decoded: the most frequent reasons, and how often."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for key, group in samples.items():
        reasons = [sample.error for sample in group if sample.error is not None]
        counts.setdefault((key.model, key.task), Counter()).update(reasons)
    return [
        f"{model} on {task}, {number} of {reasons.total()}: {reason}"
        for (model, task), reasons in counts.items()
        for reason, number in reasons.most_common(MOST_REASONS)
    ]


def repeated_of(samples: Mapping[ReportKey, Sequence[GradedSample]]) -> dict[ReportKey, Repeated]:
    """pass@k and maj@k of the configurations with several answers to a problem."""
    rates = {
        key: measure_repeated(answers, votes=any(sample.vote is not None for sample in answers))
        for key, answers in samples.items()
    }
    return {key: rate for key, rate in rates.items() if rate is not None}


def joinable_records(folders: Sequence[Path]) -> list[SweepRecord]:
    """The records of the folders' sweeps.

    Raises `ValueError` for a folder without a sweep, and for sweeps that cannot be joined.
    """
    records = [read_record(folder) for folder in folders]
    _check_joinable(folders, records)
    return records


def planned_samples(records: Sequence[SweepRecord]) -> int:
    """How many samples these sweeps have once they are finished. Shards of one sweep count as one sweep."""
    return sum(record.num_samples for record in _records_by_plan(records))


def times_of(folders: Sequence[Path], rows: Sequence[ReportRow]) -> list[MeasuredSpeed]:
    """The speeds in the order of the report's rows. If two folders hold a case, the first folder's counts."""
    first_folder: dict[tuple[str, str, str, str], int] = {}
    rows_once = [
        row
        for number, folder in enumerate(folders)
        for row in read_times(folder)
        if first_folder.setdefault(config_of(row), number) == number
    ]
    by_key = {key_of(speed): speed for speed in speeds(rows_once)}
    return [by_key[row.key] for row in rows if row.key in by_key]


def _configurations_without_time(
    rows: Sequence[ReportRow], times: Sequence[MeasuredSpeed], records: Sequence[SweepRecord]
) -> list[str]:
    """The configurations without a time: timing failed, has not run yet, or the model can serve none of the requests.
    Endpoints are never timed."""
    endpoint_models = {
        name for record in records for name, digest in record.plan["models"].items() if is_endpoint(digest)
    }
    timed_keys = {key_of(speed) for speed in times}
    return [
        f"{row.key.model}, {row.key.method} on {row.key.task}: {row.varied or 'the only one'}"
        for row in rows
        if row.key not in timed_keys and row.key.model not in endpoint_models
    ]


def write_summary(folder: SweepFolder) -> SweepSummary:
    """Write the report of a sweep's folder into it."""
    summary = summarize_sweeps([folder.path])
    folder.write_files(summary.files)
    return summary


def rewrite_summary(path: Path) -> SweepSummary:
    """Write the report of a sweep's folder anew. Raises `ValueError` if no sweep lies there, or one is running."""
    record = read_record(path)
    with SweepFolder.claim(path, record) as folder:
        return write_summary(folder)


def _check_joinable(folders: Sequence[Path], records: Sequence[SweepRecord]) -> None:
    """Raise `ValueError` if one name means different things in two folders."""
    meanings: dict[str, tuple[Any, Path]] = {}
    for folder, record in zip(folders, records, strict=True):
        for subject, content in _meanings(record):
            other_content, other_folder = meanings.setdefault(subject, (content, folder))
            if other_content != content:
                raise ValueError(f"{other_folder} and {folder} cannot be joined: {subject} differ")


def _meanings(record: SweepRecord) -> Iterator[tuple[str, Any]]:
    """Pairs: the subject of an error's sentence, as "the files of model 'm'", and its content in this sweep."""
    for name, digest in record.plan["models"].items():
        yield f"the files of model '{name}'", digest
    for name, task in record.plan["tasks"].items():
        yield f"the rule or max_tokens of task '{name}'", (task["rule"], task["max_tokens"])
    for name, task in record.settings.get("tasks", {}).items():
        yield f"the prompts, examples or stop strings of task '{name}'", [task.get(part) for part in PROMPT_FIELDS]
    yield (
        "--samples, --temperature or --top-p",
        [record.plan.get(name) for name in ("samples", "temperature", "top_p")],
    )
    for name, fields in record.settings.get("methods", {}).items():
        yield f"the fields of method '{name}'", json.loads(fields)


def _records_by_plan(records: Sequence[SweepRecord]) -> list[SweepRecord]:
    """One record of each plan."""
    plans = [record.plan for record in records]
    return [record for number, record in enumerate(records) if plans.index(record.plan) == number]


def _joined_settings(folders: Sequence[Path], records: Sequence[SweepRecord]) -> Mapping[str, Any]:
    """The settings of one sweep, or each sweep's settings by its folder's name.

    Added are the machines of all shards, how programs were isolated there, and the digests of the models' weights.
    """
    plan_records = _records_by_plan(records)
    if len(plan_records) > 1:
        return {
            str(folder): _joined_settings([folder], [record]) for folder, record in zip(folders, records, strict=True)
        }
    machines = dict.fromkeys(machine for record in records for machine in record.settings.get("machines", []))
    settings = {**plan_records[0].settings, "machines": list(machines)}
    if "models" in settings:
        digests = plan_records[0].plan["models"]
        settings["models"] = {name: {"digest": digests[name], **fields} for name, fields in settings["models"].items()}
    if ways := sorted({way for folder in folders for way in isolations(folder)}):
        settings["isolation"] = [MEANING.get(way, way) for way in ways]
    if len(records) == 1 and records[0].shard.count > 1:
        settings["shard"] = str(records[0].shard)
    return settings
