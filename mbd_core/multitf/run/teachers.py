"""A run's autoregressive teacher: which folder it is, and whether it can teach the run's model."""

from collections.abc import Callable

import torch

from mbd_core.checkpoint.folder import ModelFolder, read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.safetensor_files import read_json
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import BASE_TEACHER, TeacherSettings
from mbd_core.multitf.recipes.recipe import RECIPE, RL_RECIPE


def find_teacher(
    settings: TeacherSettings, base: ModelFolder | None, *, lora: bool, fetch: Callable[[str], str] = str
) -> ModelFolder | None:
    """The folder of a teacher that is loaded beside the student; `None` if the student without its adapter teaches.

    Raises `ValueError`, one sentence, for a teacher that cannot read as `settings.reads` says, or with another
    vocabulary.
    """
    by_blocks = settings.reads == "blocks"
    if base is None:
        raise ValueError(
            "a teacher needs a student of the same vocabulary, and this one begins with random weights: name a --base"
        )
    if settings.model == BASE_TEACHER:
        if not by_blocks:
            _check_base(base)
        return None if lora else base
    teacher = read_folder(model_folder(fetch(settings.model)))
    if by_blocks and (teacher.config.attention, teacher.config.mask_token_id, teacher.config.shift_logits) != (
        base.config.attention,
        base.config.mask_token_id,
        base.config.shift_logits,
    ):
        raise ValueError(
            f"teacher.reads=blocks: {settings.model}, a {teacher.config.architecture}, does not fill the masks of "
            f"{base.path}: give a model of its kind, or {BASE_TEACHER}"
        )
    if not by_blocks and teacher.config.attention != "causal":
        raise ValueError(
            f"--teacher {settings.model} is a {teacher.config.architecture}, which does not read causally: name the "
            "autoregressive model that the base was made of"
        )
    check_vocabulary(teacher, base)
    return teacher


def load_teacher(folder: ModelFolder, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The frozen teacher of a folder that `find_teacher` gave."""
    return load_model(folder.path, dtype=dtype, device=device).requires_grad_(False)


def _check_base(base: ModelFolder) -> None:
    remedy = "name the autoregressive model that it was made of with --teacher MODEL"
    if base.config.attention == "full" or base.config.gemma is not None:
        raise ValueError(
            f"{base.path} is a {base.config.architecture}, which does not read causally and is no teacher: {remedy}"
        )
    recipe = base.path / RECIPE
    is_ar = not recipe.exists() or read_json(recipe).get("states", {}).get("layouts") == "none"
    if not is_ar or (base.path / RL_RECIPE).exists():
        raise ValueError(
            f"{base.path} was trained to fill masks since it was autoregressive, and is no teacher any more: {remedy}"
        )


def check_vocabulary(teacher: ModelFolder, student: ModelFolder) -> None:
    """Raise `ValueError` unless both models have the same tokens; the student may have its mask beside them."""
    ours, theirs = (dict(folder.tokenizer.get_vocab()) for folder in (student, teacher))
    mask = student.config.mask_token_id
    differing = [
        token for token in {**theirs, **ours} if ours.get(token) != theirs.get(token) and ours.get(token) != mask
    ]
    if differing or teacher.config.vocab_size > student.config.vocab_size:
        what = f"'{min(differing)}' is another token there" if differing else "it has more tokens"
        raise ValueError(
            f"the teacher {teacher.path} has another vocabulary than {student.path}: {what}; name the autoregressive "
            "model that the base was made of"
        )
