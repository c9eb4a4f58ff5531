"""What a sweep's rows choose: each model's best configuration, and its front of accuracy against speed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mbd_core.batch.timed_cases import Timing
from mbd_core.checkpoint.config import load_config, load_generation_defaults
from mbd_core.checkpoint.model_digest import model_digest
from mbd_core.decoding.blocks.methods import KEY, SpeedFront, SpeedPoint, pareto_points, read_front
from mbd_core.evaluation.measures.summary import build_rows
from mbd_core.evaluation.report.summary import joinable_records, planned_samples, times_of
from mbd_core.evaluation.sweep.best import BestPoint, By, check_halves, choose_best
from mbd_core.evaluation.sweep.best_folder import FILE, check_best_folder, write_best
from mbd_core.evaluation.sweep.folder import load_samples, read_record
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.evaluation.sweep.sweep import Sweep
from mbd_core.files import write_json

# The choice of each model's best configuration from the rows of its sweep, and where it is to be written.


def check_choice(
    sweep: Sweep, by: By, *, folders: Mapping[str, Path | None], shard: SweepShard, timing: Timing
) -> None:
    """Raise `ValueError` if the best configurations of a sweep that is yet to run could not be chosen or written.

    `folders` has each model's own folder; `None` for one that lies elsewhere, as at a URL.
    """
    for name, folder in folders.items():
        if folder is None:
            raise ValueError(
                f"--write-best cannot write into model '{name}', whose folder is not on this machine; sweep a folder"
            )
        check_best_folder(folder)
    if shard.count > 1:
        raise ValueError(
            f"--write-best needs all of a sweep, and --shard {shard} computes a part; join the shards with "
            "jobs/report_sweep.py best"
        )
    if by == "tps" and not timing.problems:
        raise ValueError("--write-best tps needs timed runs, and --timed 0 leaves them out; leave out --timed")
    check_halves({task.name: [problem.problem_id for problem in task.problems] for task in sweep.tasks})


def models_of(folders: Sequence[Path], model_folders: Sequence[Path]) -> dict[str, Path]:
    """Which of the sweeps' models each model folder holds, by its files; `ValueError` for one that holds none of them,
    for two that hold the same one, or for one that cannot be written."""
    digests = {name: digest for folder in folders for name, digest in read_record(folder).plan["models"].items()}
    targets: dict[str, Path] = {}
    for model_folder in model_folders:
        check_best_folder(model_folder)
        digest = model_digest(model_folder)
        name = next((name for name, other_digest in digests.items() if other_digest == digest), None)
        if name is None:
            raise ValueError(
                f"{model_folder} holds none of the sweep's models, {', '.join(digests)}: its files differ"
            )
        if name in targets:
            raise ValueError(
                f"--folder {targets[name]} and --folder {model_folder} hold equal files, those of model '{name}'; "
                "give one of them"
            )
        targets[name] = model_folder
    return targets


def best_points(folders: Sequence[Path], models: Sequence[str], by: By) -> list[BestPoint]:
    """The best configuration of each model in the sweeps; `ValueError` for sweeps that are not finished, and as
    `choose_best`."""
    num_planned, samples = planned_samples(joinable_records(folders)), load_samples(folders)
    num_samples = sum(map(len, samples.values()))
    if num_samples < num_planned:
        raise ValueError(
            f"a best configuration needs a finished sweep, and {num_samples} of {num_planned} samples are there"
        )
    times = times_of(folders, build_rows(samples))
    return [choose_best(samples, times, model=model, by=by) for model in models]


def written_best(folder: Path, point: BestPoint) -> str:
    """Write a chosen configuration into its model's folder; what was chosen, and where it is."""
    write_best(folder, point)
    return f"\n{point.text}\nIt is the default of {folder / FILE}"


# From a sweep's report to a model's front of accuracy against speed, in its `generation_config.json`.


def front_of(report: Mapping[str, Any], *, model: str | None = None, tasks: Sequence[str] = ()) -> SpeedFront:
    """The front of a model over tasks of a sweep (`None` and none: all that the sweep has).

    A configuration's accuracy and tokens per forward are their means over the tasks. Raises `ValueError` for a model
    or task that the sweep has not.
    """
    rows = report["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    if model is None and len(models) > 1:
        raise ValueError(f"the sweep has several models; choose one with --model: {', '.join(models)}")
    model = models[0] if model is None else model
    if model not in models:
        raise ValueError(f"the sweep has no model '{model}'; it has: {', '.join(models)}")
    rows = [row for row in rows if row["model"] == model]
    known_tasks = list(dict.fromkeys(row["task"] for row in rows))
    unknown_task = next((task for task in tasks if task not in known_tasks), None)
    if unknown_task is not None:
        raise ValueError(f"the sweep has no task '{unknown_task}' of {model}; it has: {', '.join(known_tasks)}")
    chosen_tasks = list(tasks) or known_tasks
    if any(row["tpf"] is None for row in rows):
        raise ValueError(f"{model} was asked at an endpoint that does not say its forwards: it has no front")
    by_config: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["task"] in chosen_tasks:
            by_config.setdefault(json.dumps(row["config"], sort_keys=True), []).append(row)
    points = []
    for group in by_config.values():
        task_rows = list({row["task"]: row for row in group}.values())  # two methods may have one configuration
        means = {name: sum(row[name] for row in task_rows) / len(task_rows) for name in ("accuracy", "tpf")}
        points.append(SpeedPoint(decoding=task_rows[0]["config"], **means))
    num_samples = sum({row["task"]: row["n"] for row in rows if row["task"] in chosen_tasks}.values())
    return SpeedFront(points=pareto_points(points), tasks=tuple(chosen_tasks), num_samples=num_samples)


def write_front(folder: Path, front: SpeedFront, *, overwrite: bool = False) -> None:
    """Put the front into the folder's `generation_config.json`, whose other fields stay.

    Raises `ValueError` where there is a front already, unless `overwrite`, and for decoding that the model cannot
    honour.
    """
    config, generation = load_config(folder), load_generation_defaults(folder)
    if generation.get(KEY) is not None and not overwrite:
        raise ValueError(f"{folder} has a {KEY} already; --overwrite replaces it")
    new_generation = {**generation, KEY: front.generation_fields()}
    try:
        read_front(new_generation, block_size=generation.get("block_size", config.block_size))
    except ValueError as error:
        raise ValueError(f"the front does not fit {folder}: {error}") from None
    write_json(folder / "generation_config.json", new_generation)


def front_table(front: SpeedFront) -> str:
    """The front as text, a line a point."""
    names = [name for name in front.points[0].decoding if len({str(p.decoding.get(name)) for p in front.points}) > 1]
    lines = [f"{'speed':>6} {'accuracy':>8} {'tpf':>6}  what differs"]
    for speed, point in zip(front.speeds, front.points, strict=True):
        fields = ", ".join(f"{name}={json.dumps(point.decoding.get(name))}" for name in names)
        lines.append(f"{speed:6.4g} {point.accuracy:8.2f} {point.tpf:6.2f}  {fields}".rstrip())
    return "\n".join(lines)
