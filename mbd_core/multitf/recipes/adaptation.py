"""Recipes that train an autoregressive (AR) base further: as it is, the control of every adaptation.

They take any base of their kind, and any data. The optimisation is the same in all of them, so that arms of a study
differ in their training states alone; a paper's own numbers stand in `source`.
"""

from mbd_core.multitf.config import TrainConfig
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.states.layout import StateConfig

TRAINING = TrainConfig(
    steps=1000,
    batch_size=32,
    lr=2e-5,
    lr_min=1e-7,
    warmup=30,
    schedule="cosine",
    optimizer="adamw",
    betas=(0.9, 0.999),
    weight_decay=0.01,
    micro_batch=1,
)

AR = TrainingRecipe(
    name="ar",
    base=None,
    model=None,
    data=None,
    states=StateConfig(block_size=1, layouts="none", weighting="ratio_mean", ar_weight=1.0),
    train=TRAINING,
    max_length=2048,
    generation={},
    source="plain fine-tuning: the mean CE of the next token over all labels of a batch, as in transformers",
)

ADAPTATION_RECIPES = (AR,)
