"""The recipes of the shipped models: the tiny models, and the models of the study on ledger-mini (`research/ledger`).

In the study, all recipes but the bases go on from one base, with the same data, updates and number of noisy streams.
So they differ only in their training states.
"""

from dataclasses import replace
from typing import Any

from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.config import TrainConfig
from mbd_core.multitf.data.prepared import TinyData
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.noise import NoiseBounds

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


LEDGER_TASK = ("ledger-mini",)
NUM_STREAMS = 4
"""Noisy streams of a sample in every recipe that goes on from the base."""

LEDGER_BD = TrainingRecipe(
    name="ledger-bd",
    base=None,
    model=replace(
        TINY_MODEL,
        vocab_size=320,
        hidden_size=128,
        intermediate_size=384,
        num_layers=2,
        head_dim=32,
        block_size=16,
    ),
    data=TinyData(per_task=26_000, tasks=LEDGER_TASK),
    states=replace(TEACHER_FORCING, block_size=16),
    train=TrainConfig(steps=1_000, batch_size=8, lr=3e-3, decay=1 / 6),
    max_length=320,
    generation={"buffer_size": 1, **TINY_THRESHOLDS, "trained_with": "teacher_forcing"},
    source="this project's study on ledger-mini (research/README.md)",
)

LEDGER_MBD = replace(
    LEDGER_BD,
    name="ledger-mbd",
    base="ledger-bd",
    model=None,
    data=TinyData(per_task=2_400, tasks=LEDGER_TASK, seed=1),
    states=replace(TINY_MBD.states, num_layouts=NUM_STREAMS),
    train=TrainConfig(steps=300, batch_size=8, lr=1.5e-3, warmup=30),
    generation={"buffer_size": 4, **TINY_THRESHOLDS, "trained_with": "multitf"},
)
"""The paper's method: systematic and random layouts with chain-uniform noise."""

LEDGER_TF = replace(
    LEDGER_MBD,
    name="ledger-tf",
    states=replace(LEDGER_BD.states, num_layouts=NUM_STREAMS),
    generation={"buffer_size": 1, **TINY_THRESHOLDS, "trained_with": "teacher_forcing"},
)
"""The control: the same compute by teacher forcing."""


def _row(name: str, **states: Any) -> TrainingRecipe:
    return replace(LEDGER_MBD, name=f"ledger-{name}", states=replace(LEDGER_MBD.states, **states))


ONE_GROUP: dict[str, Any] = {"layouts": "one_group", "max_group": 1, "num_random": 0}
ABLATION_ROWS: dict[str, TrainingRecipe] = {
    "teacher forcing": LEDGER_TF,
    "systematic layouts": _row("systematic", num_random=0),
    "random layouts": _row("random", layouts="random", num_random=NUM_STREAMS),
    "systematic + random layouts, chain-uniform": LEDGER_MBD,
    "D2F: a linear ramp over one group": _row("d2f-linear", **ONE_GROUP, schedule="linear"),
    "D2F: its monotonic schedule over one group": _row(
        "d2f-monotonic",
        **ONE_GROUP,
        schedule="d2f_monotonic",
        bounds=NoiseBounds(t_low=0.2, t_high=0.7, margin=0.0),
    ),
    "power-law noise": _row("power-law", schedule="power_law"),
    "sorted-uniform noise": _row("sorted", schedule="sorted_uniform"),
}
"""Table 2b in small, by row. The table's SingleBD row is the base without further training; our control is trained as
long as the other rows. The table's last row repeats its third row; here both forms of D2F's noise have a row."""

LEDGER_OPUT = replace(
    LEDGER_MBD,
    name="ledger-oput",
    states=replace(LEDGER_MBD.states, labels="answer", self_denoising="half"),
)
"""MBD trained for editing: DMax's OPUT on its states, every token of the answer labelled. It has MBD's data and
updates, and one more forward in each update for its own predictions."""

assert LEDGER_BD.model is not None
LEDGER_BD_B32 = replace(
    LEDGER_BD,
    name="ledger-bd-b32",
    model=replace(LEDGER_BD.model, block_size=32),
    data=TinyData(per_task=10_400, tasks=LEDGER_TASK),
    states=replace(LEDGER_BD.states, block_size=32),
    train=replace(LEDGER_BD.train, steps=1_300, warmup=130),
)
"""A base whose blocks are two pages. With `ledger-bd`'s updates it is too inaccurate for a study (research/)."""

LEDGER_RECIPES = (LEDGER_BD, LEDGER_BD_B32, *ABLATION_ROWS.values(), LEDGER_OPUT)
