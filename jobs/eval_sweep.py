"""Sweep models x methods x thresholds over tasks on Ray Data: the options, the cluster, and the report."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from cluster.storage import Folder, Mirror, fetch_model
from jobs.command_line import (
    CLUSTER,
    DATA,
    DECODING,
    ENGINE,
    MODEL,
    OUTPUT,
    KvMemoryFraction,
    MaxRows,
    NumPages,
    Overwrite,
    Seed,
    TensorParallel,
    command,
    names,
)
from jobs.task_options import ExampleFiles, RecipeName, TaskFiles
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.evaluation.decode_stage import ModelRefused
from mbd_core.evaluation.evaluation_recipes import OWN
from mbd_core.evaluation.sweep_folder import FAILURE, FILES, KIND, REPORT, SweepFolder, check_sweep_folder
from mbd_core.evaluation.sweep_parts import Part, Shard, cut, part_size
from mbd_core.evaluation.sweep_plan import Sweep, SweepOptions, plan_sweep
from mbd_core.evaluation.sweep_record import SweepRecord, record_of
from mbd_core.evaluation.sweep_samples import collect_samples, collect_times
from mbd_core.evaluation.sweep_settings import machine_text, sweep_settings
from mbd_core.evaluation.sweep_summary import write_summary
from mbd_core.evaluation.tasks import TASKS
from mbd_core.evaluation.timed_cases import TimedCase, Timing, timed_cases
from mbd_core.tasks.split import Split

LIST = "NAME,..."

Models = Annotated[
    str, typer.Option(metavar=LIST, help="Shipped models' names, model folders, or their URLs.", rich_help_panel=MODEL)
]
Tasks = Annotated[str, typer.Option(metavar=LIST, help=f"Tasks: {', '.join(TASKS)}.", rich_help_panel=DATA)]
MethodNames = Annotated[
    str | None,
    typer.Option(
        "--methods",
        metavar=LIST,
        help="Methods to run.",
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
        help="Problems a task on which each configuration is timed by itself, after the sweep; 0: none.",
        min=0,
        rich_help_panel=DATA,
    ),
]
Concurrency = Annotated[
    int, typer.Option(help="Requests under way where throughput is timed.", min=1, rich_help_panel=ENGINE)
]
Actors = Annotated[int, typer.Option(help="Engines in parallel, with a CPU a rank.", min=1, rich_help_panel=CLUSTER)]

WRITTEN = f"report.md, report.html, {REPORT}, plot.png, samples/"


def run(
    models: Models,
    tasks: Tasks,
    out: Out,
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
    overwrite: Overwrite = False,
) -> None:
    """Sweep models x methods x thresholds over tasks on Ray Data, and report accuracy, TPF, AUP and speed.

    A method has a name (mbd_core/decoding/methods.py) or is defined by its decoding fields, and the grid reaches into
    their parts: --method 'mine={"t2t": {"max_edits": 8}}' --methods t2t,mine --grid "t2t.tau=0.3,0.5;buffer_size=2,4"

    The sweep runs on the cluster of RAY_ADDRESS, which a submitted job has, or on a local one of its own; a submitted
    job needs an absolute --out. It writes samples/*.parquet (one row a sample) as they come, times the configurations
    one by one (--timed), and writes report.md, report.html, report.json and plot.png. The same command again computes
    what is missing; --overwrite replaces a finished sweep or another.
    """
    out_folder, part_of = Folder.at(out), Shard.parse(shard)
    out_folder.check_writable()
    fetched = {model: fetch_model(model) for model in names(models, "--models")}
    sweep = plan_sweep(
        SweepOptions(
            models=list(fetched.values()),
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
            engine=EngineConfig(max_rows=max_rows, num_pages=num_pages, kv_memory_fraction=kv_memory_fraction),
            tensor_parallel=tensor_parallel,
        )
    )
    urls = {path: model for model, path in fetched.items() if path != model}
    timing = Timing(problems=timed, concurrency=concurrency)
    text = run_in(out_folder, sweep, shard=part_of, timing=timing, urls=urls, num_actors=actors, overwrite=overwrite)
    if text is not None:
        print(f"{text}\nThe report is in {out_folder}: {WRITTEN}")


def run_in(
    out: Folder,
    sweep: Sweep,
    *,
    shard: Shard,
    timing: Timing,
    urls: Mapping[str, str],
    num_actors: int,
    overwrite: bool,
) -> str | None:
    """Check what lies in the folder, and compute what is missing; the report as Markdown, `None` for a shard without
    parts."""
    with out.mirrored(KIND, FILES) as mirror:
        work = cut_sweep(sweep, shard=shard, timing=timing)
        check_sweep_folder(mirror.path, work.record, overwrite=overwrite)
        print_notes(sweep.notes)
        if not work.record.parts:
            print_notes([f"shard {shard} has none of the sweep's parts, and so no report of its own"])
        return run_on_cluster(sweep, work, mirror, urls=urls, num_actors=num_actors, overwrite=overwrite)


def print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"eval_sweep: note: {note}", file=sys.stderr)


@dataclass(frozen=True)
class Work:
    """All that is to be done for a sweep, and its record."""

    record: SweepRecord
    parts: Sequence[Part]
    cases: Sequence[TimedCase]


def cut_sweep(sweep: Sweep, *, shard: Shard, timing: Timing) -> Work:
    """A sweep in parts, the same with however many actors."""
    rows = list(sweep.rows())
    parts = cut(rows, rows_per_part=part_size(len(rows), max_rows=sweep.engine.max_rows))
    return Work(record_of(sweep, rows, parts, shard=shard, timing=timing), parts, timed_cases(rows, timing))


def run_on_cluster(
    sweep: Sweep, work: Work, mirror: Mirror, *, urls: Mapping[str, str], num_actors: int, overwrite: bool
) -> str | None:
    """Decode, grade, time and write what is missing; the report as Markdown. Ray is imported here: it takes seconds,
    and bad input none.

    Raises `RuntimeError`, one sentence, if the cluster fails; the samples and the traceback then lie in the folder.
    A model that cannot be loaded to be timed is such a sentence too, after the report.
    """
    import ray

    from actors.evaluation import plan_pool, run_parts
    from actors.timing import time_cases
    from cluster.failures import CLUSTER_FAILURES, failure_text, reason
    from cluster.local import connect

    is_ours = connect(num_cpus=max(4, num_actors * sweep.tensor_parallel + 2), worker_logs=False)
    try:
        pool = plan_pool(sweep, num_engines=num_actors)
        settings = sweep_settings(sweep, engine=pool.engine, num_actors=num_actors, num_cpus=pool.cluster_cpus)
        record = replace(work.record, settings=settings)
        with SweepFolder.claim(mirror.path, record, overwrite=overwrite, published=mirror.publish) as folder:
            folder.note_machine(machine_text(pool.cluster_cpus, ranks=sweep.tensor_parallel))
            folder.remove(FAILURE)  # of an earlier run
            missing = [work.parts[number] for number in folder.missing()]
            if len(missing) < len(record.parts):
                there = f"{len(record.parts) - len(missing)} of {len(record.parts)} parts are there"
                print(f"eval_sweep: {there}", file=sys.stderr)
            refused = None
            try:
                own = [work.parts[number] for number in record.parts]
                collect_samples(run_parts(missing, sweep, pool, urls=urls), folder, own)
                write_report(folder)  # it is there whatever becomes of the times
                left = set(folder.missing_cases())
                cases = [case for case in work.cases if case.number in left]
                timed = time_cases(cases, sweep, pool, concurrency=record.timing.concurrency, urls=urls)
                try:
                    collect_times(timed, folder, cases)
                except ModelRefused as error:
                    refused = error
            except CLUSTER_FAILURES as error:
                folder.write_files({FAILURE: failure_text(error).encode()})
                raise RuntimeError(
                    f"the sweep failed: {reason(error)}; what was computed lies in {mirror.target}, with the "
                    f"traceback in {FAILURE}; the same command computes the rest"
                ) from error
            text = write_report(folder)
            if refused is not None:
                raise RuntimeError(f"not all could be timed: {refused}; the report is in {mirror.target}")
            return text
    finally:
        if is_ours:
            ray.shutdown()


def write_report(folder: SweepFolder) -> str | None:
    """Write the report of what the folder holds; it as Markdown, `None` for a shard without parts."""
    return write_summary(folder).text if folder.state.record.parts else None


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
