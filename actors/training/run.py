"""A training run: a recipe, the run's folder, and the model folder that it writes."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from os.path import isabs
from pathlib import Path
from typing import Any

from actors.paths import NO_PATHS, JobPaths, OpenedPath, teacher_paths
from actors.sent_home import Home
from cluster.topology import Device
from mbd_core.checkpoint.saving import MODEL_KIND
from mbd_core.checkpoint.shipped import named_model
from mbd_core.multitf.config import (
    Measuring,
    Precision,
    ShardingChoice,
    Sweeping,
    ValidationOptions,
    Written,
    check_best,
    check_workers,
)
from mbd_core.multitf.data.prepared import PreparedData, named_data
from mbd_core.multitf.recipes.recipe import TrainingRecipe, as_recorded, other_settings
from mbd_core.multitf.run.checkpoints import MARKER, NAME
from mbd_core.multitf.run.curve_file import LOSSES
from mbd_core.multitf.run.validation import are_conversations
from mbd_core.storage.folder import Folder
from mbd_core.storage.models import fetch_model

RECORD = "run.json"


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A recipe, with the places and the settings of its run.

    Everything of the run lies in `folder`, which all workers must be able to reach.

    changes           the fields that differ from the named recipe
    out               the folder for the model, or for its adapter (`written`); `overwrite` replaces a model folder.
                      A path outside of `storage` is on the job's machine, `home`
    device            the workers' kind of device; default: a GPU each, if the cluster has any
    sharding          how weights, gradients and optimizer states lie on the workers
    checkpoint_every  steps between two checkpoints; the last step writes a checkpoint too
    max_failures      number of lost workers after which the run still continues
    log_targets       where the numbers go besides the folder's `losses.jsonl`; `None` means TensorBoard, if the first
                      worker has it installed
    measuring         the run's measures of itself
    validation        held-out data by an absolute path or a URL (`validation_at`), or a share of the data
    sweeping          the tasks that an engine decodes while the run trains
    paths             where workers find the files of the job's machine
    """

    recipe: TrainingRecipe
    changes: tuple[str, ...] = ()
    name: str
    storage: Folder
    out: Folder
    written: Written = "model"
    overwrite: bool = False
    num_workers: int = 2
    device: Device | None = None
    sharding: ShardingChoice = "replicated"
    checkpoint_every: int = 100
    max_failures: int = 3
    log_targets: tuple[str, ...] | None = None
    measuring: Measuring = Measuring()
    validation: ValidationOptions = ValidationOptions()
    sweeping: Sweeping = Sweeping()
    paths: JobPaths = NO_PATHS
    home: Home | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.checkpoint_every < 1 or self.max_failures < 0:
            raise ValueError(
                f"num_workers={self.num_workers} and checkpoint_every={self.checkpoint_every} must be at least 1, "
                f"max_failures={self.max_failures} at least 0"
            )
        check_workers(self.recipe.train, self.num_workers)
        check_best(self.validation, self.sweeping)
        check_name(self.name)
        for folder in (self.storage, self.out):
            if not folder.is_shared:
                raise ValueError(
                    f"{folder} lies in the memory of one process; workers need a path or a URL they share"
                )
        if self.out.holds(self.folder):
            raise ValueError(f"out={self.out} would hold the run's own folder {self.folder}; give another folder")

    @property
    def folder(self) -> Folder:
        return self.storage / self.name

    @property
    def has_out_at_home(self) -> bool:
        return not self.out.is_remote and not self.storage.holds(self.out)

    def opened_by_workers(self) -> list[OpenedPath]:
        """The paths that workers read; URLs are left out."""
        data = self.recipe.data
        named = {
            "--base": self.recipe.base,
            "--data": data.path if isinstance(data, PreparedData) else None,
            "--validation": None if self.validation.share is not None else self.validation.validation,
            "--set train.lora.start": None if self.recipe.train.lora is None else self.recipe.train.lora.start,
            "--set sweeping.sweep_data": self.sweeping.sweep_data if self.sweeping.sweep_every else None,
        }
        paths = [OpenedPath(option, path) for option, path in named.items() if path is not None and isabs(path)]
        return paths + teacher_paths(self.recipe.train.teacher)


def check_name(name: str) -> None:
    """Raises `ValueError` unless a run's name is the name of one folder."""
    if Path(name).name != name or name in ("", "..") or not name.isprintable():
        raise ValueError(f"run name {name!r} must be one folder name")


def named_base(model: str) -> str:
    """A recipe's name for the model to start from: a shipped model's name, an absolute path, or a storage URL.

    Raises `ValueError` for an unknown name, and for a URL without a model folder.
    """
    folder = fetch_model(model)
    name = named_model(folder)
    return name if folder == model else model


def prepared_data_at(data: str) -> PreparedData:
    """Prepared data for a recipe, with an absolute path or a URL.

    Raises `ValueError` for a folder without such data.
    """
    location = Folder.at(data).location
    return named_data(Path(fetch_model(location)), location)


def validation_at(options: ValidationOptions) -> ValidationOptions:
    """The options with the absolute path or URL of the data.

    Raises `ValueError` for a folder without prepared data.
    """
    if options.validation is None or options.share is not None:
        return options
    if are_conversations(options.validation):
        return replace(options, validation=Folder.at(options.validation).location)
    return replace(options, validation=prepared_data_at(options.validation).path)


def fetched(options: ValidationOptions, fetch: Callable[[str], str] = fetch_model) -> ValidationOptions:
    """The options with held-out data on this machine. A file of conversations at a URL is not fetched."""
    held_out = options.validation
    if held_out is None or options.share is not None or (are_conversations(held_out) and not isabs(held_out)):
        return options
    return replace(options, validation=fetch(held_out))


def check_run(run: TrainingRun, *, resume: bool) -> str | None:
    """Check that run and model can be written, and that the run is new or, with `resume`, that it exists.

    Returns a note if the resumed run has no checkpoint. A resumed run computes in its recorded precision.
    Raises `ValueError` for a target that `Folder.check_target` refuses, for an existing run without `resume`, and with
    `resume` for a missing run or a run with another recipe.
    """
    run.folder.check_writable()
    run.out.check_target(MODEL_KIND, overwrite=run.overwrite)
    if not resume:
        if run.folder.exists():
            raise ValueError(f"a run already lies in {run.folder}; go on with --resume, or choose another --run-name")
        return None
    recorded, recipe = _read_record(run), as_recorded(run.recipe)
    if recorded is None:
        raise ValueError(f"--resume: there is no run in {run.folder}")
    if "attention" not in recorded["train"]:
        raise ValueError(
            f"--resume: the run in {run.folder} was begun by an older version, whose checkpoints (trainer.pt) are not "
            "read; choose another --run-name"
        )
    if recipe["train"]["precision"] == "auto":
        recipe["train"]["precision"] = recorded["train"]["precision"]
    updates = check_progress(run.folder, every=run.checkpoint_every)
    if different := other_settings(recorded, recipe):
        raise ValueError(
            f"--resume: the run in {run.folder} was started with other settings ({RECORD}): {different}; give "
            "these settings, or another --run-name"
        )
    if updates is None:
        return None
    return (
        f"--resume: the run in {run.folder} has no checkpoint after {updates} updates (one is written every "
        f"{run.checkpoint_every}), so it begins again at update 1"
    )


def check_progress(folder: Folder, *, every: int) -> int | None:
    """The number of updates of a run without a checkpoint; `None` for a run with a checkpoint.

    Raises `ValueError` for a run whose progress is lost: it has no complete checkpoint, but parts of checkpoints, or
    the losses of `every` updates, after which the first checkpoint is written.
    """
    system, path = folder.filesystem()
    names = [str(file).rstrip("/").rpartition("/")[2] for file in system.ls(path, detail=False)]
    steps = sorted(name for name in names if NAME.fullmatch(name))
    if any(system.exists(f"{path}/{step}/{MARKER}") for step in steps):
        return None
    updates = len((folder.read_bytes(LOSSES) or b"").splitlines())
    if not steps and updates < every:
        return updates
    what = f"parts of checkpoints ({', '.join(steps)})" if steps else f"the losses of {updates} updates ({LOSSES})"
    raise ValueError(
        f"--resume: {folder} holds {what} and no whole checkpoint: other parts lie on other machines, or the run was "
        "stopped within its first one; begin again with another --run-name, or after removing this folder, in a "
        "--storage that all workers share"
    )


def begin(run: TrainingRun, *, resume: bool) -> None:
    """Claim the run's folder, or find the run to be resumed. Raises the `ValueError` of `check_run`."""
    check_run(run, resume=resume)
    if not resume:
        record_recipe(run, run.recipe)


def recorded_precision(run: TrainingRun) -> Precision:
    """The precision that the run was started in; `auto` before its first start."""
    recorded = _read_record(run)
    if recorded is None:
        raise ValueError(f"there is no run in {run.folder}")
    return recorded["train"]["precision"]


def record_recipe(run: TrainingRun, recipe: TrainingRecipe) -> None:
    """Write the recipe as it runs into the run's record; its precision is `auto` until the workers have started."""
    run.folder.write_text(RECORD, json.dumps(as_recorded(recipe), indent=2, allow_nan=False) + "\n")


def _read_record(run: TrainingRun) -> dict[str, Any] | None:
    text = run.folder.read_text(RECORD)
    if text is None:
        return None
    recipe = json.loads(text)
    assert isinstance(recipe, dict)
    return recipe
