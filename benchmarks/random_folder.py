"""A shape with random weights, held in memory, as a model folder for benchmarks."""

from dataclasses import replace
from pathlib import Path

import torch

from mbd_core.checkpoint.saving import random_generation, save_model
from mbd_core.checkpoint.shape_tokenizer import shape_tokenizer
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import random_model

MAX_POSITIONS = 4096


def write_random_folder(config: ModelConfig, folder: Path, *, seed: int = 0) -> None:
    """Write the folder, in float32.

    Of a longer model it keeps `MAX_POSITIONS`, so that a CPU's KV memory is that of short requests.
    """
    config = replace(config, max_positions=min(config.max_positions, MAX_POSITIONS))
    model = random_model(config, device=torch.device("cpu"), dtype=torch.float32, seed=seed)
    save_model(folder, model, tokenizer=shape_tokenizer(config), generation=random_generation(config))
