"""Training runs by name: the recipes of the tiny models, and what a command changes in one."""

from dataclasses import dataclass, replace
from typing import Any

from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.data import TOKENIZER_PAIRS, TinyData
from mbd_core.multitf.precision import Precision
from mbd_core.multitf.sample import StateConfig
from mbd_core.multitf.trainer import TrainConfig

TINY_VOCAB = 640


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """What is trained, on what, and how.

    The run starts from the model `base` (a shipped model's name or an absolute path), or, without one, from random
    weights of the configuration `model`. `states.block_size` is the trained model's block size, whatever the base had.
    `generation` is what the trained model recommends for decoding.
    """

    name: str
    base: str | None
    model: ModelConfig | None
    data: TinyData
    states: StateConfig
    train: TrainConfig
    max_length: int
    generation: dict[str, Any]


TINY_MODEL = ModelConfig(
    architecture="SDARForCausalLM",
    vocab_size=TINY_VOCAB,
    hidden_size=192,
    intermediate_size=512,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=48,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    max_positions=1024,
    tie_word_embeddings=True,
    mask_token_id=0,
    eos_token_ids=(1,),
    block_size=8,
)

TEACHER_FORCING = StateConfig(
    block_size=8,
    max_group=1,
    num_layouts=2,
    span="response",
    schedule="independent_uniform",
    rounding="ceil",
)
TINY_THRESHOLDS = {"tau_add": 0.1, "tau_semi": 0.9, "tau_m2t": 0.9}

TINY_BD_B8 = TrainingRecipe(
    name="tiny-bd-b8",
    base=None,
    model=TINY_MODEL,
    data=TinyData(per_task=60_000),
    states=TEACHER_FORCING,
    train=TrainConfig(steps=3000, batch_size=48, lr=3e-3),
    max_length=160,
    generation={"buffer_size": 1, **TINY_THRESHOLDS, "trained_with": "teacher_forcing"},
)

TINY_BD = TrainingRecipe(
    name="tiny-bd",
    base="tiny-bd-b8",
    model=None,
    data=TinyData(per_task=60_000, seed=1),
    states=replace(TEACHER_FORCING, block_size=16),
    train=TrainConfig(steps=900, batch_size=48, lr=2e-3),
    max_length=160,
    generation={"buffer_size": 1, **TINY_THRESHOLDS, "trained_with": "teacher_forcing"},
)

TINY_MBD = TrainingRecipe(
    name="tiny-mbd",
    base="tiny-bd",
    model=None,
    data=TinyData(per_task=60_000, seed=2),
    states=StateConfig(
        block_size=16,
        max_group=4,
        num_random=3,
        num_layouts=4,
        span="response",
        schedule="chain_uniform",
        rounding="ceil",
    ),
    train=TrainConfig(steps=800, batch_size=24, lr=1.5e-3),
    max_length=160,
    generation={"buffer_size": 4, **TINY_THRESHOLDS, "trained_with": "multitf"},
)

# The control for TINY_MBD: the same base, data, updates and number of noisy streams, by teacher forcing. Not shipped.
TINY_TF = replace(
    TINY_MBD,
    name="tiny-tf",
    states=replace(TEACHER_FORCING, block_size=16, num_layouts=4),
    generation={"buffer_size": 1, **TINY_THRESHOLDS, "trained_with": "teacher_forcing"},
)

RECIPES: dict[str, TrainingRecipe] = {r.name: r for r in (TINY_BD_B8, TINY_BD, TINY_MBD, TINY_TF)}


def recipe_named(name: str) -> TrainingRecipe:
    """The recipe of that name; `ValueError` lists the known names."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe '{name}'; known: {', '.join(sorted(RECIPES))}")
    return RECIPES[name]


def shortened(recipe: TrainingRecipe, steps: int) -> TrainingRecipe:
    """The recipe with `steps` updates: the schedule in proportion, and no more samples than the updates consume.

    A recipe that also trains its tokenizer keeps the samples that the tokenizer is learned from.
    """
    warmup = max(1, round(recipe.train.warmup * steps / recipe.train.steps))
    train = replace(recipe.train, steps=steps, warmup=warmup)
    consumed = steps * train.batch_size
    pairs = max(consumed, TOKENIZER_PAIRS) if recipe.base is None else consumed
    data = replace(recipe.data, per_task=min(recipe.data.per_task, -(-pairs // 2)))
    return replace(recipe, train=train, data=data)


def with_precision(recipe: TrainingRecipe, precision: Precision) -> TrainingRecipe:
    """The recipe computed in `precision`."""
    return replace(recipe, train=replace(recipe.train, precision=precision))


def start_line(recipe: TrainingRecipe, *, num_workers: int = 1) -> str:
    """What a run says when it starts: the recipe's size and the precision it computes in."""
    train, data = recipe.train, recipe.data
    return (
        f"recipe {recipe.name}: {train.steps} steps of {train.batch_size} samples in {train.precision}, "
        f"{num_workers} worker{'s' * (num_workers > 1)}, {data.per_task} problems of each task"
    )
