"""A sweep's report from its rows alone, without a model: of one folder, or of several joined."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbd_core.evaluation.accuracy_gaps import accuracy_gaps
from mbd_core.evaluation.aup_interval import with_intervals
from mbd_core.evaluation.endpoint import is_endpoint
from mbd_core.evaluation.endpoint_seconds import endpoint_seconds
from mbd_core.evaluation.report_files import report_files
from mbd_core.evaluation.sandbox import MEANING
from mbd_core.evaluation.shown_samples import choose_samples
from mbd_core.evaluation.speed import Speed, speeds
from mbd_core.evaluation.sweep_folder import SweepFolder, isolations, read_record, read_times
from mbd_core.evaluation.sweep_record import SweepRecord
from mbd_core.evaluation.sweep_report import ReportKey, ReportRow, build_aup, build_rows
from mbd_core.evaluation.sweep_samples import load_samples
from mbd_core.evaluation.timed_cases import config_of

ASKED = ("form", "prompt", "examples", "examples_sha256", "stop")  # what a task's settings say of its prompts


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    """The content of a report's files, by name, and how many of the samples that belong into it are there."""

    files: dict[str, bytes]
    num_samples: int
    num_planned: int

    @property
    def text(self) -> str:
        return self.files["report.md"].decode()


def summarize_sweeps(folders: Sequence[Path]) -> SweepSummary:
    """The report of the rows in the folders. Shards of one sweep, once they are all there, give the sweep's report.

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
    times = times_of(folders, rows)
    if any(record.num_cases for record in records) and (untimed := _untimed(rows, times, records)):
        settings = {"not timed": untimed, **settings}
    aups, aup_means = with_intervals(build_aup(rows), samples)
    shown, seconds = choose_samples(folders), endpoint_seconds(folders)
    gaps = accuracy_gaps(rows, samples)
    files = report_files(
        rows, aups, aup_means, times, shown, gaps=gaps, labels=labels, settings=settings, seconds=seconds
    )
    return SweepSummary(files=files, num_samples=num_samples, num_planned=num_planned)


def joinable_records(folders: Sequence[Path]) -> list[SweepRecord]:
    """The records of the folders' sweeps; `ValueError` for a folder without one, or sweeps that cannot be joined."""
    records = [read_record(folder) for folder in folders]
    _check_joinable(folders, records)
    return records


def planned_samples(records: Sequence[SweepRecord]) -> int:
    """How many samples these sweeps have once they are finished; shards of one sweep are one."""
    return sum(record.num_samples for record in _distinct(records))


def times_of(folders: Sequence[Path], rows: Sequence[ReportRow]) -> list[Speed]:
    """The speeds in the order of the report's rows; of a case that two folders hold, the first's."""
    known: dict[tuple[str, str, str, str], int] = {}
    timed = [
        row
        for number, folder in enumerate(folders)
        for row in read_times(folder)
        if known.setdefault(config_of(row), number) == number
    ]
    order = {(row.key.model, row.key.method, row.key.task, row.key.config): n for n, row in enumerate(rows)}
    found = {(speed.model, speed.method, speed.task, speed.config): speed for speed in speeds(timed)}
    return [found[key] for key in sorted(found.keys() & order.keys(), key=lambda key: order[key])]


def _untimed(rows: Sequence[ReportRow], times: Sequence[Speed], records: Sequence[SweepRecord]) -> list[str]:
    """The configurations without a time: it failed, has not come yet, or the model can serve none of the requests.
    Those of endpoints are never timed."""
    asked = {name for record in records for name, digest in record.plan["models"].items() if is_endpoint(digest)}
    timed = {ReportKey(speed.model, speed.method, speed.task, speed.config) for speed in times}
    return [
        f"{row.key.model}, {row.key.method} on {row.key.task}: {row.varied or 'the only one'}"
        for row in rows
        if row.key not in timed and row.key.model not in asked
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
    seen: dict[str, tuple[Any, Path]] = {}
    for folder, record in zip(folders, records, strict=True):
        for subject, content in _meanings(record):
            meant, first = seen.setdefault(subject, (content, folder))
            if meant != content:
                raise ValueError(f"{first} and {folder} cannot be joined: {subject} differ")


def _meanings(record: SweepRecord) -> Iterator[tuple[str, Any]]:
    """What each name of a sweep means, with what is said where it means something else in another."""
    for name, digest in record.plan["models"].items():
        yield f"the files of model '{name}'", digest
    for name, task in record.plan["tasks"].items():
        yield f"the rule or max_tokens of task '{name}'", (task["rule"], task["max_tokens"])
    for name, task in record.settings.get("tasks", {}).items():
        yield f"the prompts, examples or stop strings of task '{name}'", [task.get(part) for part in ASKED]
    for name, fields in record.settings.get("methods", {}).items():
        yield f"the fields of method '{name}'", json.loads(fields)


def _distinct(records: Sequence[SweepRecord]) -> list[SweepRecord]:
    """One record of each plan."""
    plans = [record.plan for record in records]
    return [record for number, record in enumerate(records) if plans.index(record.plan) == number]


def _joined_settings(folders: Sequence[Path], records: Sequence[SweepRecord]) -> Mapping[str, Any]:
    """The settings of one sweep, or those of each by its folder's name; all machines on which shards ran, and the ways
    in which these contained programs. Of each model the digest says which weights it has."""
    distinct = _distinct(records)
    if len(distinct) > 1:
        return {
            str(folder): _joined_settings([folder], [record]) for folder, record in zip(folders, records, strict=True)
        }
    machines = dict.fromkeys(machine for record in records for machine in record.settings.get("machines", []))
    settings = {**distinct[0].settings, "machines": list(machines)}
    if "models" in settings:
        digests = distinct[0].plan["models"]
        settings["models"] = {name: {"digest": digests[name], **said} for name, said in settings["models"].items()}
    if ways := sorted({way for folder in folders for way in isolations(folder)}):
        settings["isolation"] = [MEANING.get(way, way) for way in ways]
    if len(records) == 1 and records[0].shard.count > 1:
        settings["shard"] = str(records[0].shard)
    return settings
