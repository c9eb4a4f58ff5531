"""Sweep models x methods x thresholds over tasks on Ray Data: the options, the cluster, and the report."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.storage import Folder, Mirror
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
from mbd_core.evaluation.sweep.parts import Part, Shard, cut, part_size
from mbd_core.evaluation.sweep.timing import TimedCase, Timing, timed_cases
from mbd_core.evaluation.tasks.benchmarks import TASKS, runs_programs
from mbd_core.evaluation.tasks.recipes import OWN
from mbd_core.tasks.split import Split

if TYPE_CHECKING:
    from actors.evaluation.sweep import EnginePool
    from mbd_core.evaluation.sweep.decoding import ModelRefused
    from mbd_core.evaluation.sweep.endpoint_stage import EndpointStage
    from mbd_core.evaluation.sweep.folder import SweepFolder
    from mbd_core.evaluation.sweep.plan import Sweep
    from mbd_core.evaluation.sweep.record import SweepRecord

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
    if any(runs_programs(found.task) for found in sweep.problem_sets):
        print(f"eval_sweep: programs run, on this machine, under {describe_isolation(isolation)}", file=sys.stderr)
    work = cut_sweep(sweep, shard=Shard.parse(shard), timing=Timing(problems=timed, concurrency=concurrency))
    work = replace(work, isolated=isolation == "required")
    run_work(place, work, subjects, num_actors=actors, write_best=write_best, overwrite=overwrite)


def writable_folder(out: str) -> Folder:
    """The folder of `--out`; `ValueError` if it cannot be written."""
    folder = Folder.at(out)
    folder.check_writable()
    return folder


def run_work(
    out: Folder, work: Work, subjects: Subjects, *, num_actors: int, write_best: By | None, overwrite: bool
) -> None:
    """Check what lies in the folder and what is asked for, compute what is missing, and print the report."""
    from mbd_core.evaluation.report.choice import best_points, check_choice, written_best
    from mbd_core.evaluation.sweep.endpoint_stage import EndpointStage
    from mbd_core.evaluation.sweep.folder import FILES, KIND, REPORT, check_sweep_folder, is_computed

    sweep, record = work.sweep, work.record
    subjects.try_decoding(sweep)
    targets = subjects.model_folders(sweep)
    if write_best is not None:
        check_choice(sweep, write_best, folders=targets, shard=record.shard, timing=record.timing)
    with (
        EndpointStage(sweep.endpoints, subjects.keys, concurrency=record.timing.concurrency) as stage,
        out.mirrored(KIND, FILES) as mirror,
    ):
        check_sweep_folder(mirror.path, record, overwrite=overwrite)
        print_notes(sweep.notes)
        if not record.parts:
            print_notes([f"shard {record.shard} has none of the sweep's parts, and so no report of its own"])
            return
        if is_computed(mirror.path, record, overwrite=overwrite):
            text = report_computed(mirror, record, overwrite=overwrite)
        else:
            text = run_on_cluster(
                work, mirror, stage=stage, urls=subjects.urls, num_actors=num_actors, overwrite=overwrite
            )
        best = [] if write_best is None else best_points([mirror.path], list(targets), write_best)
    print(f"{text}\nThe report is in {out}: report.md, report.html, {REPORT}, plot.png, samples/")
    for point in best:
        folder = targets[point.model]
        assert folder is not None, "check_choice refused it"
        print(written_best(folder, point))


def print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"eval_sweep: note: {note}", file=sys.stderr)


@dataclass(frozen=True)
class Work:
    """All that is to be done for a sweep, and its record; `isolated`: programs are graded behind walls only."""

    sweep: Sweep
    record: SweepRecord
    parts: Sequence[Part]
    cases: Sequence[TimedCase]
    isolated: bool = False


def cut_sweep(sweep: Sweep, *, shard: Shard, timing: Timing) -> Work:
    """A sweep in parts, the same with however many actors."""
    from mbd_core.evaluation.sweep.record import record_of, timed_rows

    rows = list(sweep.rows())
    parts = cut(rows, rows_per_part=part_size(len(rows), max_rows=sweep.engine.max_rows))
    record = record_of(sweep, rows, parts, shard=shard, timing=timing)
    return Work(sweep, record, parts, timed_cases(timed_rows(sweep, rows), timing))


def report_computed(mirror: Mirror, record: SweepRecord, *, overwrite: bool) -> str:
    """Write the report of a sweep of which all is there, without a cluster; the report as Markdown."""
    from mbd_core.evaluation.report.summary import write_summary
    from mbd_core.evaluation.sweep.folder import FAILURE, SweepFolder

    with SweepFolder.claim(mirror.path, record, overwrite=overwrite, published=mirror.publish) as folder:
        print(f"eval_sweep: {len(record.parts)} of {len(record.parts)} parts are there", file=sys.stderr)
        folder.remove(FAILURE)  # of an earlier run
        return write_summary(folder).text


def run_on_cluster(
    work: Work, mirror: Mirror, *, stage: EndpointStage, urls: Mapping[str, str], num_actors: int, overwrite: bool
) -> str:
    """Decode, grade, time and write what is missing; the report as Markdown. Ray is imported here: it takes seconds,
    and bad input none.

    Raises `RuntimeError`, one sentence, if the cluster fails; the samples and the traceback then lie in the folder.
    A model that cannot be loaded to be timed is such a sentence too, after the report.
    """
    import ray

    from actors.evaluation.sweep import compute_parts, plan_pool
    from cluster.failures import CLUSTER_FAILURES, failure_text, reason
    from cluster.local import connect
    from mbd_core.evaluation.report.summary import machine_text, sweep_settings, write_summary
    from mbd_core.evaluation.sweep.folder import FAILURE, SweepFolder
    from mbd_core.evaluation.sweep.samples import collect_samples

    sweep = work.sweep
    is_ours = connect(num_cpus=max(4, num_actors * sweep.tensor_parallel + 2), worker_logs=False)
    try:
        pool = plan_pool(sweep, num_engines=num_actors)
        on_gpu = pool.topology.num_gpus > 0
        settings = sweep_settings(
            sweep, engine=pool.engine, num_actors=num_actors, num_cpus=pool.cluster_cpus, on_gpu=on_gpu
        )
        record = replace(work.record, settings=settings)
        with SweepFolder.claim(mirror.path, record, overwrite=overwrite, published=mirror.publish) as folder:
            folder.note_machine(machine_text(pool.cluster_cpus, ranks=sweep.tensor_parallel))
            folder.remove(FAILURE)  # of an earlier run
            own, missing = [work.parts[number] for number in record.parts], set(folder.missing())
            if len(missing) < len(record.parts):
                there = f"{len(record.parts) - len(missing)} of {len(record.parts)} parts are there"
                print(f"eval_sweep: {there}", file=sys.stderr)
            refused = None
            try:
                graded = compute_parts(own, missing, sweep, pool, stage=stage, urls=urls, isolated=work.isolated)
                collect_samples(graded, folder, own, num_engines=num_actors)
                summary = write_summary(folder)  # it is there whatever becomes of the times
                if folder.missing_cases():
                    refused = time_missing(work, folder, pool, urls=urls)
                    summary = write_summary(folder)
            except CLUSTER_FAILURES as error:
                folder.write_files({FAILURE: failure_text(error).encode()})
                raise RuntimeError(
                    f"the sweep failed: {reason(error)}; what was computed lies in {mirror.target}, with the "
                    f"traceback in {FAILURE}; the same command computes the rest"
                ) from error
            if refused is not None:
                raise RuntimeError(f"not all could be timed: {refused}; the report is in {mirror.target}")
            return summary.text
    finally:
        if is_ours:
            ray.shutdown()


def time_missing(work: Work, folder: SweepFolder, pool: EnginePool, *, urls: Mapping[str, str]) -> ModelRefused | None:
    """Time the cases that are missing, without what killed an engine; the refusal of a model that cannot be loaded."""
    from actors.evaluation.timing import time_cases
    from mbd_core.evaluation.sweep.decoding import ModelRefused
    from mbd_core.evaluation.sweep.samples import collect_times, dead_samples

    left, dead = set(folder.missing_cases()), dead_samples(folder.path)
    cases = [case for case in work.cases if case.number in left]
    concurrency = work.record.timing.concurrency
    try:
        timed = time_cases(cases, work.sweep, pool, concurrency=concurrency, left_out=dead, urls=urls)
        collect_times(timed, folder, cases)
    except ModelRefused as error:
        return error
    return None


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
