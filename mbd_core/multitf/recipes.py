"""Training runs by name: the recipes of the tiny models, those of the study on ledger-mini, and the papers'."""

from mbd_core.multitf.ledger_recipes import LEDGER_RECIPES
from mbd_core.multitf.paper_recipes import PAPER_RECIPES
from mbd_core.multitf.tiny_recipes import TINY_RECIPES
from mbd_core.multitf.training_recipe import TrainingRecipe

RECIPES: dict[str, TrainingRecipe] = {r.name: r for r in (*TINY_RECIPES, *LEDGER_RECIPES, *PAPER_RECIPES)}


def recipe_named(name: str) -> TrainingRecipe:
    """The recipe of that name; `ValueError` lists the known names."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe '{name}'; known: {', '.join(sorted(RECIPES))}")
    return RECIPES[name]
