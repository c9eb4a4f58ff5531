"""The plan of the study on ledger-mini: recipes x seeds from one base, and the record of its folder.

study.json            the study's plan (`StudyPlan`); a folder of another study is refused
runs/RECIPE-sSEED     a training run; experiments share runs
models/RECIPE-sSEED   the run's model
EXPERIMENT/           sweeps/seed-SEED: an evaluation
                      rows.parquet: the answers, one a row
                      study.md, study.png: the report, which compares with earlier experiments' rows
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

from mbd_core.evaluation.tasks.problems import MOST_GENERATED
from mbd_core.fields import DATA, DECODING, MODEL, MOST, Flag, Ge, Le, configuration, load
from mbd_core.files import is_partial, write_json
from mbd_core.multitf.data.prepared import TinyData
from mbd_core.multitf.recipes.recipe import TrainingRecipe, shortened, with_fitted_noise
from mbd_core.multitf.recipes.shipped import ABLATION_ROWS, LEDGER_MBD, LEDGER_TF

Experiment = Literal["ordering", "ablation", "alignment", "thresholds"]
BASE = "base"
FITTED = "ledger-fitted"
KIND = "study"
RECORD, ROWS, REPORT, PLOT = "study.json", "rows.parquet", "study.md", "study.png"
INFERENCE, DISTANCES, NOISE, TRACES = "inference", "distances.parquet", "noise.json", "traces"
LOW_TAUS = (0.3, 0.5, 0.7)
COMPARED_WITH: dict[Experiment, tuple[Experiment, ...]] = {
    "ordering": (),
    "ablation": ("ordering",),
    "alignment": ("ordering", "ablation"),
    "thresholds": ("ordering",),
}
"""The experiments whose rows stand beside an experiment's own. No model is trained or evaluated twice."""
TRAINED_RECIPES: dict[Experiment, tuple[TrainingRecipe, ...]] = {
    "ordering": (LEDGER_TF, LEDGER_MBD),
    "ablation": tuple(recipe for recipe in ABLATION_ROWS.values() if recipe not in (LEDGER_TF, LEDGER_MBD)),
    "alignment": (replace(LEDGER_MBD, name=FITTED),),
    "thresholds": (),
}
"""The recipes that each experiment adds. The noise of `FITTED` is measured first. `thresholds` decodes the base
anew."""


@configuration(panel=DATA)
class StudySize:
    """How large a study is.

    A training seed decides the samples, their order and the noise. The runs of seed `s`, and the base, are evaluated
    on the problems of the sweep's seed `s`.
    """

    seeds: Annotated[tuple[Annotated[int, Ge(0), Le(MOST)], ...], Flag(metavar="S,...", commas=True)] = (0, 1, 2)
    """Training seeds."""
    problems: Annotated[int, Ge(2), Le(MOST_GENERATED)] = 2000
    """Unseen problems a seed."""
    taus: Annotated[tuple[float, ...], Flag(panel=DECODING, metavar="TAU,...", commas=True)] = (0.8, 0.9, 0.95)
    """Thresholds tau_m2t."""
    buffers: Annotated[tuple[Annotated[int, Ge(1)], ...], Flag(panel=DECODING, commas=True)] = (2, 4)
    """Slots of MultiBD."""
    steps: Annotated[int | None, Ge(1), Flag(panel=MODEL, default="the recipe's")] = None
    """Updates of a run."""

    def __post_init__(self) -> None:
        if not self.seeds or not self.taus or not self.buffers or self.problems < 2:
            raise ValueError("a study needs a seed, a threshold, a buffer size and two problems at least")
        if min(self.buffers) < 2:
            raise ValueError(f"buffer sizes {self.buffers} must be at least 2: size 1, SingleBD, is always evaluated")
        if not all(0.0 < tau < 1.0 for tau in self.taus):
            raise ValueError(f"thresholds {self.taus} must lie between 0 and 1")


@configuration()
class StudyPlan(StudySize):
    """A study as its folder records it. Two plans that are equal give the same rows.

    base    the digest of the model with which all runs begin
    """

    base: str

    def decoded(self, experiment: Experiment) -> tuple[tuple[str, ...] | None, str]:
        """The methods and the grid of an experiment's sweeps, in the syntax of a sweep's options."""
        if experiment == "thresholds":
            return ("single",), f"tau_m2t={','.join(map(str, LOW_TAUS))}"
        return None, f"tau_m2t={','.join(map(str, self.taus))};buffer_size={','.join(map(str, self.buffers))}"

    def runs(self, experiment: Experiment) -> list[tuple[TrainingRecipe, int]]:
        """Every run, a seed's runs together, so that a stopped study has whole seeds."""
        return [(recipe, seed) for seed in self.seeds for recipe in TRAINED_RECIPES[experiment]]


def run_name(recipe: str, seed: int) -> str:
    return f"{recipe}-s{seed}"


def seeded(
    recipe: TrainingRecipe, seed: int, *, base: str, block_size: int, steps: int | None, noise: Path | None
) -> TrainingRecipe:
    """The recipe as one run of a study: from `base`, in its blocks, on data and noise of its seed.

    `noise` is for `FITTED` alone.
    """
    data = recipe.data
    assert isinstance(data, TinyData)
    if noise is not None:
        recipe = with_fitted_noise(recipe, noise)
    recipe = replace(
        recipe,
        base=base,
        data=replace(data, seed=data.seed + seed),
        states=replace(recipe.states, block_size=block_size),
        train=replace(recipe.train, seed=seed),
    )
    return recipe if steps is None else shortened(recipe, steps)


def claim(folder: Path, plan: StudyPlan) -> None:
    """Records the plan in a new folder, or finds it there. Raises `ValueError` for another study's folder, or for
    other files."""
    path = folder / RECORD
    if path.exists():
        recorded = read_plan(folder)
        if recorded != plan:
            names = sorted(name for name, value in asdict(plan).items() if getattr(recorded, name) != value)
            raise ValueError(f"{folder} holds another study: its {', '.join(names)} differ; give another folder")
        return
    if folder.exists() and not all(map(is_partial, folder.iterdir())):
        raise ValueError(f"{folder} exists already and holds no study; give a folder that is yet to be made")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(plan))


def read_plan(folder: Path) -> StudyPlan:
    """The plan of the study in a folder; `ValueError` if none lies there."""
    path = folder / RECORD
    try:
        plan: StudyPlan = load(StudyPlan, json.loads(path.read_text(encoding="utf-8")), noun="field")
        return plan
    except OSError as error:
        raise ValueError(f"{folder} holds no study: {RECORD} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path} was not written by this version of the project: {error}") from None


def missing_models(folder: Path, plan: StudyPlan, experiment: Experiment) -> list[tuple[TrainingRecipe, int]]:
    """The runs without a model. A run that is stopped has none, because a model is written when its run is done."""
    return [(recipe, seed) for recipe, seed in plan.runs(experiment) if not model_path(folder, recipe, seed).exists()]


def model_path(folder: Path, recipe: TrainingRecipe, seed: int) -> Path:
    return folder / "models" / run_name(recipe.name, seed)


def swept_models(folder: Path, experiment: Experiment, seed: int, base: Path) -> dict[Path, str]:
    """The models of a seed's sweep and their recipes: the experiment's own, and the base if it is decoded."""
    models = {model_path(folder, recipe, seed): recipe.name for recipe in TRAINED_RECIPES[experiment]}
    return {base: BASE, **models} if experiment in ("ordering", "thresholds") else models


def row_files(folder: Path, experiment: Experiment) -> list[Path]:
    """The files of the rows of an experiment's report, its own last."""
    return [folder / name / ROWS for name in (*COMPARED_WITH[experiment], experiment)]


def check_earlier(folder: Path, experiment: Experiment) -> None:
    """Raises `ValueError` naming the experiment that must run before this one."""
    for path in row_files(folder, experiment)[:-1]:
        if not path.exists():
            name = path.parent.name
            raise ValueError(f"{experiment} compares with the rows of {name}, which {folder} lacks: run {name} first")
