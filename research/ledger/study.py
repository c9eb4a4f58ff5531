"""The study on ledger-mini: a grid of training runs and sweeps on Ray, and a report made only from their rows."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jobs.api.call_options import OF_VARIABLE
from jobs.api.sweep_work import Subjects, run_work
from jobs.api.training import train_on_cluster
from mbd_core.batch.timed_cases import Timing
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.command_line import command, refuse_given
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.fields import CLUSTER, DATA, MODEL, OUTPUT, Flag, Ge
from mbd_core.files import check_writable
from mbd_core.multitf.recipes.shipped import LEDGER_BD
from mbd_core.storage.folder import Folder
from mbd_core.storage.models import fetch_model
from research.ledger.plan import (
    FITTED,
    ROWS,
    TRAINED_RECIPES,
    Experiment,
    StudyPlan,
    StudySize,
    check_earlier,
    claim,
    missing_models,
    model_path,
    run_name,
    seeded,
    swept_models,
)

if TYPE_CHECKING:
    from actors.training.run import TrainingRun
    from mbd_core.multitf.recipes.recipe import TrainingRecipe

MAX_ROWS = 64


def run(
    experiment: Annotated[
        Experiment, Flag("The experiment; each needs the rows of the experiments before it.", positional=True)
    ],
    *,
    out: Annotated[str, Flag("Folder to write, which every node reaches.", OUTPUT, metavar="DIR")],
    base: Annotated[
        str, Flag("The model that all runs go on from: a folder, or a shipped model.", MODEL)
    ] = LEDGER_BD.name,
    size: StudySize,
    traced: Annotated[
        int, Ge(4), Flag("Problems that are traced for alignment, half of them for its fit.", DATA)
    ] = 512,
    workers: Annotated[int, Ge(1), Flag("Training processes of a run.", CLUSTER)] = 2,
    at_once: Annotated[
        int,
        Ge(1),
        Flag("Runs that are trained at once; refused where the cluster has no room for all their workers.", CLUSTER),
    ] = 1,
    actors: Annotated[int, Ge(1), Flag("Engines of a sweep.", CLUSTER)] = 2,
    report_only: Annotated[bool, Flag("Write the report again, from the rows alone.", OUTPUT)] = False,
) -> None:
    """Train an experiment's recipes with several seeds from one base, evaluate them, and judge the papers' claims.

    ordering: the base, the control and MBD (Table 1 in small). ablation: the rows of Table 2b. alignment: distances of
    each row's training states from inference (Figure 2), and one more row with noise that is fitted to traces.
    thresholds: the base under SingleBD at low thresholds, beside MBD.

    The same command computes what is missing. Experiments of one --out share their trained models.
    """
    from actors.training.run import named_base
    from mbd_core.checkpoint.folder import read_folder
    from mbd_core.checkpoint.model_digest import model_digest
    from research.ledger.distances import measure_inference
    from research.ledger.report import report

    parallel = {"workers": workers, "at_once": at_once}
    if report_only:
        refuse_given(run, "with --report-only", base=base, traced=traced, actors=actors, **parallel, **vars(size))
        print(report(Path(out), experiment))
        return
    if experiment != "alignment":
        refuse_given(run, f"in {experiment}, where nothing is traced", traced=traced)
    if not TRAINED_RECIPES[experiment]:
        refuse_given(run, f"in {experiment}, where nothing is trained", **parallel)
    place = checked_out(out)
    base = named_base(base)
    folder = read_folder(model_folder(fetch_model(base))).path.resolve()
    size = replace(size, taus=tuple(dict.fromkeys(size.taus)))
    plan = StudyPlan(base=model_digest(folder), **vars(size))
    check_earlier(place, experiment)
    claim(place, plan)
    noise = measure_inference(place, folder, num_problems=traced) if experiment == "alignment" else None
    study = Study(out=place, experiment=experiment, plan=plan, base=base, folder=folder, noise=noise)
    study.compute(workers=workers, at_once=at_once, actors=actors)
    print(report(place, experiment))


def checked_out(text: str) -> Path:
    """The study's folder; `ValueError` for a URL, a relative path in a submitted job, and an unwritable place."""
    folder = Folder.at(text)
    if folder.is_remote:
        raise ValueError(f"--out {text} is a URL, which a study does not write; give a folder that every node reaches")
    check_writable(folder.path, folder.path)
    return folder.path


@dataclass(frozen=True, kw_only=True)
class Study:
    """An experiment of a study: its folder, and the base by its name and as a model folder.

    noise   the file of noise fitted to traces, if the experiment has it
    """

    out: Path
    experiment: Experiment
    plan: StudyPlan
    base: str
    folder: Path
    noise: Path | None = None

    def compute(self, *, workers: int, at_once: int, actors: int) -> None:
        """Trains and evaluates missing models on one cluster, and writes the experiment's rows."""
        from actors.training.run import check_run
        from mbd_core.multitf.run.start import StartingPoint
        from research.ledger.rows import sweep_rows, write_rows

        missing = missing_models(self.out, self.plan, self.experiment)
        runs = [self.training(recipe, seed, workers=workers) for recipe, seed in missing]
        for training_run in runs:
            check_run(training_run, resume=training_run.folder.exists())
            StartingPoint.read(training_run.recipe, fetch=fetch_model)
        # Ray takes seconds to import, and bad input is refused before that
        from cluster.local import connect, disconnect

        at_once = min(at_once, len(runs))
        is_ours = connect(num_cpus=max(4, at_once * workers + 1, actors + 2), worker_logs=False)
        try:
            train_all(runs, at_once=at_once)
            for seed in self.plan.seeds:
                self.evaluate(seed, actors=actors)
        finally:
            if is_ours:
                disconnect()
        tables = []
        for seed in self.plan.seeds:
            models = {path.name: recipe for path, recipe in self.models(seed).items()}
            tables.append(sweep_rows(self.sweep_folder(seed), models))
        write_rows(self.out / self.experiment / ROWS, tables)

    def training(self, recipe: TrainingRecipe, seed: int, *, workers: int) -> TrainingRun:
        """A run from the base; a begun run is resumed."""
        from actors.training.run import TrainingRun
        from mbd_core.checkpoint.config import load_config

        noise, size = self.noise if recipe.name == FITTED else None, load_config(self.folder).block_size
        return TrainingRun(
            recipe=seeded(recipe, seed, base=self.base, block_size=size, steps=self.plan.steps, noise=noise),
            name=run_name(recipe.name, seed),
            storage=Folder.at(str(self.out / "runs")),
            out=Folder.at(str(model_path(self.out, recipe, seed))),
            num_workers=workers,
            log_targets=(),
        )

    def models(self, seed: int) -> dict[Path, str]:
        """The models of a seed's sweep, and their recipes."""
        return swept_models(self.out, self.experiment, seed, self.folder)

    def sweep_folder(self, seed: int) -> Path:
        return self.out / self.experiment / "sweeps" / f"seed-{seed}"

    def evaluate(self, seed: int, *, actors: int) -> None:
        """Run the sweep of a seed if it is not finished: SingleBD and MultiBD of the seed's models on its problems."""
        from mbd_core.evaluation.sweep.folder import FolderState, is_finished
        from mbd_core.evaluation.sweep.loading import load_inputs
        from mbd_core.evaluation.sweep.options import SweepOptions
        from mbd_core.evaluation.sweep.plan import plan_sweep
        from mbd_core.evaluation.sweep.run import SweepRun
        from mbd_core.multitf.recipes.shipped import LEDGER_TASK

        place = self.sweep_folder(seed)
        state = FolderState.load(place)
        if state is not None and is_finished(place, state):
            return
        methods, grid = self.plan.decoded(self.experiment)
        subjects = Subjects.find([str(path) for path in self.models(seed)], (), ())
        options = SweepOptions(
            models=tuple(subjects.fetched.values()),
            tasks=tuple(LEDGER_TASK),
            methods=methods,
            grid=grid,
            limit=self.plan.problems,
            seed=seed,
            engine=EngineConfig(max_rows=MAX_ROWS),
        )
        work = SweepRun.of(plan_sweep(load_inputs(options)), shard=SweepShard(), timing=Timing(problems=0))
        done = run_work(Folder.at(str(place)), work, subjects, num_actors=actors, cluster=OF_VARIABLE)
        print(f"{done.headlines}\nThe report is in {place}")


def train_all(runs: list[TrainingRun], *, at_once: int) -> None:
    """Trains runs of one size on the connected cluster, at most `at_once` at a time.

    A task on this node drives each run, as a separate job would. Raises `ValueError` if `at_once` runs find no room
    beside each other. After a failure no run is begun, and when the begun runs have ended, a `RuntimeError` that names
    all failures is raised. A lost task is a failure too; the same command resumes its run.
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
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    drive = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=this_node)(train_one)
    queue, names, failures, num_done = list(reversed(runs)), dict[ray.ObjectRef[None], str](), list[str](), 0
    while names or (queue and not failures):
        while queue and not failures and len(names) < at_once:
            training_run = queue.pop()
            names[drive.remote(training_run)] = training_run.name
            print(f"ledger: begun: {training_run.name}", file=sys.stderr)
        reference = ray.wait(list(names))[0][0]
        name = names.pop(reference)
        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            failures.append(f"{name}: {task_sentence(error)}")
        else:
            num_done += 1
            print(f"ledger: trained: {name} ({num_done} of {len(runs)})", file=sys.stderr)
    if failures:
        raise RuntimeError("; ".join(failures))


def train_one(training_run: TrainingRun) -> None:
    """A run from its beginning or its newest checkpoint."""
    from mbd_core.multitf.run.start import StartingPoint

    start = StartingPoint.read(training_run.recipe, fetch=fetch_model)
    train_on_cluster(training_run, start, resume=training_run.folder.exists(), go_on="the same command")


main = command(run, "python -m research ledger", go_on="the same command computes what is missing")
