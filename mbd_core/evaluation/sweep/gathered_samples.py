"""The graded samples of sweeps, gathered by configuration for the report."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mbd_core.batch.rows import COUNTS, LIKELIHOOD
from mbd_core.evaluation.measures.rates import RULES, GradedSample, SampleCounts
from mbd_core.evaluation.measures.summary import ReportKey
from mbd_core.evaluation.sweep.endpoints.endpoint import ENDPOINT_DEFAULT
from mbd_core.evaluation.sweep.folder import OPTIONAL, read_record, read_samples
from mbd_core.evaluation.sweep.grading.graded_rows import GradedRow
from mbd_core.evaluation.tasks.benchmarks import find_task

COLUMNS = (
    *OPTIONAL,
    *("sample", "model", "method", "task", "config", "problem_id", "seed", "correct", "error", "finish_reason"),
    *(f"{rule}_correct" for rule in RULES),
    *COUNTS,
)


def load_samples(folders: Sequence[Path]) -> dict[ReportKey, list[GradedSample]]:
    """The samples of sweeps by configuration: configurations in the order of their plans, samples by number.

    A sample that several folders hold is counted once if their sweeps are the same. Raises `ValueError` if two
    different sweeps share a model's configuration and a problem, because it is open which row counts, or if they have
    different problems of one id, as the first lines of two files. Another seed gives other problems only if the task
    draws its problems; a file's problems, and so their answers, are the same under every seed.
    """
    _check_problems(folders)
    samples: dict[ReportKey, list[GradedSample]] = {}
    plans: dict[tuple[ReportKey, str, int | None, int | None], int] = {}  # of (configuration, problem, seed, draw)
    rows: list[tuple[int, int, ReportKey, GradedSample]] = []
    plan_values: list[Any] = []
    for folder in folders:
        record = read_record(folder)
        for key in record.subjects():
            samples.setdefault(key, [])
        if record.plan not in plan_values:
            plan_values.append(record.plan)
        plan = plan_values.index(record.plan)
        for row in read_samples(folder, columns=COLUMNS):
            key = ReportKey(row["model"], row["method"], row["task"], row["config"])
            subject = (key, row["problem_id"], row["seed"] if _is_drawn(key.task) else None, row["draw"])
            if subject in plans:
                if plans[subject] != plan:
                    raise ValueError(
                        f"{folder} and an earlier folder hold {row['problem_id']} of model '{key.model}' by method "
                        f"'{key.method}', from sweeps that differ; join sweeps of different problems or models"
                        f"{'' if _is_drawn(key.task) else ' (a seed changes nothing of the problems of a file)'}"
                    )
                continue
            plans[subject] = plan
            rows.append((plan, row["sample"], key, graded_sample(row)))
    for _, _, key, sample in sorted(rows, key=lambda item: item[:2]):
        samples[key].append(sample)
    return {key: _group_of(group) for key, group in samples.items() if group}


def _check_problems(folders: Sequence[Path]) -> None:
    """Raise `ValueError` if an id names different problems of a task in two folders. Sweeps of one plan have the same
    problems."""
    plans: list[Any] = []
    prompts: dict[tuple[str, str], str] = {}
    for folder in folders if len(folders) > 1 else ():
        if (plan := read_record(folder).plan) in plans:
            continue
        plans.append(plan)
        for row in read_samples(folder, columns=("task", "problem_id", "prompt")):
            prompt = row["prompt"]
            if prompts.setdefault((row["task"], row["problem_id"]), prompt) != prompt:
                raise ValueError(
                    f"{folder} and an earlier folder cannot be joined: {row['problem_id']} of task '{row['task']}' is "
                    "another problem there; join sweeps whose problems are of one file"
                )


def _is_drawn(task: str) -> bool:
    """Whether a seed decides the problems of a task."""
    try:
        return find_task(task).generate is not None
    except ValueError:
        return True  # a task of another version


def _group_of(samples: list[GradedSample]) -> list[GradedSample]:
    """A configuration's samples. If any of them has forward counts, none is bare."""
    if all(sample.is_bare for sample in samples):
        return samples
    return [replace(sample, is_bare=False) for sample in samples]


def graded_sample(row: GradedRow) -> GradedSample:
    """The sample of a row of `GRADED_COLUMNS`."""
    counts = None
    if row["error"] is None:
        counts = SampleCounts(
            num_prompt_tokens=row["num_prompt_tokens"],
            num_tokens=row["num_tokens"],
            num_forwards=row["num_forwards"],
            num_store_forwards=row["num_store_forwards"],
            num_prefill_forwards=row["num_prefill_forwards"],
            num_drafted_tokens=row.get("num_drafted_tokens"),
            num_confirmed_tokens=row.get("num_confirmed_tokens"),
            num_positions=row.get("num_positions"),
        )
    return GradedSample(
        problem=row["problem_id"],
        correct=row["correct"],
        counts=counts,
        cut=row["finish_reason"] == "length",
        strict_correct=row["strict_correct"],
        flexible_correct=row["flexible_correct"],
        base_correct=row["base_correct"],
        plus_correct=row["plus_correct"],
        is_bare=row["method"] in (ENDPOINT_DEFAULT, LIKELIHOOD) and row["num_forwards"] is None,
        seed=row["seed"],
        draw=row.get("draw"),
        vote=row.get("vote"),
        error=row["error"],
    )
