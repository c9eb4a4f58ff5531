"""From a sweep's report to a model's front of accuracy against speed, in its `generation_config.json`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mbd_core.checkpoint.config import load_config, load_generation_defaults
from mbd_core.decoding.blocks.methods import KEY, SpeedFront, SpeedPoint, pareto_points, read_front
from mbd_core.files import write_json


def front_of(report: Mapping[str, Any], *, model: str | None = None, tasks: Sequence[str] = ()) -> SpeedFront:
    """The front of a model over tasks of a sweep: by default its only model, and all its tasks.

    A configuration's accuracy and tokens per forward are their means over the tasks. Raises `ValueError` for a model
    or task that the sweep lacks, for a task without tokens per forward, and for a configuration that lacks a task.
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
    rows = [row for row in rows if row["task"] in chosen_tasks]
    if (row := next((row for row in rows if row["tpf"] is None), None)) is not None:
        raise ValueError(
            f"{model} has no tokens per forward on {row['task']} by method '{row['method']}', and so no front: an "
            "endpoint does not say its forwards, and a log-likelihood decodes nothing; choose other tasks with --tasks"
        )
    by_config: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_config.setdefault(json.dumps(row["config"], sort_keys=True), []).append(row)
    points = []
    for group in by_config.values():
        task_rows = list({row["task"]: row for row in group}.values())  # two methods may have one configuration
        if len(task_rows) < len(set(chosen_tasks)):
            lacking = next(task for task in chosen_tasks if task not in {row["task"] for row in task_rows})
            raise ValueError(
                f"points are compared on the same tasks, and {lacking} lacks a configuration that "
                f"{task_rows[0]['task']} has, of method '{group[0]['method']}'; sweep it there, or choose one of the "
                "tasks with --tasks"
            )
        means = {name: sum(row[name] for row in task_rows) / len(task_rows) for name in ("accuracy", "tpf")}
        points.append(SpeedPoint(decoding=task_rows[0]["config"], **means))
    num_samples = sum({row["task"]: row["n"] for row in rows}.values())
    return SpeedFront(points=pareto_points(points), tasks=tuple(chosen_tasks), num_samples=num_samples)


def write_front(folder: Path, front: SpeedFront, *, overwrite: bool = False) -> None:
    """Put the front into the folder's `generation_config.json`, whose other fields stay.

    Raises `ValueError` if the file has a front already, unless `overwrite` is given, and for decoding that the model
    cannot honour.
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
    """The front as text, one line for each point."""
    names = [name for name in front.points[0].decoding if len({str(p.decoding.get(name)) for p in front.points}) > 1]
    lines = [f"{'speed':>6} {'accuracy':>8} {'tpf':>6}  what differs"]
    for speed, point in zip(front.speeds, front.points, strict=True):
        fields = ", ".join(f"{name}={json.dumps(point.decoding.get(name))}" for name in names)
        lines.append(f"{speed:6.4g} {point.accuracy:8.2f} {point.tpf:6.2f}  {fields}".rstrip())
    return "\n".join(lines)
