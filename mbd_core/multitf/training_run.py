"""A training run: a recipe, the folder that the run lies in, and the model folder that it writes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.shipped import SHIPPED, model_folder
from mbd_core.files import write_json
from mbd_core.multitf.export import check_export
from mbd_core.multitf.precision import Precision
from mbd_core.multitf.recipes import TrainingRecipe

RECORD, LOSSES = "run.json", "losses.jsonl"


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A recipe, and where and how it runs.

    Everything of the run lies in `folder`, which all workers must be able to reach. The model is written to `out`;
    `overwrite` replaces a model folder that is there. A checkpoint is written every `checkpoint_every` steps and after
    the last one; the run survives `max_failures` lost workers.
    """

    recipe: TrainingRecipe
    name: str
    storage: Path
    out: Path
    overwrite: bool = False
    num_workers: int = 2
    checkpoint_every: int = 100
    max_failures: int = 3

    def __post_init__(self) -> None:
        batch_size = self.recipe.train.batch_size
        if self.num_workers < 1 or self.checkpoint_every < 1 or self.max_failures < 0:
            raise ValueError(
                f"num_workers={self.num_workers} and checkpoint_every={self.checkpoint_every} must be at least 1, "
                f"max_failures={self.max_failures} at least 0"
            )
        if batch_size % self.num_workers:
            raise ValueError(
                f"batch_size={batch_size} of recipe {self.recipe.name} does not divide over {self.num_workers} workers"
            )
        if not self.name or Path(self.name).name != self.name:
            raise ValueError(f"run name {self.name!r} must be one folder name")
        if not (self.storage.is_absolute() and self.out.is_absolute()):
            raise ValueError(
                f"storage={self.storage} and out={self.out} must be absolute: workers have folders of their own"
            )
        if self.out == self.folder or self.out in self.folder.parents:
            raise ValueError(f"out={self.out} would hold the run's own folder {self.folder}; give another folder")

    @property
    def folder(self) -> Path:
        return self.storage / self.name

    @property
    def record(self) -> Path:
        """The recipe as it runs; its precision is `auto` until the workers have started."""
        return self.folder / RECORD


def checked_base(model: str) -> str:
    """A model to start from as recipes name it: a shipped model's name, or an absolute path.

    Raises `ValueError` for a name that is not known, and for a folder whose files are incomplete or disagree.
    """
    folder = model_folder(model)
    read_folder(folder)
    return model if folder == SHIPPED / model else str(folder.resolve())


def begin(run: TrainingRun, *, resume: bool) -> None:
    """Check that the model can be written, then claim the run's folder, or find there the run to be resumed.

    Raises `ValueError` for a target that `files.check_target_folder` refuses, for a folder that is there already, and
    with `resume` for a run that is not there or has another recipe. A resumed run computes in its recorded precision.
    """
    check_export(run.out, overwrite=run.overwrite)
    if not resume:
        if run.folder.exists():
            raise ValueError(f"a run already lies in {run.folder}; go on with --resume, or choose another --run-name")
        run.folder.mkdir(parents=True)
        write_json(run.record, _as_recorded(run.recipe))
        return
    if not run.record.exists():
        raise ValueError(f"--resume: there is no run in {run.folder}")
    recorded, wanted = _read_record(run), _as_recorded(run.recipe)
    if wanted["train"]["precision"] == "auto":
        wanted["train"]["precision"] = recorded["train"]["precision"]
    if recorded != wanted:
        raise ValueError(f"--resume: the run in {run.folder} was started with other settings, see {run.record}")


def recorded_precision(run: TrainingRun) -> Precision:
    """The precision that the run was started in; `auto` before its first start."""
    return _read_record(run)["train"]["precision"]


def record_recipe(run: TrainingRun, recipe: TrainingRecipe) -> None:
    """Write the recipe as it runs into the run's record."""
    write_json(run.record, _as_recorded(recipe))


def _read_record(run: TrainingRun) -> dict[str, Any]:
    recipe = json.loads(run.record.read_text())
    assert isinstance(recipe, dict)
    return recipe


def _as_recorded(recipe: TrainingRecipe) -> dict[str, Any]:
    """The recipe as JSON gives it back."""
    recorded = json.loads(json.dumps(asdict(recipe), default=str))
    assert isinstance(recorded, dict)
    return recorded
