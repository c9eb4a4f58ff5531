"""A base's configuration after a training, for the trainer and for whoever makes a folder of what it wrote."""

from dataclasses import replace
from typing import Literal

from mbd_core.models.model_config import ModelConfig


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
