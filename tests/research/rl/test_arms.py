"""The arms of the study of reinforcement learning: each is a recipe, and differs from A in its subject alone."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from mbd_core.engine.config import EngineConfig
from mbd_core.multitf.recipes.choice import recipe_in_file
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.rl.config import RLRecipe
from mbd_core.rl.rollouts import RolloutPlan
from research.rl.arms import LONG, LOW_A, LOW_E, A, E

ARMS = Path(__file__).resolve().parents[3] / "research" / "rl" / "arms.py"
SUBJECTS = {
    "A": set(),
    "B": {"rewards", "groups"},  # its groups are filtered as A's, by name
    "C": {"states"},
    "E": {"groups", "objective"},
    "F": {"groups"},
    "G": {"states"},
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_an_arm_differs_from_a_in_its_subject_alone(name: str) -> None:
    arm = recipe_in_file(f"{ARMS}:{name}", RLRecipe)
    differing = {f.name for f in fields(arm) if repr(getattr(arm, f.name)) != repr(getattr(A, f.name))}
    assert differing == SUBJECTS[name] | ({"name"} if name != "A" else set())
    assert arm.name == f"rl-{name}" and arm.model == "ledger-mbd"


@pytest.mark.parametrize(("longer", "arm"), [(LONG, A), (LOW_A, A), (LOW_E, E)], ids=["A", "low A", "low E"])
def test_a_longer_run_differs_in_length_and_rate_alone(longer: RLRecipe, arm: RLRecipe) -> None:
    assert longer.iterations == 4 * arm.iterations
    again = replace(longer, name=arm.name, iterations=arm.iterations, train=replace(longer.train, lr=arm.train.lr))
    assert repr(again) == repr(arm)


def test_all_arms_are_asked_the_same() -> None:
    plans = [RolloutPlan.of(recipe_in_file(f"{ARMS}:{name}", RLRecipe), EngineConfig()) for name in SUBJECTS]
    asked = [[table.to_pylist() for _, table in plan.parts(3)] for plan in plans]
    assert all(rows == asked[0] for rows in asked[1:])


def test_the_arm_of_right_solutions_goes_on_from_the_same_model() -> None:
    arm = recipe_in_file(f"{ARMS}:D", TrainingRecipe)
    assert arm.base == A.model and arm.states.block_size == 16
