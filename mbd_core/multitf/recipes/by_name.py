"""Training runs by name: recipes of the tiny models, of the study on ledger-mini, of adaptation, of the papers."""

from mbd_core.multitf.recipes.adaptation import ADAPTATION_RECIPES
from mbd_core.multitf.recipes.paper import PAPER_RECIPES
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.recipes.shipped import LEDGER_RECIPES, TINY_RECIPES

RECIPES: dict[str, TrainingRecipe] = {
    r.name: r for r in (*TINY_RECIPES, *LEDGER_RECIPES, *ADAPTATION_RECIPES, *PAPER_RECIPES)
}


def recipe_named(name: str) -> TrainingRecipe:
    """The recipe of that name. Raises `ValueError` listing the known names."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe '{name}'; known: {', '.join(sorted(RECIPES))}")
    return RECIPES[name]
