"""The state of a run in one process, kept in one file: written on the way, read to go on."""

import pickle
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mbd_core.files import file_beside
from mbd_core.multitf.trainer import Trainer


def save_state(path: Path, trainer: Trainer, *, recipe: str) -> None:
    """Write the trainer's state, the recipe's name and the precision to `path`, in place of an older state."""
    state = {"recipe": recipe, "precision": trainer.precision, "trainer": trainer.state_dict()}
    with file_beside(path) as beside:
        torch.save(state, beside)


def read_state(path: Path, *, recipe: str) -> dict[str, Any]:
    """What `save_state` wrote; `ValueError` for a file that is no such state, or another recipe's."""
    state = None
    if zipfile.is_zipfile(path):  # `torch.save` writes one; what else lies there raises whatever its bytes lead to
        with suppress(pickle.UnpicklingError, RuntimeError):
            state = torch.load(path, weights_only=True, map_location="cpu")
    if not isinstance(state, dict) or not {"recipe", "precision", "trainer"} <= state.keys():
        raise ValueError(f"{path} is not the state of a training run; give a file that is yet to be written")
    if state["recipe"] != recipe:
        raise ValueError(f"{path} is the state of a run of {state['recipe']}, not of {recipe}; give another file")
    return state
