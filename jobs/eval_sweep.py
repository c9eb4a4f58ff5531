"""Sweep models x methods x thresholds over tasks on Ray Data: the options, the cluster, and the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.storage import Folder
from jobs.command_line import (
    CLUSTER,
    DATA,
    DECODING,
    ENGINE,
    OUTPUT,
    IsolationText,
    KvMemoryFraction,
    MaxRows,
    NumPages,
    Overwrite,
    Seed,
    TensorParallel,
    command,
    names,
)
from jobs.report_sweep import BEST
from jobs.sweep_subjects import EndpointKeys, Endpoints, Models, Subjects
from jobs.task_options import ExampleFiles, RecipeName, TaskFiles
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.best import By
from mbd_core.evaluation.sweep.parts import Shard, Timing
from mbd_core.evaluation.tasks.benchmarks import TASKS, runs_programs
from mbd_core.evaluation.tasks.recipes import OWN
from mbd_core.tasks.split import Split

if TYPE_CHECKING:
    from mbd_core.evaluation.sweep.executor import Executor
    from mbd_core.evaluation.sweep.run import SweepRun

LIST = "NAME,..."

Tasks = Annotated[str, typer.Option(metavar=LIST, help=f"Tasks: {', '.join(TASKS)}.", rich_help_panel=DATA)]
MethodNames = Annotated[
    str | None,
    typer.Option(
        "--methods",
        metavar=LIST,
        help="Methods to run, among them the rows of Table 4, as table-4/LLaDA2-Mini/math/multi.",
        show_default="single, multi, those of --method",
        rich_help_panel=DECODING,
    ),
]
MethodDefinitions = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME=JSON",
        help="Define a method by its decoding fields; repeatable.",
        rich_help_panel=DECODING,
    ),
]
GridText = Annotated[
    str,
    typer.Option(
        "--grid",
        metavar="FIELD=VALUE,...;...",
        help="Decoding fields and their values, all combined. A field is varied under the methods that it concerns: "
        "buffer_size, tau_add and tau_semi only under those with several slots.",
        rich_help_panel=DECODING,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="New tokens a problem.", show_default="the recipe's, 128 if generated", min=1, rich_help_panel=DECODING
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(help="Problems a task.", show_default="500 generated, all of a file", min=1, rich_help_panel=DATA),
]
TaskSplit = Annotated[Split, typer.Option("--split", help="Split of the generated tasks.", rich_help_panel=DATA)]
ShardText = Annotated[
    str,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Compute the I-th of N shards; jobs/report_sweep.py joins their folders.",
        rich_help_panel=DATA,
    ),
]
Out = Annotated[
    str,
    typer.Option(
        "--out", metavar="DIR|URL", help="Folder to write, or a URL as s3://bucket/path.", rich_help_panel=OUTPUT
    ),
]
TimedProblems = Annotated[
    int,
    typer.Option(
        "--timed",
        help="Problems a task on which each configuration is timed by itself, after the sweep; 0: none. The p99 of "
        "latency takes 100 timed requests, and is a dash below.",
        min=0,
        rich_help_panel=DATA,
    ),
]
Concurrency = Annotated[
    int,
    typer.Option(
        help="Requests under way at an endpoint, and where throughput is timed.", min=1, rich_help_panel=ENGINE
    ),
]
Actors = Annotated[int, typer.Option(help="Engines in parallel, with a CPU a rank.", min=1, rich_help_panel=CLUSTER)]


def run(
    tasks: Tasks,
    out: Out,
    models: Models = None,
    endpoint: Endpoints = None,
    endpoint_key: EndpointKeys = None,
    methods: MethodNames = None,
    method: MethodDefinitions = None,
    grid: GridText = "",
    recipe: RecipeName = OWN.name,
    examples: ExampleFiles = None,
    max_tokens: MaxTokens = None,
    limit: Limit = None,
    seed: Seed = 0,
    split: TaskSplit = "test",
    data: TaskFiles = None,
    shard: ShardText = "1/1",
    timed: TimedProblems = Timing.problems,
    concurrency: Concurrency = Timing.concurrency,
    max_rows: MaxRows = EngineConfig.max_rows,
    num_pages: NumPages = EngineConfig.num_pages,
    kv_memory_fraction: KvMemoryFraction = EngineConfig.kv_memory_fraction,
    actors: Actors = 1,
    tensor_parallel: TensorParallel = 1,
    isolation: IsolationText = "any",
    write_best: Annotated[
        By | None,
        typer.Option(
            help=f"Write each model's best configuration into its generation_config.json: {BEST}",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Sweep models x methods x thresholds over tasks on Ray Data, and report accuracy, TPF, AUP and speed.

    A method has a name (decoding/blocks/methods.py) or is defined by its decoding fields; the grid reaches into
    their parts: --method 'mine={"t2t": {"max_edits": 8}}' --methods t2t,mine --grid "t2t.tau=0.3,0.5;buffer_size=2,4"

    It runs on the cluster of RAY_ADDRESS, which a submitted job has (with an absolute --out), or on one of its own.
    The same command again computes what is missing; --overwrite replaces a finished sweep or another.
    """
    from mbd_core.evaluation.sandbox.processes import describe_isolation
    from mbd_core.evaluation.sweep.best_folder import edit_notes
    from mbd_core.evaluation.sweep.plan import SweepOptions, plan_sweep
    from mbd_core.evaluation.sweep.run import SweepRun

    place = writable_folder(out)
    subjects = Subjects.find(models, endpoint, endpoint_key)
    options = SweepOptions(
        models=list(subjects.fetched.values()),
        tasks=names(tasks, "--tasks"),
        grid=grid,
        methods=None if methods is None else names(methods, "--methods"),
        definitions=method or (),
        data=data or (),
        limit=limit,
        split=split,
        seed=seed,
        recipe=recipe,
        examples=examples or (),
        max_tokens=max_tokens,
        endpoints=subjects.endpoints,
        engine=EngineConfig(max_rows=max_rows, num_pages=num_pages, kv_memory_fraction=kv_memory_fraction),
        tensor_parallel=tensor_parallel,
    )
    sweep = plan_sweep(options)
    edits = edit_notes({name: model_folder(model) for name, model in sweep.models.items()})
    sweep = replace(sweep, notes=[*sweep.notes, *edits])
    if any(runs_programs(problem_set.task) for problem_set in sweep.problem_sets):
        print(f"eval_sweep: programs run, on this machine, under {describe_isolation(isolation)}", file=sys.stderr)
    work = SweepRun.of(sweep, shard=Shard.parse(shard), timing=Timing(problems=timed, concurrency=concurrency))
    isolated = isolation == "required"
    run_work(place, work, subjects, num_actors=actors, isolated=isolated, write_best=write_best, overwrite=overwrite)


def writable_folder(out: str) -> Folder:
    """The folder of `--out`; `ValueError` if it cannot be written."""
    folder = Folder.at(out)
    folder.check_writable()
    return folder


def run_work(
    out: Folder,
    work: SweepRun,
    subjects: Subjects,
    *,
    num_actors: int,
    isolated: bool = False,
    write_best: By | None = None,
    overwrite: bool = False,
) -> None:
    """Check what lies in the folder and what is asked for, compute what is missing, and print the report."""
    from mbd_core.evaluation.report.choice import best_points, check_choice, written_best
    from mbd_core.evaluation.report.summary import write_summary
    from mbd_core.evaluation.sweep.endpoint import EndpointStage
    from mbd_core.evaluation.sweep.folder import FILES, KIND, REPORT, check_sweep_folder

    sweep, record = work.sweep, work.record
    subjects.try_decoding(sweep)
    targets = subjects.model_folders(sweep)
    if write_best is not None:
        check_choice(sweep, write_best, folders=targets, shard=record.shard, timing=record.timing)
    concurrency = record.timing.concurrency

    def start() -> AbstractContextManager[Executor]:
        from actors.evaluation.sweep import ray_executor  # which takes seconds, and bad input none

        return ray_executor(
            sweep, num_engines=num_actors, concurrency=concurrency, urls=subjects.urls, isolated=isolated
        )

    with (
        EndpointStage(sweep.endpoints, subjects.keys, concurrency=concurrency) as stage,
        out.mirrored(KIND, FILES) as mirror,
    ):
        check_sweep_folder(mirror.path, record, overwrite=overwrite)
        print_notes(sweep.notes)
        if not record.parts:
            print_notes([f"shard {record.shard} has none of the sweep's parts, and so no report of its own"])
            return
        summary = work.run(
            mirror.path,
            start,
            stage=stage,
            report=write_summary,
            overwrite=overwrite,
            published=mirror.publish,
            name=str(mirror.target),
        )
        best = [] if write_best is None else best_points([mirror.path], list(targets), write_best)
    print(f"{summary.text}\nThe report is in {out}: report.md, report.html, {REPORT}, plot.png, samples/")
    for point in best:
        folder = targets[point.model]
        assert folder is not None, "check_choice refused it"
        print(written_best(folder, point))


def print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"eval_sweep: note: {note}", file=sys.stderr)


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
