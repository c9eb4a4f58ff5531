"""The study's training runs as recipes: `mbd train --recipe research/real/recipes.py:BD --base DIR --data DIR`.

Every arm is an adapter of one size on the same data. `AR`, the control, fine-tunes the base as it is. `BD` adapts the
converted base by teacher forcing, `MBD` continues from `BD` by MultiTF, and `TF` has the compute of `MBD`, by teacher
forcing.
"""

from dataclasses import replace

from mbd_core.multitf.config import LoraSettings, TrainConfig
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.states.layout import StateConfig

EVERY_PROJECTION = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
THRESHOLDS = {"tau_add": 0.1, "tau_semi": 0.9, "tau_m2t": 0.9}
SOURCE = "this project's study on a real model (research/README.md)"

BD = TrainingRecipe(
    name="real-bd",
    base=None,
    model=None,
    data=None,
    states=StateConfig(
        block_size=8, max_group=1, num_layouts=1, span="response", schedule="independent_uniform", rounding="ceil"
    ),
    train=TrainConfig(
        steps=2_000,
        batch_size=8,
        micro_batch=4,
        lr=1e-3,
        warmup=20,
        optimizer="adamw",
        betas=(0.9, 0.99),
        lora=LoraSettings(rank=16, alpha=32, dropout=0.0, modules=EVERY_PROJECTION),
    ),
    max_length=320,
    generation={"buffer_size": 1, **THRESHOLDS, "trained_with": "teacher_forcing"},
    source=SOURCE,
)
TF = replace(BD, name="real-tf", states=replace(BD.states, num_layouts=2), train=replace(BD.train, steps=1_000))
MBD = replace(
    TF,
    name="real-mbd",
    states=replace(TF.states, max_group=4, num_random=1, schedule="chain_uniform"),
    generation={"buffer_size": 4, **THRESHOLDS, "trained_with": "multitf"},
)
AR = replace(
    BD,
    name="real-ar",
    states=StateConfig(block_size=1, layouts="none", weighting="ratio_mean", ar_weight=1.0),
    generation={},
)
