"""The recipes of the tiny models, and what recipes of other small models share with them."""

from dataclasses import replace

from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.data import TinyData
from mbd_core.multitf.states import StateConfig
from mbd_core.multitf.train_config import TrainConfig
from mbd_core.multitf.training_recipe import TrainingRecipe

TINY_VOCAB = 640

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

TINY_RECIPES = (TINY_BD_B8, TINY_BD, TINY_MBD, TINY_TF)
