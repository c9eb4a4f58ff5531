"""A training run as a value: the model, the data, the optimisation, and a command's changes in them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mbd_core.fields import DATA, OUTPUT, Flag, Ge, configuration
from mbd_core.json_text import differing_fields
from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.config import Precision, TrainConfig
from mbd_core.multitf.data.prepared import TOKENIZER_PAIRS, PreparedData, TinyData
from mbd_core.multitf.states.fitted_noise import read_noise
from mbd_core.multitf.states.layout import StateConfig

if TYPE_CHECKING:
    import torch

RECIPE, RL_RECIPE = "recipe.json", "rl_recipe.json"
"""The files of a trained model's folder that hold its recipe, and that of its reinforcement learning."""


@configuration(panel=DATA)
class TrainingRecipe:
    """The model to train, its data and its optimisation.

    The run starts from the model `base` (a shipped model's name or an absolute path) or, without one, from random
    weights of the configuration `model`. A recipe with neither, or without `data`, needs them from the user;
    `architectures` then names the models that it is for; empty: any model that the training states fit. `max_length`
    bounds a sample with its fill, of which up to `trailing_fill` tokens are added beyond the last block.
    `states.block_size` is the trained model's block size, whatever the base had. `generation` is the trained model's
    recommended decoding. `source` is the origin of the numbers.
    """

    name: Annotated[str, Flag(name=False)]
    """The name of the run and of its folder."""
    base: Annotated[str | None, Flag(name=False)]
    """A shipped model's name, or an absolute path."""
    model: ModelConfig | None
    data: TinyData | PreparedData | None
    states: StateConfig
    train: TrainConfig
    max_length: Annotated[int, Ge(1)]
    """Tokens of a sample with its fill, at most."""
    generation: Annotated[dict[str, Any], Flag(panel=OUTPUT, metavar="JSON")]
    """The decoding that the trained model recommends."""
    trailing_fill: Annotated[int, Ge(0)] = 0
    """Tokens of fill beyond the last block, at most."""
    architectures: tuple[str, ...] = ()
    source: str = "this project's own (research/README.md)"


def shortened(recipe: TrainingRecipe, steps: int) -> TrainingRecipe:
    """The recipe with `steps` updates: the schedule in proportion, and only the generated samples that they consume.

    A recipe that also trains its tokenizer keeps the samples for the tokenizer.
    """
    warmup = max(1, round(recipe.train.warmup * steps / recipe.train.steps))
    train = replace(recipe.train, steps=steps, warmup=warmup)
    if not isinstance(recipe.data, TinyData):
        return replace(recipe, train=train)
    num_samples = steps * train.batch_size
    pairs = max(num_samples, TOKENIZER_PAIRS) if recipe.base is None else num_samples
    data = replace(recipe.data, per_task=min(recipe.data.per_task, -(-pairs // len(recipe.data.tasks))))
    return replace(recipe, train=train, data=data)


def with_precision(recipe: TrainingRecipe, precision: Precision) -> TrainingRecipe:
    """The recipe computed in `precision`."""
    return replace(recipe, train=replace(recipe.train, precision=precision))


WITHOUT_EFFECT = (
    "micro_batch",
    "pack",
    "activation_checkpointing",
    "attention",
    "compile",
    "tensor_parallel",
    "cut_experts",
)
"""Fields that leave updates as they are, up to the order of sums. A resumed run may change them."""


def with_fitted_noise(recipe: TrainingRecipe, path: Path) -> TrainingRecipe:
    """The recipe with the mask ratios of a file by `write_noise`, instead of its own schedule's.

    Raises `ValueError` as `read_noise` does.
    """
    bounds = replace(recipe.states.bounds, fitted=read_noise(path))
    return replace(recipe, states=replace(recipe.states, schedule="fitted", bounds=bounds))


def as_recorded(recipe: TrainingRecipe) -> dict[str, Any]:
    """The recipe as JSON gives it back."""
    recorded = json.loads(json.dumps(asdict(recipe), default=str))
    assert isinstance(recorded, dict)
    return recorded


def other_settings(recorded: dict[str, Any], given: dict[str, Any]) -> str:
    """The fields in which two recorded recipes differ, in words; "" if they differ at most in `WITHOUT_EFFECT`."""
    return differing_fields(_with_effect(recorded), _with_effect(given))


def _with_effect(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe without fields that have no effect on the weights; `source` is a citation.

    Old records lack some fields: generated data without `tasks` are of both tasks, an adapter's base is not quantised,
    there is no teacher, and training states have later fields' defaults.
    """
    kept = {name: value for name, value in recipe["train"].items() if name not in WITHOUT_EFFECT}
    train = {"teacher": None} | kept
    if isinstance(train["lora"], dict):
        train["lora"] = {"quantize_base": None, "start": None} | train["lora"]
    data = recipe["data"]
    if isinstance(data, dict) and "per_task" in data:
        data = {"tasks": list(TinyData.tasks)} | data
    states = {**json.loads(json.dumps(asdict(StateConfig(block_size=1)))), **recipe["states"]}
    kept = {name: value for name, value in recipe.items() if name != "source"}
    return {**kept, "train": train, "data": data, "states": states}


def start_line(recipe: TrainingRecipe, *, device: torch.device, num_workers: int = 1) -> str:
    """The first line of a run: the recipe's size, the precision, and the attention.

    Raises `ValueError` for an attention that cannot be trained on `device`.
    """
    from mbd_core.multitf.states.training_attention import TrainingAttention

    train, data = recipe.train, recipe.data
    pack_text = "" if train.pack is None else f", samples packed up to {train.pack:,} tokens"
    problems = f"{data.per_task} problems of each task" if isinstance(data, TinyData) else f"samples of {data}"
    return (
        f"recipe {recipe.name}: {train.steps} steps of {train.batch_size} samples in {train.precision}, "
        f"{num_workers} worker{'s' * (num_workers > 1)}, {problems}, "
        f"{TrainingAttention(train.attention, device).describe()}{', compiled layers' * train.compile}{pack_text}"
    )
