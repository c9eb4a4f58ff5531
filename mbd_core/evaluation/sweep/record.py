"""The record of a sweep's plan in its folder, by which the sweep is resumed, reported, and told from others."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from mbd_core.batch.parts import Part
from mbd_core.batch.rows import LIKELIHOOD, PlannedRow, current_config
from mbd_core.batch.timed_cases import Timing, timed_cases
from mbd_core.checkpoint.model_digest import model_digest
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.evaluation.measures.summary import ReportKey
from mbd_core.evaluation.sweep.endpoints.endpoint import is_endpoint
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.evaluation.sweep.sweep import Sweep
from mbd_core.fields import configuration

VERSIONS = ("mbd-cluster", "torch", "transformers", "math-verify")  # tokens and grades depend on them
# The form of the rows, raised when the batching of parts or the columns of rows change: a folder must not hold rows
# of two forms. A record without a form has form 1.
ROWS = 2
# Sizes among the options: they decide how rows are batched, and for which requests there is memory.
ENGINE_SIZES = ("max_rows", "num_pages", "kv_memory_fraction")
# Columns of a row that are no part of its problem.
SAMPLE_KEY = ("sample", "model", "method", "config", "max_tokens", "seed", "draw", "sampling")


@configuration()
class SweepRecord:
    """A sweep as its folder knows it. Two records with an equal `plan` give the same rows.

    plan       everything that decides the rows: models by digest, configurations, problems, sizes, form, versions
               (`plan_of`)
    shard      the part of the sweep that lies in this folder
    num_parts  how many parts the sweep is cut into
    num_cases  configurations and tasks that are timed (`timed_cases`)
    timing     how they are timed, which decides no row
    labels     column heads by task
    settings   further facts for a reader of the report (`Sweep.settings`)
    """

    plan: Mapping[str, Any]
    shard: SweepShard
    num_parts: int
    num_cases: int
    timing: Timing
    labels: Mapping[str, str]
    settings: Mapping[str, Any]

    @property
    def parts(self) -> list[int]:
        """The numbers of the parts that belong into this folder."""
        return [number for number in range(self.num_parts) if self.shard.holds(number)]

    @property
    def cases(self) -> list[int]:
        """The numbers of the timed cases that belong into this folder."""
        return [number for number in range(self.num_cases) if self.shard.holds(number)]

    def subjects(self) -> Iterator[ReportKey]:
        """The subjects of the report's rows, in its order."""
        for model, configurations in self.plan["configurations"].items():
            for method, config in configurations:
                for task, content in self.plan["tasks"].items():
                    if (method == LIKELIHOOD) != content.get("scores", False):
                        continue
                    yield ReportKey(model, method, task, config)

    @property
    def num_samples(self) -> int:
        """The samples of all shards together."""
        problems = sum(self.plan["tasks"][key.task]["problems"] for key in self.subjects())
        return int(problems * self.plan.get("samples", 1))


def current_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded plan with its configurations as this version writes them (`current_config`)."""
    configurations = {
        name: [[method, current_config(config)] for method, config in variants]
        for name, variants in plan["configurations"].items()
    }
    return {**plan, "configurations": configurations}


def plan_of(sweep: Sweep, rows: Sequence[PlannedRow]) -> dict[str, Any]:
    """Everything that decides the rows of a sweep; `rows` are all its rows."""
    return {
        "models": {name: model_digest(model_folder(folder)) for name, folder in sweep.models.items()}
        | {name: endpoint.identity for name, endpoint in sweep.endpoints.items()},
        "configurations": {
            name: [[variant.method, variant.config] for variant in variants]
            for name, variants in sweep.variants.items()
        },
        "tasks": {
            task.name: {
                "problems": len(task.problems),
                "rule": task.task.grader.rule,
                "max_tokens": next(row["max_tokens"] for row in rows if row["task"] == task.name),
                "sha256": _problems_digest(rows, task.name),
                **({"scores": True} if task.inputs.scores else {}),
            }
            for task in sweep.tasks
        },
        "seed": sweep.seed,
        **sweep.draws,
        **{name: getattr(sweep.engine, name) for name in ENGINE_SIZES},
        "tensor_parallel": sweep.tensor_parallel,
        **({} if sweep.engine.dtype == "auto" else {"dtype": sweep.engine.dtype}),
        **({} if sweep.draft_folder is None else {"draft_model": model_digest(sweep.draft_folder)}),
        "rows": ROWS,
        "versions": {name: version(name) for name in VERSIONS},
    }


def _problems_digest(rows: Sequence[PlannedRow], task: str) -> str:
    """A hash of a task's problems as they are asked: the rows of one configuration without the columns of
    `SAMPLE_KEY`."""
    first = next(row for row in rows if row["task"] == task)
    digest = hashlib.sha256()
    for row in rows:
        if all(row.get(name) == first.get(name) for name in ("model", "task", "method", "config", "draw")):
            fields = {name: value for name, value in row.items() if name not in SAMPLE_KEY}
            digest.update(json.dumps(fields, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def record_of(
    sweep: Sweep,
    rows: Sequence[PlannedRow],
    parts: Sequence[Part],
    *,
    shard: SweepShard,
    timing: Timing,
) -> SweepRecord:
    """The record of a sweep that is cut into `parts`. The caller adds the settings (`dataclasses.replace`)."""
    return SweepRecord(
        plan=plan_of(sweep, rows),
        shard=shard,
        num_parts=len(parts),
        num_cases=len(timed_cases(timed_rows(sweep, rows), timing)),
        timing=timing,
        labels={task.name: task.task.label for task in sweep.tasks},
        settings={},
    )


def timed_rows(sweep: Sweep, rows: Sequence[PlannedRow]) -> list[PlannedRow]:
    """The rows from which timed requests are chosen: the first draw of each sample that an engine decodes here."""
    rows_here = [row for row in rows if row["model"] in sweep.models and row["method"] != LIKELIHOOD]
    return [row for row in rows_here if row.get("draw", 0) == 0]


def difference(old: SweepRecord, new: SweepRecord) -> str | None:
    """The differences between a folder's sweep and the sweep to be written there, in words; `None` if they are
    equal."""
    differences = list(_differences(old.plan, new.plan))
    if old.shard != new.shard:
        differences.append(f"it is shard {old.shard}, not {new.shard}")
    if old.num_cases and new.num_cases and old.timing != new.timing:
        differences.append(
            f"its configurations are timed with {old.timing}, not {new.timing} (--timed 0 keeps its times)"
        )
    return "; ".join(differences) or None


def _differences(old_plan: Mapping[str, Any], new_plan: Mapping[str, Any]) -> Iterator[str]:
    if list(old_plan["models"]) != list(new_plan["models"]):
        yield f"its models are {', '.join(old_plan['models'])}, not {', '.join(new_plan['models'])}"
    else:
        for name, digest in new_plan["models"].items():
            if old_plan["models"][name] != digest and (is_endpoint(digest) or is_endpoint(old_plan["models"][name])):
                yield f"model '{name}' is another: {old_plan['models'][name]}, not {digest}"
            elif old_plan["models"][name] != digest:
                yield f"the files of model '{name}' are others"
            yield from _other_configurations(name, old_plan["configurations"][name], new_plan["configurations"][name])
    if list(old_plan["tasks"]) != list(new_plan["tasks"]):
        yield f"its tasks are {', '.join(old_plan['tasks'])}, not {', '.join(new_plan['tasks'])}"
    else:
        for name, task in new_plan["tasks"].items():
            yield from _other_problems(name, old_plan["tasks"][name], task)
    for name, unsaid in (
        ("samples", 1),
        ("temperature", 0.0),
        ("top_p", 1.0),
        ("dtype", "auto"),
    ):
        if old_plan.get(name, unsaid) != new_plan.get(name, unsaid):
            yield f"its {name} is {old_plan.get(name, unsaid)}, not {new_plan.get(name, unsaid)}"
    if old_plan.get("draft_model") != new_plan.get("draft_model"):
        yield "its draft model is another"
    for name in ("seed", *ENGINE_SIZES, "tensor_parallel"):
        if old_plan[name] != new_plan[name]:
            yield f"its {name} is {old_plan[name]}, not {new_plan[name]}"
    if (form := old_plan.get("rows", 1)) != new_plan["rows"]:
        yield f"another version of this program began it: its rows have form {form}, not {new_plan['rows']}"
    for name in VERSIONS:
        if old_plan["versions"].get(name) != new_plan["versions"][name]:
            yield f"it was made with {name} {old_plan['versions'].get(name)}, not {new_plan['versions'][name]}"


def _other_configurations(model: str, old_configs: Sequence[Any], new_configs: Sequence[Any]) -> Iterator[str]:
    old, new = (list(map(tuple, configs)) for configs in (old_configs, new_configs))
    if old == new:
        return
    only_new = [method for method, config in new if (method, config) not in old]
    only_old = [method for method, config in old if (method, config) not in new]
    if not (only_new or only_old):
        yield f"model '{model}' has its configurations in another order"
        return
    extra = [f"lacks one of {name}" for name in only_new[:1]] + [f"has another of {name}" for name in only_old[:1]]
    yield f"model '{model}' has {len(old)} configurations, not {len(new)}, and {' and '.join(extra)}"


def _other_problems(name: str, old_task: Mapping[str, Any], new_task: Mapping[str, Any]) -> Iterator[str]:
    if old_task["problems"] != new_task["problems"]:
        yield f"task '{name}' has {old_task['problems']} problems, not {new_task['problems']}"
    elif old_task["max_tokens"] != new_task["max_tokens"]:
        yield f"the max_tokens of task '{name}' is {old_task['max_tokens']}, not {new_task['max_tokens']}"
    elif old_task != new_task:
        yield f"the problems, prompts or rule of task '{name}' are others"
