"""What the study on ledger-mini trains and evaluates: recipes x seeds from one base, and the record of its folder.

study.json            what the study is (`StudyPlan`); a folder of another one is refused
runs/RECIPE-sSEED     the training runs, models/RECIPE-sSEED their models: of all experiments, each trained once
EXPERIMENT/           of one experiment: sweeps/seed-SEED, the evaluations; rows.parquet, an answer a row, all that
                      the report needs; study.md and study.png, the report
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mbd_core.files import write_json
from mbd_core.multitf.data import TinyData
from mbd_core.multitf.ledger_recipes import ABLATION_ROWS, LEDGER_MBD, LEDGER_TF
from mbd_core.multitf.training_recipe import TrainingRecipe, shortened, with_fitted_noise

Experiment = Literal["ordering", "ablation", "alignment"]
BASE = "base"
FITTED = "ledger-fitted"
KIND = "study"
RECORD, ROWS, REPORT, PLOT = "study.json", "rows.parquet", "study.md", "study.png"
DISTANCES, NOISE, TRACES = "distances.parquet", "noise.json", "traces"
TRAINED: dict[Experiment, tuple[TrainingRecipe, ...]] = {
    "ordering": (LEDGER_TF, LEDGER_MBD),
    "ablation": tuple(ABLATION_ROWS.values()),
    "alignment": (replace(LEDGER_MBD, name=FITTED),),
}
"""What each experiment trains; the noise of `FITTED` is measured first."""


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """A study as its folder records it. Two plans that are equal give the same rows.

    base       the digest of the model that all runs go on from
    seeds      of training: which samples, in which order, with which noise; run `s` is evaluated on the problems of
               the sweep's seed `s`, and so is the base
    problems   for each seed
    steps      updates of a run instead of its recipe's
    """

    base: str
    seeds: tuple[int, ...]
    problems: int
    taus: tuple[float, ...]
    buffers: tuple[int, ...]
    steps: int | None = None

    def __post_init__(self) -> None:
        if not self.seeds or not self.taus or not self.buffers or self.problems < 2:
            raise ValueError("a study needs a seed, a threshold, a buffer size and two problems at least")
        if min(self.buffers) < 2:
            raise ValueError(f"buffer sizes {self.buffers} are of MultiBD, at least 2: SingleBD is always evaluated")
        if not all(0.0 < tau < 1.0 for tau in self.taus):
            raise ValueError(f"thresholds {self.taus} must lie between 0 and 1")

    @property
    def grid(self) -> str:
        """The decoding grid, in the syntax of a sweep's `--grid`."""
        return f"tau_m2t={','.join(map(str, self.taus))};buffer_size={','.join(map(str, self.buffers))}"

    def runs(self, experiment: Experiment) -> list[tuple[TrainingRecipe, int]]:
        """Every run, a seed's together, so that a study that is stopped has whole seeds."""
        return [(recipe, seed) for seed in self.seeds for recipe in TRAINED[experiment]]


def run_name(recipe: str, seed: int) -> str:
    return f"{recipe}-s{seed}"


def seeded(recipe: TrainingRecipe, seed: int, *, base: str, steps: int | None, noise: Path | None) -> TrainingRecipe:
    """The recipe as one run of a study: from `base`, on data and noise of its seed; `noise` is for `FITTED` alone."""
    data = recipe.data
    assert isinstance(data, TinyData)
    if noise is not None:
        recipe = with_fitted_noise(recipe, noise)
    recipe = replace(
        recipe,
        base=base,
        data=replace(data, seed=data.seed + seed),
        train=replace(recipe.train, seed=seed),
    )
    return recipe if steps is None else shortened(recipe, steps)


def claim(folder: Path, plan: StudyPlan) -> None:
    """Record the plan in a new folder, or find it there; `ValueError` for a folder of another study or of others."""
    path = folder / RECORD
    if path.exists():
        there = read_plan(folder)
        if there != plan:
            names = [name for name, value in asdict(plan).items() if getattr(there, name) != value]
            raise ValueError(f"{folder} holds another study: its {', '.join(names)} differ; give another folder")
        return
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists already and holds no study; give a folder that is yet to be made")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(plan))


def read_plan(folder: Path) -> StudyPlan:
    """The plan of the study in a folder; `ValueError` if none lies there."""
    path = folder / RECORD
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        lists = {name: tuple(content[name]) for name in ("seeds", "taus", "buffers")}
        return StudyPlan(**{**content, **lists})
    except OSError as error:
        raise ValueError(f"{folder} holds no study: {RECORD} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} was not written by this version of the project: {error}") from None


def missing_models(folder: Path, plan: StudyPlan, experiment: Experiment) -> list[tuple[TrainingRecipe, int]]:
    """The runs whose models are yet to be written: a model is written whole, when its run is done."""
    return [(recipe, seed) for recipe, seed in plan.runs(experiment) if not model_path(folder, recipe, seed).exists()]


def model_path(folder: Path, recipe: TrainingRecipe, seed: int) -> Path:
    return folder / "models" / run_name(recipe.name, seed)


def swept_models(folder: Path, experiment: Experiment, seed: int, base: Path) -> dict[Path, str]:
    """The models of a seed's sweep and their recipes. What is compared with alignment's is in ablation's rows."""
    models = {model_path(folder, recipe, seed): recipe.name for recipe in TRAINED[experiment]}
    return models if experiment == "alignment" else {base: BASE, **models}
