"""The arms of the study of reinforcement learning on ledger-mini, as recipes; research/rl/README.md states its claims.

mbd rl --recipe research/rl/arms.py:A --seed 1 --storage out/rl --run-name A-1

All arms begin with the shipped `ledger-mbd`, decode at four slots, and get the same problems. Each differs from A only
in its claim's subject.
"""

from dataclasses import replace

from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.recipes.shipped import LEDGER_MBD
from mbd_core.multitf.step.objective import PolicyObjective
from mbd_core.rl.config import RLRecipe
from mbd_core.rl.groups import GroupConfig
from mbd_core.rl.parts import CORRECT
from mbd_core.rl.recipes import LEDGER_RL
from mbd_core.rl.rewards import RewardConfig

ITERATIONS = 5
A = replace(
    LEDGER_RL,
    name="rl-A",
    rollouts=replace(LEDGER_RL.rollouts, fresh_problems=False),
    iterations=ITERATIONS,
)
"""Exact replay, correctness and TPF: LightningRL's reward, groups and objective in the states of the engine.

A run's seed chooses its stream of problems. The stream of seed 1 is the stream on which `ledger-mbd` was trained.
"""

B = replace(
    A,
    name="rl-B",
    rewards=RewardConfig(rewards={CORRECT: 1.0}),
    groups=replace(A.groups, least_right=0.01, least_tpf_range=0.01),  # A's, also where TPF is not rewarded
)
"""Correctness alone."""

C = replace(A, name="rl-C", states="all-masked")
"""LightningRL's released learner: each block in one forward, all its tokens masked."""

SFT_UPDATES = 36
"""As many updates of `ledger-mbd`'s recipe (6,640 tokens each) as make A's learner tokens: 5 iterations of 48,000.

48,000 is the mean number of tokens in the groups that pass A's filter, over ten iterations of the runs that chose the
learning rate.
"""
D = replace(LEDGER_MBD, name="rl-D", base="ledger-mbd", train=replace(LEDGER_MBD.train, steps=SFT_UPDATES, warmup=4))
"""MultiTF on right solutions for the same number of learner tokens: a recipe of `mbd train`."""

E = replace(A, name="rl-E", groups=GroupConfig(advantages="correct"), objective=PolicyObjective())
"""The likelihood of correct rollouts alone, each with the advantage 1."""

F = replace(A, name="rl-F", groups=replace(A.groups, advantages="shuffled"))
"""A's advantages, shuffled within each group: they teach nothing. A's NLL term, the likelihood of correct rollouts,
stays."""

G = replace(A, name="rl-G", states="block-local")
"""TraceRL's states, which are not the engine's at four slots."""

LONG = replace(A, name="rl-A-20", iterations=20)
"""A for four times as long. Its first iterations equal A's. No claim was stated about it beforehand."""

LOW = replace(LEDGER_RL.train, lr=1e-5)
LOW_A = replace(LONG, name="rl-A-20-low", train=LOW)
LOW_E = replace(E, name="rl-E-20-low", iterations=20, train=LOW)
"""A and E with 20 iterations at a fifth of the learning rate. `LOW_E` was added after the result of E was known."""

ARMS: dict[str, RLRecipe | TrainingRecipe] = {arm.name: arm for arm in (A, C, D, E, F, B, G, LONG, LOW_A, LOW_E)}
"""In the order in which a study runs them."""
