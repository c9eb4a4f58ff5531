"""The recipes of the study on ledger-mini (`mbd_core/studies/ledger`): base, control, Table 2b's rows, editing.

All but the base go on from it, with the same data, updates and number of noisy streams, so that they differ
in their training states alone.
"""

from dataclasses import replace
from typing import Any

from mbd_core.multitf.data import TinyData
from mbd_core.multitf.noise import NoiseBounds
from mbd_core.multitf.tiny_recipes import TEACHER_FORCING, TINY_MBD, TINY_MODEL, TINY_THRESHOLDS
from mbd_core.multitf.train_config import TrainConfig
from mbd_core.multitf.training_recipe import TrainingRecipe

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
    source="this project's study on ledger-mini (docs/studies.md)",
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
"""Systematic and random layouts with chain-uniform noise: the method of the paper."""

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
"""Table 2b in small, by what each row is. The table's SingleBD row trains nothing; here the control has its compute.
Its last row is its third again, so D2F's noise stands here in both of its forms."""

LEDGER_OPUT = replace(
    LEDGER_MBD,
    name="ledger-oput",
    states=replace(LEDGER_MBD.states, labels="answer", self_denoising="half"),
)
"""MBD trained for editing: DMax's OPUT on its states, every token of the answer labelled. It has MBD's data and
updates, and a forward more in each for its own predictions."""

assert LEDGER_BD.model is not None
LEDGER_BD_B32 = replace(
    LEDGER_BD,
    name="ledger-bd-b32",
    model=replace(LEDGER_BD.model, block_size=32),
    data=TinyData(per_task=10_400, tasks=LEDGER_TASK),
    states=replace(LEDGER_BD.states, block_size=32),
    train=replace(LEDGER_BD.train, steps=1_300, warmup=130),
)
"""A base whose blocks are two pages. With `ledger-bd`'s updates it is too inaccurate for a study (docs/studies.md)."""

LEDGER_RECIPES = (LEDGER_BD, LEDGER_BD_B32, *ABLATION_ROWS.values(), LEDGER_OPUT)
