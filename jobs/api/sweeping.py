"""`sweep(models, tasks, grid)` evaluates models x methods x thresholds over tasks.

The command `mbd sweep` calls it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

from jobs.api.call_options import IsolationOption, Say, folder_of, options_from, silent
from jobs.api.rows import names_of
from jobs.api.sweep_work import Subjects, SweepResult, run_work
from mbd_core.batch.timed_cases import Timing
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.choice.best import BEST, By
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.kinds.harness import HARNESS_PREFIX
from mbd_core.fields import CLUSTER, DATA, ENGINE, MODEL, OUTPUT, Flag, Ge, Texts, configuration
from mbd_core.storage.folder import Folder

ENGINE_FIELDS = ("max_rows", "num_pages", "kv_memory_fraction", "dtype", "url_weights", "draft_model")


@configuration(panel=MODEL)
class SweepWork:
    """Options beside models, methods and tasks: endpoints, shards, timing, parallel work, and output."""

    endpoint: Annotated[Texts, Flag(metavar="NAME=URL[#MODEL]")] = ()
    """An OpenAI endpoint that is asked instead of an engine, as mine=http://host:8000/v1; repeatable."""
    endpoint_key: Annotated[Texts, Flag(metavar="NAME=VARIABLE")] = ()
    """The environment variable that holds an endpoint's API key; repeatable."""
    shard: Annotated[str, Flag(panel=DATA, metavar="I/N")] = "1/1"
    """Compute the I-th of N shards; jobs/report_sweep.py joins their folders."""
    timed: Annotated[int, Ge(0), Flag(panel=DATA)] = Timing.problems
    """Problems of each task on which each configuration is timed alone, after the sweep; 0: none. The p99 of latency
    needs 100 timed requests; with fewer it is a dash."""
    concurrency: Annotated[int, Ge(1), Flag(panel=ENGINE)] = Timing.concurrency
    """Concurrent requests at an endpoint, and in the timing of throughput."""
    actors: Annotated[int, Ge(1), Flag(panel=CLUSTER)] = 1
    """Engines in parallel; each rank takes a CPU."""
    isolation: IsolationOption = "any"
    write_best: Annotated[
        By | None,
        Flag(help=f"Write each model's best configuration into its generation_config.json: {BEST}", panel=OUTPUT),
    ] = None
    overwrite: Annotated[bool, Flag(panel=OUTPUT)] = False
    """Replace a folder that this command wrote before."""


class SweepKeywords(TypedDict, total=False):
    """The fields of `SweepOptions`, `SweepWork` and the engine, for editors."""

    recipe: str
    examples: Sequence[str] | Mapping[str, str | Path]
    data: str | Path | Sequence[str] | Mapping[str, str | Path]
    methods: str | Sequence[str]
    definitions: Sequence[str] | Mapping[str, Mapping[str, Any]]
    max_tokens: int
    samples: int
    temperature: float
    top_p: float
    mc_num: int
    limit: int
    seed: int
    split: str
    include_path: str | Path
    form: str
    tensor_parallel: int
    endpoint: str | Sequence[str]
    endpoint_key: str | Sequence[str]
    shard: str
    timed: int
    concurrency: int
    actors: int
    isolation: str
    write_best: By
    overwrite: bool
    max_rows: int
    num_pages: int
    kv_memory_fraction: float
    dtype: Literal["auto", "float32", "bfloat16", "int8"]


def sweep(
    models: str | Sequence[str | Path],
    tasks: str | Sequence[str],
    grid: str | Mapping[str, Any] = "",
    *,
    out: str | Path | None = None,
    cluster: str | None = None,
    say: Say = silent,
    **options: Unpack[SweepKeywords],
) -> SweepResult:
    """Sweep models x methods x thresholds over tasks, and report accuracy, TPF, AUP and speed.

    models   shipped models' names, model folders, or their URLs; may be empty with an `endpoint`
    grid     decoding fields and their values, all combined: {"tau_m2t": [0.7, 0.9], "buffer_size": [2, 4]}, or the
             text that the command takes
    out      the folder of samples and report; default: a new temporary folder. The same call again computes only
             the missing rows
    cluster  a Ray cluster: its address, `auto` for the cluster on this machine, `local` for a new cluster, or
             `RAY_ADDRESS` for the cluster that the variable names. Default: one engine in this process
    say      a function that is called with each remark
    options  the options of the command `mbd sweep`, with `_` for `-`

    Raises `ValueError`, in the command's words, for options that are not possible, and `RuntimeError` if the sweep
    fails.
    """
    values: dict[str, Any] = dict(options)
    engine_values = {name: values.pop(name) for name in ENGINE_FIELDS if name in values}
    own_values = {name: values.pop(name) for name in SweepWork.__dataclass_fields__ if name in values}
    for name in ("endpoint", "endpoint_key"):
        if isinstance(own_values.get(name), str):
            own_values[name] = [own_values[name]]
    for name in ("data", "examples"):
        values[name] = _pairs(values.get(name, ()))
    if isinstance(values.get("definitions"), Mapping):
        values["definitions"] = [f"{name}={json.dumps(fields)}" for name, fields in values["definitions"].items()]
    if values.get("methods") is not None:
        values["methods"] = names_of(values["methods"], "methods")
    values |= {"models": names_of(models, "models"), "tasks": names_of(tasks, "tasks"), "grid": _grid_text(grid)}
    with folder_of(out, prefix="mbd-sweep-") as place:
        return sweep_chosen(
            options_from(SweepOptions, values),
            options_from(EngineConfig, engine_values),
            options_from(SweepWork, own_values),
            place=place,
            cluster=cluster,
            say=say,
        )


def sweep_chosen(
    options: SweepOptions, engine: EngineConfig, own: SweepWork, *, place: Folder, cluster: str | None, say: Say
) -> SweepResult:
    """`sweep`, with options that are built already."""
    from mbd_core.evaluation.sandbox.processes import describe_isolation
    from mbd_core.evaluation.sweep.choice.best_folder import edit_notes
    from mbd_core.evaluation.sweep.loading import load_inputs
    from mbd_core.evaluation.sweep.plan import plan_sweep
    from mbd_core.evaluation.sweep.run import SweepRun
    from mbd_core.serving.tokens.draft_folder import check_draft_folder, read_draft

    if cluster is None and own.actors > 1:
        raise ValueError(f"actors={own.actors} engines need a cluster: name one, or leave actors out")
    _check_meaning(options, engine, own)
    place.check_writable()
    sampling = Sampling(temperature=options.temperature, top_p=options.top_p)
    subjects = Subjects.find(options.models, own.endpoint, own.endpoint_key, sampling, url_weights=engine.url_weights)
    models = tuple(subjects.fetched.values())
    options = replace(options, models=models, endpoints=tuple(subjects.endpoints), engine=engine)
    inputs, draft = load_inputs(options), read_draft(engine)
    for model in inputs.models:
        if draft is not None:
            check_draft_folder(model.contents, draft, engine, tensor_parallel=options.tensor_parallel)
    planned = plan_sweep(inputs)
    edits = edit_notes({name: model_folder(model) for name, model in planned.models.items()})
    planned = replace(planned, notes=[*planned.notes, *edits])
    if any(task.task.runs_programs for task in planned.tasks):
        say(f"programs run, on this machine, under {describe_isolation(own.isolation)}")
    timing = Timing(problems=own.timed, concurrency=own.concurrency)
    work = SweepRun.of(planned, shard=SweepShard.parse(own.shard), timing=timing)
    return run_work(
        place,
        work,
        subjects,
        num_actors=own.actors,
        cluster=cluster,
        isolated=own.isolation == "required",
        write_best=own.write_best,
        overwrite=own.overwrite,
        say=say,
    )


def _check_meaning(options: SweepOptions, engine: EngineConfig, own: SweepWork) -> None:
    """Raises `ValueError` for an option that is not at its default and that nothing in the sweep takes."""
    own_tasks = [name for name in options.tasks if not name.startswith(HARNESS_PREFIX)]
    unused: list[tuple[Any, str, str]] = []
    if own.endpoint and not options.models:
        unused = [(engine, name, "without --models") for name in ENGINE_FIELDS if name != "max_rows"]  # of a part
        unused += [(options, "tensor_parallel", "without --models"), (own, "actors", "without --models")]
    if len(own_tasks) == len(options.tasks):
        unused += [(options, name, "without a task harness:NAME") for name in ("include_path", "form")]
    if not any(find_task(name).generate for name in own_tasks):
        unused.append((options, "split", "without a generated task"))
    if not options.temperature:
        unused.append((options, "top_p", "at --temperature 0, where nothing is drawn"))
    for owner, name, where in unused:
        if getattr(owner, name) != getattr(type(owner), name):
            option = name.removesuffix("_path").replace("_", "-")
            raise ValueError(f"--{option} has no meaning {where}; leave it out")


def _pairs(value: Any) -> Any:
    """`data` and `examples` in the command's form: TASK=PATH, or a path alone."""
    if isinstance(value, Mapping):
        return [f"{task}={os.fspath(path)}" for task, path in value.items()]
    return [os.fspath(value)] if isinstance(value, str | Path) else value


def _grid_text(grid: str | Mapping[str, Any]) -> str:
    """A grid in the command's form."""
    if not isinstance(grid, Mapping):
        return grid
    values = {name: value if isinstance(value, list | tuple) else [value] for name, value in grid.items()}
    return ";".join(f"{name}={','.join(map(_value_text, each))}" for name, each in values.items())


def _value_text(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
