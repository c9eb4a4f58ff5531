"""`train(recipe)` trains a recipe in this process or on a cluster. The command `mbd train` calls `train_on_ray`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from cluster.topology import Device
from jobs.api.call_options import OF_VARIABLE, Say, options_from, ray_address, silent, unknown
from jobs.api.rows import table_of
from mbd_core.fields import CLUSTER, OUTPUT, Field, Flag, Ge, changed, configuration, leaves_of, load
from mbd_core.json_text import merge_fields, merge_paths
from mbd_core.multitf.recipes.choice import ChosenRecipe, RecipeChoice, choose_recipe
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.run.log_targets import chosen_targets
from mbd_core.multitf.run.options import RunOptions
from mbd_core.storage.folder import Folder
from mbd_core.storage.models import fetch_model

if TYPE_CHECKING:
    from actors.training.run import TrainingRun
    from mbd_core.multitf.run.start import StartingPoint

DEFAULT = "tiny-mbd"
FAILURE = "failure.txt"


@configuration(panel=OUTPUT)
class RayOptions:
    """The options of a run on a cluster."""

    workers: Annotated[int, Ge(1), Flag(panel=CLUSTER)] = 2
    """Training processes."""
    device: Annotated[Device | None, Flag(panel=CLUSTER, default="a GPU each, if there are any")] = None
    """The device of the workers."""
    plan: Annotated[bool, Flag(panel=CLUSTER)] = False
    """Print the memory that a step needs on each worker, and end."""
    schema: bool = False
    """Print the JSON Schema of --config files, for editors, and end."""
    max_failures: Annotated[int, Ge(0), Flag(panel=CLUSTER)] = 3
    """Number of lost workers that the run survives."""
    storage: Annotated[str, Flag(metavar="DIR|URL", opened_by="all")] = "~/mbd-runs"
    """Folder of all runs, which every worker reaches, or a URL as s3://bucket/path."""
    run_name: Annotated[str | None, Flag(metavar="NAME", default="the recipe's")] = None
    """The run's folder in --storage."""
    resume: bool = False
    """Continue the run of this name."""
    checkpoint_every: Annotated[int, Ge(1)] = 100
    """Steps between checkpoints."""
    out: Annotated[str | None, Flag(metavar="DIR|URL", default="STORAGE/NAME/model", opened_by="job")] = None
    """Model folder to write. Without --run-name the run is named RECIPE-DIR."""

    def name_of_run(self, recipe: TrainingRecipe) -> str:
        """The run's name. Runs of one recipe that write different models lie in different folders."""
        if self.run_name is not None:
            return self.run_name
        return recipe.name if self.out is None else f"{recipe.name}-{Folder.at(self.out).name}".rstrip("-")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model; `LLM(trained)` loads it.

    model    the model folder's path or URL
    recipe   the recipe with its changes
    changes  the differences from the named recipe
    run      the run's folder on a cluster's storage
    points   the logged numbers of each update
    """

    model: str
    recipe: TrainingRecipe = field(repr=False)
    changes: tuple[str, ...] = ()
    run: str | None = None
    points: tuple[Mapping[str, float], ...] = field(default=(), repr=False)

    def __fspath__(self) -> str:
        return self.model

    def __str__(self) -> str:
        return self.model

    @property
    def table(self) -> Any:
        """The numbers of each update: a pandas table if pandas is installed, else a list."""
        return table_of(self.points)


OF_CLUSTER = tuple(name for name in RayOptions.__dataclass_fields__ if name not in ("plan", "schema", "out"))
ALONE = ("checkpoints", "every")


def train(
    recipe: str = DEFAULT,
    *,
    base: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    cluster: str | None = None,
    say: Say = silent,
    **changes: Any,
) -> Trained:
    """Train a recipe, and write a model folder.

    recipe   the recipe's name, or your own recipe as FILE.py:NAME
    base     the model to start from: a shipped model's name, a model folder, or its URL
    data     the result of `prepare`, or the folder that it wrote
    out      the model folder to write; default out/RECIPE, on a cluster STORAGE/RECIPE/model
    cluster  a Ray cluster: its address, `auto` for the cluster on this machine, `local` for a new cluster, or
             `RAY_ADDRESS` for the cluster that the variable names. Default: this process alone
    say      a function that is called with each remark
    changes  fields of the recipe, by the names of the command's options (`steps=200`, `lr=1e-4`) or inside its parts
             (`train={"lr": 1e-4}`); options of the run (`checkpoints`, `every`, `validation`, `overwrite`, ...); on a
             cluster `workers`, `storage`, `run_name`, `resume` and others

    Raises `ValueError`, in the command's words, for values that are not possible, and `RuntimeError` if the training
    fails.
    """
    from mbd_core.multitf.run.alone import (  # importing it takes seconds, which `mbd train --help` need not wait for
        PlainOptions,
        train_alone,
    )

    given = {"base": base, "data": data, "out": out, "recipe": recipe}
    names = Names(cluster is not None)
    values = {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in changes.items()}
    for name in values:
        names.check(name)
        names.check_given_once(name, values)
    choice_values = {n: v for n, v in (given | values).items() if n in RecipeChoice.__dataclass_fields__}
    choice = options_from(RecipeChoice, {name: value for name, value in choice_values.items() if value is not None})
    stated = {
        item.path: load(item.hint, values[item.name], path=f"{item.name}.")
        for item in leaves_of(RunOptions)
        if item.name in values
    }
    options = changed(RunOptions(), merge_paths({}, stated))
    changed_fields = merge_fields(
        {name: value for name, value in values.items() if name in names.parts},
        merge_paths({}, {names.paths[name]: value for name, value in values.items() if name in names.paths}),
    )
    own = {name: value for name, value in values.items() if name in (OF_CLUSTER if names.on_cluster else ALONE)}
    if out is not None:
        own["out"] = os.fspath(out)
    if cluster is not None:
        return train_on_ray(choice, changed_fields, options, options_from(RayOptions, own), cluster=cluster, say=say)
    done = train_alone(choice, changed_fields, options, options_from(PlainOptions, own))
    return Trained(
        model=str(done.model), recipe=done.recipe, changes=done.changes, points=tuple(dict(p) for p in done.curve)
    )


class Names:
    """The keywords of `train`, sorted by the configuration that each belongs to."""

    def __init__(self, on_cluster: bool) -> None:
        self.on_cluster = on_cluster
        self.paths = {keyword(item): item.path for item in leaves_of(TrainingRecipe)}
        self.parts = {name for name in TrainingRecipe.__dataclass_fields__ if name not in self.paths}
        self._others = {item.name for item in leaves_of(RunOptions)} | {*RecipeChoice.__dataclass_fields__}

    def check(self, name: str) -> None:
        """Raise `ValueError` for an unknown name, or for a name that needs (or forbids) a cluster."""
        known = {*self.paths, *self.parts, *self._others, *(OF_CLUSTER if self.on_cluster else ALONE)}
        if name in known:
            return
        if name in OF_CLUSTER:
            raise ValueError(f"{name} belongs to a run on a cluster: give cluster too, or leave {name} out")
        if name in ALONE:
            raise ValueError(f"{name} belongs to a run without a cluster: give storage and checkpoint_every instead")
        raise unknown("keyword", name, known)

    def check_given_once(self, name: str, values: Mapping[str, Any]) -> None:
        """Raise `ValueError` if a field is given by its name and inside a part, too."""
        part: Any = values
        for step in self.paths.get(name, name).split("."):
            if not isinstance(part, Mapping) or step not in part:
                return
            part = part[step]
        if self.paths.get(name, name) != name:
            raise ValueError(f"{name} and {self.paths[name]} are both given: leave one out")


def keyword(item: Field) -> str:
    """The keyword of a recipe's field: its option's name, with `_` for `-`."""
    return (item.flag.name or item.name).removeprefix("--").replace("-", "_")


def train_on_ray(
    choice: RecipeChoice,
    changes: Mapping[str, Any],
    options: RunOptions,
    own: RayOptions,
    *,
    cluster: str = OF_VARIABLE,
    say: Say = silent,
) -> Trained:
    """Train a recipe on a Ray cluster, named as `ray_address` reads it. Raises the errors of `train`."""
    from actors.training.run import TrainingRun, check_run, fetched, validation_at
    from mbd_core.evaluation.tasks.benchmarks import find_task
    from mbd_core.evaluation.tasks.problems import load_problems
    from mbd_core.multitf.run.curve_file import LOSSES
    from mbd_core.multitf.run.start import StartingPoint
    from mbd_core.multitf.run.validation import check_held_out

    address = ray_address(cluster)
    chosen = chosen_on_ray(choice, changes)
    recipe = chosen.recipe
    runs, name = Folder.at(os.path.expanduser(own.storage)), own.name_of_run(recipe)
    training = TrainingRun(
        recipe=recipe,
        changes=chosen.changes,
        name=name,
        storage=runs,
        out=runs / name / "model" if own.out is None else Folder.at(own.out),
        written=options.write,
        overwrite=options.overwrite,
        num_workers=own.workers,
        device=own.device,
        sharding=options.sharding,
        checkpoint_every=own.checkpoint_every,
        max_failures=own.max_failures,
        log_targets=chosen_targets(options.log_to),
        measuring=options.measuring,
        validation=validation_at(options.held_out),
        sweeping=options.sweeping,
    )
    if options.sweeping.sweep_every:
        task = find_task(options.sweeping.task)
        load_problems(task, limit=options.sweeping.limit, data=options.sweeping.sweep_data)  # refused before the run
    if note := check_run(training, resume=own.resume):
        say(f"note: {note}")
    start = StartingPoint.read(recipe, fetch=fetch_model)
    start.check_written(options.write)
    check_held_out(fetched(training.validation), start, None if start.base is None else start.base.tokenizer)
    if note := start.note():
        say(f"note: {note}")
    train_on_cluster(training, start, resume=own.resume, address=address)
    lines = (training.folder.read_text(LOSSES) or "").splitlines()
    return Trained(
        model=str(training.out),
        recipe=recipe,
        changes=chosen.changes,
        run=str(training.folder),
        points=tuple(map(json.loads, lines)),
    )


def chosen_on_ray(choice: RecipeChoice, changes: Mapping[str, Any]) -> ChosenRecipe:
    """The chosen recipe, with base and data at places that all workers reach."""
    from actors.training.run import named_base, prepared_data_at

    return choose_recipe(choice, changes, default=DEFAULT, named_base=named_base, named_data=prepared_data_at)


def train_on_cluster(
    training: TrainingRun,
    start: StartingPoint,
    *,
    resume: bool,
    address: str | None = None,
    go_on: str = "the same command and --resume",
) -> None:
    """Train until the model is written. Raises `RuntimeError`, one sentence, if that fails or no cluster starts.

    `address` is the argument of `cluster.local.connect`; `go_on` tells the user how to continue a failed training.
    """
    from actors.training.run import begin
    from actors.training.worker import (
        fit,
        plan_run,
        with_paths,
    )  # Ray takes seconds to import: bad input is refused before that
    from cluster.failures import CLUSTER_FAILURES, failure_text, reason
    from cluster.local import connect, disconnect
    from mbd_core.multitf.step.trainer import Diverged

    is_ours = connect(address=address, num_cpus=max(4, training.num_workers + 1))
    try:
        with with_paths(training) as training:
            training = plan_run(training, start)
            begin(training, resume=resume)
            try:
                fit(training)
            except Diverged as error:
                training.folder.write_text(FAILURE, failure_text(error))
                raise RuntimeError(f"the training failed: {error}; the run lies in {training.folder}") from error
            except CLUSTER_FAILURES as error:
                training.folder.write_text(FAILURE, failure_text(error))
                raise RuntimeError(
                    f"the training failed: {reason(error)}; the run lies in {training.folder}; go on with {go_on}; "
                    f"the traceback is in {FAILURE} there"
                ) from error
    finally:
        if is_ours:
            disconnect()
