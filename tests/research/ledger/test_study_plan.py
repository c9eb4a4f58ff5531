"""The plan of the study: what differs between its runs and what does not, and how a stopped study goes on."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.recipes.shipped import ABLATION_ROWS, LEDGER_BD, LEDGER_MBD, LEDGER_TF, NUM_STREAMS
from mbd_core.multitf.states.fitted_noise import FittedNoise, write_noise
from research.ledger.plan import (
    COMPARED_WITH,
    FITTED,
    RECORD,
    ROWS,
    TRAINED_RECIPES,
    StudyPlan,
    check_earlier,
    claim,
    missing_models,
    model_path,
    read_plan,
    seeded,
    swept_models,
)

PLAN = StudyPlan(base="digest", seeds=(0, 1), problems=20, taus=(0.8, 0.9), buffers=(2, 4))


def apart_from_states(recipe: TrainingRecipe) -> TrainingRecipe:
    return replace(recipe, name="", states=LEDGER_BD.states, generation={})


def test_the_rows_of_the_ablation_differ_in_their_states_alone() -> None:
    recipes = list(ABLATION_ROWS.values())
    assert len({recipe.name for recipe in recipes}) == len({str(recipe.states) for recipe in recipes}) == 8
    assert {recipe.states.num_layouts for recipe in recipes} == {NUM_STREAMS}
    assert all(apart_from_states(recipe) == apart_from_states(LEDGER_MBD) for recipe in recipes)


def test_a_seed_gives_all_recipes_the_same_samples_and_another_seed_others() -> None:
    tf, mbd = (
        seeded(recipe, 1, base="b", block_size=16, steps=None, noise=None) for recipe in (LEDGER_TF, LEDGER_MBD)
    )
    assert tf.data == mbd.data and tf.train == mbd.train and tf.base == mbd.base == "b"
    other = seeded(LEDGER_MBD, 2, base="b", block_size=32, steps=None, noise=None)
    assert other.states == replace(mbd.states, block_size=32), "a study's blocks are its base's"
    assert other.data != mbd.data and other.train.seed == 2
    assert other.data != LEDGER_BD.data, "the base was trained on other samples"


def test_the_fitted_row_draws_what_was_measured(tmp_path: Path) -> None:
    noise = FittedNoise(states=(((0.25, 1.0), 3),), source="a trace")
    write_noise(tmp_path / "noise.json", noise)
    (recipe,) = TRAINED_RECIPES["alignment"]
    run = seeded(recipe, 0, base="b", block_size=16, steps=7, noise=tmp_path / "noise.json")
    assert recipe.name == FITTED and run.states.schedule == "fitted" and run.states.bounds.fitted == noise
    assert run.train.steps == 7
    assert replace(run.states, schedule="chain_uniform", bounds=LEDGER_MBD.states.bounds) == LEDGER_MBD.states


def test_a_study_goes_on_with_the_models_that_are_missing(tmp_path: Path) -> None:
    claim(tmp_path, PLAN)
    every = missing_models(tmp_path, PLAN, "ordering")
    assert every == [(LEDGER_TF, 0), (LEDGER_MBD, 0), (LEDGER_TF, 1), (LEDGER_MBD, 1)]
    model_path(tmp_path, LEDGER_MBD, 0).mkdir(parents=True)
    claim(tmp_path, PLAN)
    assert missing_models(tmp_path, PLAN, "ordering") == [(LEDGER_TF, 0), (LEDGER_TF, 1), (LEDGER_MBD, 1)]


def test_no_model_is_trained_or_evaluated_by_two_experiments(tmp_path: Path) -> None:
    every = [recipe for experiment in COMPARED_WITH for recipe in TRAINED_RECIPES[experiment]]
    assert len({recipe.name for recipe in every}) == len(every) == 9
    assert {recipe.name for recipe in every} == {recipe.name for recipe in ABLATION_ROWS.values()} | {FITTED}
    swept = [path for experiment in COMPARED_WITH for path in swept_models(tmp_path, experiment, 0, Path("ledger-bd"))]
    assert len(set(swept)) == len(swept) - 1 == 10, "every model once, the base again at low thresholds"


def test_an_experiment_needs_the_rows_of_those_before_it(tmp_path: Path) -> None:
    check_earlier(tmp_path, "ordering")
    for earlier, experiment in pairwise(("ordering", "ablation", "alignment")):
        with pytest.raises(ValueError, match=f"run {earlier} first"):
            check_earlier(tmp_path, "alignment")
        (tmp_path / earlier).mkdir()
        (tmp_path / earlier / ROWS).touch()
        check_earlier(tmp_path, experiment)


def test_another_study_is_refused_by_what_differs(tmp_path: Path) -> None:
    claim(tmp_path, PLAN)
    with pytest.raises(ValueError, match="base, problems"):
        claim(tmp_path, replace(PLAN, base="another", problems=21))


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists already and holds no study"):
        claim(tmp_path, PLAN)
    (tmp_path / RECORD).write_text(json.dumps({"seeds": [0]}))
    with pytest.raises(ValueError, match="was not written by this version of the project"):
        claim(tmp_path, PLAN)


def test_a_record_that_a_killed_process_began_is_no_study(tmp_path: Path) -> None:
    (tmp_path / f".{RECORD}.77.partial.json").write_text("{")
    claim(tmp_path, PLAN)
    assert read_plan(tmp_path) == PLAN


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"buffers": (1, 2)}, "at least 2"),
        ({"taus": (1.5,)}, "between 0 and 1"),
        ({"seeds": ()}, "needs a seed"),
        ({"seeds": (2**31,)}, "at most 2147483647"),
        ({"problems": 10**7}, "from 2 to 1000000"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(PLAN, **changes)


def test_the_base_is_swept_in_the_first_experiment(tmp_path: Path) -> None:
    assert list(swept_models(tmp_path, "alignment", 1, Path("ledger-bd")).values()) == [FITTED]
    assert list(swept_models(tmp_path, "ordering", 1, Path("ledger-bd"))) == [
        Path("ledger-bd"),
        tmp_path / "models" / "ledger-tf-s1",
        tmp_path / "models" / "ledger-mbd-s1",
    ]
