"""The study on ledger-mini: a grid of training runs and sweeps on Ray, and a report from their rows alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.storage import Folder, fetch_model
from jobs.command_line import DATA, DECODING, MODEL, OUTPUT, command
from jobs.eval_sweep import Subjects, run_work
from jobs.train_multitf import train_on_cluster
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.parts import SweepShard, Timing
from mbd_core.multitf.recipes.shipped import LEDGER_BD
from mbd_core.options import CLUSTER, names, numbers
from research.ledger.plan import Experiment

if TYPE_CHECKING:
    from actors.training.run import TrainingRun
    from mbd_core.multitf.recipes.recipe import TrainingRecipe
    from research.ledger.plan import StudyPlan

MAX_ROWS = 64

Out = Annotated[
    str, typer.Option(metavar="DIR", help="Folder to write, which every node reaches.", rich_help_panel=OUTPUT)
]
What = Annotated[Experiment, typer.Argument(help="What is studied; each needs the rows of those before it.")]
Base = Annotated[
    str,
    typer.Option(help="The model that all runs go on from: a folder, or a shipped model.", rich_help_panel=MODEL),
]
Seeds = Annotated[str, typer.Option(metavar="S,...", help="Training seeds.", rich_help_panel=DATA)]
Problems = Annotated[int, typer.Option(min=2, help="Unseen problems a seed.", rich_help_panel=DATA)]
Taus = Annotated[str, typer.Option(metavar="TAU,...", help="Thresholds tau_m2t.", rich_help_panel=DECODING)]
Buffers = Annotated[str, typer.Option(metavar="N,...", help="Slots of MultiBD.", rich_help_panel=DECODING)]
Steps = Annotated[
    int | None,
    typer.Option(min=1, help="Updates of a run.", show_default="the recipe's", rich_help_panel=MODEL),
]
Traced = Annotated[int, typer.Option(min=4, help="Problems that are traced for alignment, half of them for its fit.")]
Workers = Annotated[int, typer.Option(min=1, help="Training processes of a run.", rich_help_panel=CLUSTER)]
AtOnce = Annotated[
    int,
    typer.Option(
        min=1,
        help="Runs that are trained at once; refused where the cluster has no room for all their workers.",
        rich_help_panel=CLUSTER,
    ),
]
Actors = Annotated[int, typer.Option(min=1, help="Engines of a sweep.", rich_help_panel=CLUSTER)]
ReportOnly = Annotated[
    bool, typer.Option("--report-only", help="Write the report again, from the rows alone.", rich_help_panel=OUTPUT)
]


def run(
    experiment: What,
    *,
    out: Out,
    base: Base = LEDGER_BD.name,
    seeds: Seeds = "0,1,2",
    problems: Problems = 2000,
    taus: Taus = "0.8,0.9,0.95",
    buffers: Buffers = "2,4",
    steps: Steps = None,
    traced: Traced = 512,
    workers: Workers = 2,
    at_once: AtOnce = 1,
    actors: Actors = 2,
    report_only: ReportOnly = False,
) -> None:
    """Train an experiment's recipes with several seeds from one base, evaluate them, and judge the papers' claims.

    ordering: the base, the control and MBD (Table 1 in small). ablation: the rows of Table 2b. alignment: distances of
    each row's training states from inference (Figure 2), and noise that is fitted to traces as one row more.
    thresholds: the base under SingleBD at low thresholds, beside MBD.
    The same command goes on with what is missing; experiments of one --out share their trained models.
    """
    from actors.training.run import named_base
    from mbd_core.checkpoint.folder import model_digest, read_folder
    from research.ledger.distances import measure_inference
    from research.ledger.plan import StudyPlan, check_earlier, claim
    from research.ledger.report import report

    if report_only:
        print(report(Path(out), experiment))
        return
    place = checked_out(out)
    base = named_base(base)
    folder = read_folder(model_folder(fetch_model(base))).path.resolve()
    plan = StudyPlan(
        base=model_digest(folder),
        seeds=tuple(int(seed) for seed in checked_seeds(seeds)),
        problems=problems,
        taus=thresholds(taus),
        buffers=tuple(numbers(buffers, "--buffers")),
        steps=steps,
    )
    check_earlier(place, experiment)
    claim(place, plan)
    noise = measure_inference(place, folder, num_problems=traced) if experiment == "alignment" else None
    compute(place, plan, experiment, folder, base=base, noise=noise, workers=workers, at_once=at_once, actors=actors)
    print(report(place, experiment))


def checked_out(text: str) -> Path:
    """The study's folder; `ValueError` for a URL, and for a relative path in a submitted job."""
    folder = Folder.at(text)
    if folder.is_remote:
        raise ValueError(f"--out {text} is a URL, which a study does not write; give a folder that every node reaches")
    return folder.path


def checked_seeds(text: str) -> list[str]:
    """The seeds; `ValueError` names the one that is no whole number."""
    for name in names(text, "--seeds"):
        if not name.isdecimal():
            raise ValueError(f"--seeds {name} must be a whole number of at least 0")
    return names(text, "--seeds")


def thresholds(text: str) -> tuple[float, ...]:
    """The thresholds; `ValueError` names the one that is no number."""
    try:
        return tuple(float(name) for name in names(text, "--taus"))
    except ValueError as error:
        raise ValueError(f"--taus {text}: {error}") from None


def compute(
    out: Path,
    plan: StudyPlan,
    experiment: Experiment,
    folder: Path,
    *,
    base: str,
    noise: Path | None,
    workers: int,
    at_once: int,
    actors: int,
) -> None:
    """Train and evaluate what is missing, on one cluster, and write the experiment's rows."""
    from actors.training.run import check_run
    from mbd_core.multitf.run.start import StartingPoint
    from research.ledger.plan import ROWS, missing_models, swept_models
    from research.ledger.rows import sweep_rows, write_rows

    runs = [
        training(out, recipe, seed, plan, base=base, folder=folder, noise=noise, workers=workers)
        for recipe, seed in missing_models(out, plan, experiment)
    ]
    for one in runs:
        check_run(one, resume=one.folder.exists())
        StartingPoint.read(one.recipe, fetch=fetch_model)
    from cluster.local import connect  # Ray takes seconds to import: bad input is refused before that

    at_once = min(at_once, len(runs))
    is_ours = connect(num_cpus=max(4, at_once * workers + 1, actors + 2), worker_logs=False)
    try:
        train_all(runs, at_once=at_once)
        for seed in plan.seeds:
            evaluate(out, plan, experiment, seed, folder, actors=actors)
    finally:
        if is_ours:
            import ray

            ray.shutdown()
    tables = []
    for seed in plan.seeds:
        models = {path.name: recipe for path, recipe in swept_models(out, experiment, seed, folder).items()}
        tables.append(sweep_rows(sweep_folder(out, experiment, seed), models))
    write_rows(out / experiment / ROWS, tables)


def train_all(runs: list[TrainingRun], *, at_once: int) -> None:
    """Train runs of one size on the connected cluster, `at_once` of them, at most all, at a time.

    Each is driven by a task of its own on this node, as a job of its own would be. Raises `ValueError` if `at_once` of
    them find no room beside each other. After a run that failed none is begun; once those that were have ended,
    `RuntimeError` names all that failed. A task that is lost is such a failure: the same command goes on with its run.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from actors.training.worker import plan_run
    from cluster.failures import task_sentence
    from mbd_core.multitf.run.start import StartingPoint

    if not runs:
        return
    try:
        plan_run(runs[0], StartingPoint.read(runs[0].recipe, fetch=fetch_model), runs=at_once)
    except ValueError as error:
        raise type(error)(f"--at-once {at_once}: {error}") from None
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    drive = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=here)(train_one)
    waiting, running, failures, done = list(reversed(runs)), dict[ray.ObjectRef[None], str](), list[str](), 0
    while running or (waiting and not failures):
        while waiting and not failures and len(running) < at_once:
            one = waiting.pop()
            running[drive.remote(one)] = one.name
            print(f"ledger: begun: {one.name}", file=sys.stderr)
        ended = ray.wait(list(running))[0][0]
        name = running.pop(ended)
        try:
            ray.get(ended)
        except ray.exceptions.RayError as error:
            failures.append(f"{name}: {task_sentence(error)}")
        else:
            done += 1
            print(f"ledger: trained: {name} ({done} of {len(runs)})", file=sys.stderr)
    if failures:
        raise RuntimeError("; ".join(failures))


def train_one(one: TrainingRun) -> None:
    """A run from its beginning or its newest checkpoint."""
    from mbd_core.multitf.run.start import StartingPoint

    start = StartingPoint.read(one.recipe, fetch=fetch_model)
    train_on_cluster(one, start, resume=one.folder.exists(), go_on="the same command")


def training(
    out: Path,
    recipe: TrainingRecipe,
    seed: int,
    plan: StudyPlan,
    *,
    base: str,
    folder: Path,
    noise: Path | None,
    workers: int,
) -> TrainingRun:
    """A run of the study from `base`, which lies in `folder`; one that was begun is gone on with."""
    from actors.training.run import TrainingRun
    from mbd_core.checkpoint.config import load_config
    from research.ledger.plan import FITTED, model_path, run_name, seeded

    measured, size = noise if recipe.name == FITTED else None, load_config(folder).block_size
    return TrainingRun(
        recipe=seeded(recipe, seed, base=base, block_size=size, steps=plan.steps, noise=measured),
        name=run_name(recipe.name, seed),
        storage=Folder.at(str(out / "runs")),
        out=Folder.at(str(model_path(out, recipe, seed))),
        num_workers=workers,
        log_targets=(),
    )


def sweep_folder(out: Path, experiment: Experiment, seed: int) -> Path:
    return out / experiment / "sweeps" / f"seed-{seed}"


def evaluate(out: Path, plan: StudyPlan, experiment: Experiment, seed: int, folder: Path, *, actors: int) -> None:
    """The sweep of a seed, if it is not finished: SingleBD and MultiBD of its models on its problems."""
    from mbd_core.evaluation.sweep.folder import FolderState, is_finished
    from mbd_core.evaluation.sweep.options import SweepOptions
    from mbd_core.evaluation.sweep.plan import plan_sweep
    from mbd_core.evaluation.sweep.run import SweepRun
    from mbd_core.multitf.recipes.shipped import LEDGER_TASK
    from research.ledger.plan import swept_models

    place = sweep_folder(out, experiment, seed)
    state = FolderState.load(place)
    if state is not None and is_finished(place, state):
        return
    models = [str(path) for path in swept_models(out, experiment, seed, folder)]
    methods, grid = plan.decoded(experiment)
    subjects = Subjects.find(models, (), ())
    options = SweepOptions(
        models=list(subjects.fetched.values()),
        tasks=list(LEDGER_TASK),
        methods=methods,
        grid=grid,
        limit=plan.problems,
        seed=seed,
        engine=EngineConfig(max_rows=MAX_ROWS),
    )
    work = SweepRun.of(plan_sweep(options), shard=SweepShard(), timing=Timing(problems=0))
    run_work(Folder.at(str(place)), work, subjects, num_actors=actors)


main = command(run, "python -m research ledger")
