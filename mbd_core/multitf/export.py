"""The trained model's folder: checked before a run begins, written when it ends."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.base_files import BaseFiles, read_base
from mbd_core.checkpoint.saving import MODEL_KIND, checkpoint_tensors, save_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.files import check_target_folder
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.trained_adapter import merge_adapter
from mbd_core.multitf.training_recipe import TrainingRecipe


def check_export(folder: Path, *, overwrite: bool = False) -> None:
    """Raise `ValueError` if `export` could not write `folder`, so that no run trains for nothing."""
    check_target_folder(folder, MODEL_KIND, overwrite=overwrite)


def base_files(recipe: TrainingRecipe) -> BaseFiles | None:
    """What the trained model will take over from its base, if it has one: read before training, written after it.

    Raises `ValueError` as `read_base` does.
    """
    return None if recipe.base is None else read_base(model_folder(recipe.base))


def export(
    folder: Path,
    recipe: TrainingRecipe,
    model: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    base: BaseFiles | None,
    *,
    overwrite: bool = False,
) -> None:
    """Write the trained model, in bfloat16 as these families are published, with the recipe that trained it.

    Its folder has all that its base's has (`base_files`), so that it loads wherever the base does.
    An adapter is merged into the model first. Where the recipe recommends to decode a full-attention model in blocks
    of another size than it was trained in, as D2F does, the model says that size. Where the model is sharded the other
    workers call `join_export`. Raises `ValueError` as `check_export` does.
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
        extra={"recipe.json": json.dumps(asdict(recipe), indent=2, default=str) + "\n"},
        overwrite=overwrite,
    )


def join_export(model: Decoder) -> None:
    """Give this worker's parts of a sharded model to the first worker's `export`, tensor by tensor."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        merge_adapter(model)
        for _ in checkpoint_tensors(model, "per_expert"):
            pass
