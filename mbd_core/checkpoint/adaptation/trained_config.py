"""A base's configuration after a training, for the trainer and for the makers of folders from its files."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from mbd_core.models.model_config import ModelConfig

RECIPE = "recipe.json"
"""A training's recipe, beside what it wrote."""


def ar_config(base: ModelConfig) -> ModelConfig:
    """After a training by the AR loss alone. A model that attends in blocks then has an AR mode."""
    return replace(base, ar_mode=base.attention == "block_causal")


def block_config(
    base: ModelConfig, *, block_size: int, clean: Literal["block_causal", "causal"], has_ar_loss: bool
) -> ModelConfig:
    """After a training that fills masks: its block size, how clean tokens saw each other, its AR mode."""
    attention = base.attention if base.attention == "full" else clean
    ar_mode = has_ar_loss and attention == "block_causal"
    return replace(base, block_size=block_size, attention=attention, ar_mode=ar_mode)


def whole_recipe(file: Path, recipe: object) -> dict[str, Any]:
    """The recipe in a file of our trainer. Raises `ValueError` if it lacks what a model folder needs."""
    if isinstance(recipe, dict) and all(isinstance(recipe.get(part), dict) for part in ("states", "generation")):
        states = recipe["states"]
        if isinstance(states.get("block_size"), int) and isinstance(states.get("ar_weight", 0), int | float):
            return recipe
    raise ValueError(
        f"{file} is cut or damaged: it names no whole recipe; take an older checkpoint, or write the adapter again"
    )


def config_after(config: ModelConfig, recipe: Mapping[str, Any]) -> ModelConfig:
    """A base's configuration after the training of a recorded recipe. A record of an older version may lack fields.

    Raises `ValueError` for a recipe that fills masks and a base without a mask.
    """
    states = recipe["states"]
    if states.get("layouts") == "none":
        return ar_config(config)
    block_size = recipe["generation"].get("block_size", states["block_size"])
    if not config.has_mask:
        raise ValueError(
            f"{RECIPE} is of a training that filled masks in blocks of {block_size}, and a {config.architecture} has "
            f"no mask; make its base first: mbd convert DIR --to block-diffusion --block-size {block_size} --out BASE"
        )
    return block_config(
        config,
        block_size=block_size,
        clean=states.get("clean", "block_causal"),
        has_ar_loss=states.get("ar_weight", 0) > 0,
    )
