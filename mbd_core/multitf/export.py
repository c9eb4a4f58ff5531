"""The trained model's folder: checked before a run begins, written when it ends."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.saving import MODEL_KIND, save_model
from mbd_core.files import check_target_folder
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.training_recipe import TrainingRecipe


def check_export(folder: Path, *, overwrite: bool = False) -> None:
    """Raise `ValueError` if `export` could not write `folder`, so that no run trains for nothing."""
    check_target_folder(folder, MODEL_KIND, overwrite=overwrite)


def export(
    folder: Path,
    recipe: TrainingRecipe,
    model: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    *,
    overwrite: bool = False,
) -> None:
    """Write the trained model, in bfloat16 as these families are published, with the recipe that trained it.

    An adapter is merged into the model first. Raises `ValueError` as `check_export` does.
    """
    save_model(
        folder,
        model,
        tokenizer=tokenizer,
        generation=recipe.generation,
        dtype=torch.bfloat16,
        extra={"recipe.json": json.dumps(asdict(recipe), indent=2, default=str) + "\n"},
        overwrite=overwrite,
    )
