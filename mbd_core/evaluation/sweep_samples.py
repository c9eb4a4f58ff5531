"""Writes a sweep's graded samples to its folder as they arrive, and gathers them by configuration for the report."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from mbd_core.decoding.request import Counts
from mbd_core.evaluation.rates import GradedSample
from mbd_core.evaluation.sample_tables import COUNTS
from mbd_core.evaluation.sweep_folder import write_samples
from mbd_core.evaluation.sweep_plan import Sweep
from mbd_core.evaluation.sweep_report import ReportKey


def collect_samples(tables: Iterable[pa.Table], sweep: Sweep, *, folder: Path) -> dict[ReportKey, list[GradedSample]]:
    """Write every table as a part, show progress, and return the samples by configuration, in the sweep's order.

    Raises `RuntimeError` if samples are missing at the end.
    """
    samples: dict[ReportKey, list[GradedSample]] = {
        ReportKey(model, variant.method, problem_set.task.name, json.dumps(asdict(variant.decoding))): []
        for model, variants in sweep.variants.items()
        for variant in variants
        for problem_set in sweep.problem_sets
    }
    with tqdm(total=sweep.num_samples, unit="sample", desc="sweep", mininterval=1.0) as bar:
        for number, table in enumerate(tables):
            write_samples(folder, number, table)
            for row in table.to_pylist():
                samples[ReportKey(row["model"], row["method"], row["task"], row["config"])].append(graded_sample(row))
            bar.update(len(table))
    num_collected = sum(len(graded) for graded in samples.values())
    if num_collected != sweep.num_samples:
        raise RuntimeError(f"{num_collected} of {sweep.num_samples} samples came back; {folder} holds them")
    return samples


def graded_sample(row: dict[str, Any]) -> GradedSample:
    """The sample of a row of `GRADED_COLUMNS`."""
    counts = None
    if row["error"] is None:
        counts = Counts(**{name: row[name] for name in COUNTS}, decode_seconds=row["decode_seconds"])
    return GradedSample(
        correct=row["correct"],
        counts=counts,
        cut=row["finish_reason"] == "length",
        strict_correct=row["strict_correct"],
        flexible_correct=row["flexible_correct"],
    )
