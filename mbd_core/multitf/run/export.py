"""The model folder of a trained model or of a checkpoint."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.base_files import BaseFiles, read_base
from mbd_core.checkpoint.saving import save_model
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.recipes.recipe import RECIPE, TrainingRecipe
from mbd_core.multitf.run.beginning import initial_model
from mbd_core.multitf.run.checkpoints import Checkpoints
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.step.adapter import add_adapter, merge_adapter
from mbd_core.multitf.step.quantized_base import quantize_base


def export(
    folder: Path,
    recipe: TrainingRecipe,
    model: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    base: BaseFiles | None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes the trained model, in bfloat16 as these families are published, with its recipe.

    Its folder has all files of the base's folder, so it loads wherever the base does. An adapter is merged into the
    model first. If the recipe recommends decoding a full-attention model in blocks of another size than it was trained
    in, as D2F does, the model's configuration has that size. Raises `ValueError` for a folder that must not be
    replaced.
    """
    merge_adapter(model)
    if model.config.attention == "full":
        size = recipe.generation.get("block_size", model.config.block_size)
        model.config = replace(model.config, block_size=size)
    save_model(
        folder,
        model,
        base=base,
        tokenizer=tokenizer if base is None else None,
        generation=recipe.generation,
        dtype=torch.bfloat16,
        extra={RECIPE: recipe_text(recipe)},
        overwrite=overwrite,
    )


def export_checkpoint(folder: Path, start: StartingPoint, checkpoints: Checkpoints, step: int) -> None:
    """Writes the model of a checkpoint; only its weights are read. Raises as `Checkpoints.load`."""
    recipe, base = start.recipe, start.base
    model, tokenizer = initial_model(start)
    if recipe.train.lora is not None:
        add_adapter(model, recipe.train.lora, seed=recipe.train.seed)
        if recipe.train.lora.quantize_base:
            quantize_base(model, torch.device("cpu"), torch.float32)
    checkpoints.load_weights(model, step, adapter=recipe.train.lora is not None)
    export(folder, recipe, model, tokenizer, None if base is None else read_base(base.path))


def recipe_text(recipe: TrainingRecipe) -> str:
    """The recipe's text beside the trained model."""
    return json.dumps(asdict(recipe), indent=2, default=str) + "\n"
