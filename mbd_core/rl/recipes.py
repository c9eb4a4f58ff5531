"""The recipes of reinforcement learning, by name."""

from dataclasses import replace

from mbd_core.multitf.config import TeacherSettings, TrainConfig
from mbd_core.multitf.step.objective import OBJECTIVES, PolicyObjective
from mbd_core.rl.config import HeldOutConfig, RLRecipe, RolloutConfig
from mbd_core.rl.groups import GroupConfig
from mbd_core.rl.parts import CORRECT, TPF
from mbd_core.rl.rewards import RewardConfig

ADAMW = TrainConfig(
    steps=1,
    batch_size=1,
    lr=1e-5,
    warmup=1,
    schedule="constant",
    optimizer="adamw",
    betas=(0.9, 0.999),
    weight_decay=0.0,
    precision="float32",
    micro_batch=1,
    pack=4096,
)
"""An optimizer for updates that must stay small; `RLRecipe` sets steps and batch. Answers share training sequences, so
little of an update is padding."""

LEDGER_RL = RLRecipe(
    name="ledger-rl",
    model="ledger-mbd",
    rollouts=RolloutConfig(task="ledger-mini", prompts=8, group=8, decoding={"buffer_size": 4, "tau_m2t": 0.9}),
    rewards=RewardConfig(rewards={CORRECT: 1.0, TPF: 1.0}),
    groups=GroupConfig(advantages="decoupled"),
    objective=OBJECTIVES["LightningRL"],
    train=replace(ADAMW, lr=5e-5),
    held_out=HeldOutConfig(evaluate_every=10, held_out=200),
    iterations=30,
)
"""LightningRL's reward, groups and objective, on the states of a MultiBD rollout, for a small model.

The learning rate is the best of four on held-out problems after 5 of these 30 iterations (research/rl).
"""

TINY_RL = replace(
    LEDGER_RL,
    name="tiny-rl",
    rollouts=replace(LEDGER_RL.rollouts, prompts=4, group=8),
    train=replace(ADAMW, lr=2e-5),
    held_out=HeldOutConfig(evaluate_every=12, held_out=32),
    iterations=12,
)
"""A first run, or a check that a cluster can run one: a minute or two on a CPU.

It is too short to learn much. With a learning rate of 1e-4 or more, updates of so few answers make the model worse.
"""

TINY_OPD = replace(
    TINY_RL,
    name="tiny-opd",
    rollouts=replace(TINY_RL.rollouts, prompts=32, group=1),
    objective=PolicyObjective(),
    train=replace(ADAMW, lr=1e-4, teacher=TeacherSettings(reads="blocks")),
    source="OPDLM (arXiv:2606.06712) in small, with the model at one slot as its own teacher",
)
"""On-policy distillation: `ledger-mbd` with four slots learns from itself block by block. For an adapted base the
teacher is `base`, which reads causally (docs/guide/rl.md)."""

LEDGER_OPD = replace(
    TINY_OPD,
    name="ledger-opd",
    rollouts=replace(TINY_OPD.rollouts, prompts=64),
    train=replace(
        TINY_OPD.train,
        lr=1e-3,
        warmup=5,
        schedule="linear",
        optimizer="muon",
        betas=(0.9, 0.95),
        precision="auto",
    ),
    held_out=HeldOutConfig(evaluate_every=20, held_out=200, thresholds=(0.8, 0.85, 0.9, 0.95)),
    iterations=160,
)
"""10,240 answers of `ledger-mbd`, taught by the same weights at one slot: the shipped model `ledger-opd`.

The learning rate falls to 0: at a constant rate a model ends in the noise of its last updates. Its gain is in
research/rl/README.md.
"""

RL_RECIPES = {recipe.name: recipe for recipe in (LEDGER_RL, LEDGER_OPD, TINY_RL, TINY_OPD)}


def rl_recipe_named(name: str) -> RLRecipe:
    """The recipe with that name; `ValueError` lists the known names."""
    if name not in RL_RECIPES:
        raise ValueError(f"unknown recipe '{name}'; known: {', '.join(sorted(RL_RECIPES))}")
    return RL_RECIPES[name]
