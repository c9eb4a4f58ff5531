"""Arms of ten and a hundred thousand answers of ledger-mini, as recipes; research/rl/README.md has their claims."""

from dataclasses import replace

from mbd_core.multitf.data.prepared import TinyData
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.step.objective import PolicyObjective
from mbd_core.rl.config import RLRecipe
from mbd_core.rl.groups import GroupConfig
from mbd_core.rl.parts import CORRECT
from mbd_core.rl.recipes import LEDGER_OPD, LEDGER_RL
from mbd_core.rl.rewards import RewardConfig
from research.ledger.plan import BASE
from research.rl.teacher import SOLUTIONS as FEW_SOLUTIONS

UPDATES = 20
A_TENTH = replace(
    LEDGER_RL,
    name="tenth-A",
    rollouts=replace(LEDGER_RL.rollouts, prompts=64, part_rows=128),
    objective=PolicyObjective(),
    train=replace(LEDGER_RL.train, lr=3e-5, warmup=2, schedule="linear", precision="bfloat16"),
    iterations=UPDATES,
)
"""Correctness and TPF, decoupled, on the engine's states, without a reference and without likelihoods."""
A = replace(A_TENTH, name="long-A", train=replace(A_TENTH.train, lr=1e-5, warmup=5), iterations=10 * UPDATES)
A_LARGE = replace(
    A,
    name="large-A",
    rollouts=replace(A.rollouts, prompts=512),
    train=replace(A.train, lr=1e-4, warmup=2),
    iterations=A.iterations // 8,
)
"""A's 102,400 answers in updates of 4,096, at ten times its rate: what the measured share of signal asks for."""
A_TAUGHT = replace(A_TENTH, name="taught-A", model=LEDGER_OPD.name)
"""A with 10,240 answers, from the taught model that is shipped."""
B_TENTH = replace(
    A_TENTH,
    name="tenth-B",
    rewards=RewardConfig(rewards={CORRECT: 1.0}),
    groups=replace(A_TENTH.groups, least_right=0.01, least_tpf_range=0.01),
)
C_TENTH = replace(A_TENTH, name="tenth-C", states="all-masked")
E_TENTH = replace(A_TENTH, name="tenth-E", groups=GroupConfig(advantages="correct"))
F_TENTH = replace(A_TENTH, name="tenth-F", groups=replace(A_TENTH.groups, advantages="shuffled"))

ANSWERS = A_TENTH.answers * UPDATES
TEACHER = replace(LEDGER_OPD, name="tenth-teacher", train=replace(LEDGER_OPD.train, precision="bfloat16"))
"""`ledger-opd`, which has 64 answers an update."""
assert TEACHER.answers * TEACHER.iterations == ANSWERS
assert isinstance(FEW_SOLUTIONS.data, TinyData)
SOLUTIONS = replace(
    FEW_SOLUTIONS,
    name="tenth-solutions",
    data=replace(FEW_SOLUTIONS.data, per_task=ANSWERS),
    train=replace(
        TEACHER.train,
        steps=TEACHER.iterations,
        batch_size=TEACHER.answers,
        teacher=None,
        pack=None,
        micro_batch=4,
    ),
)
"""MultiTF on as many right solutions, with the teacher's optimizer, rate and batch."""

LONG_ARMS: dict[str, RLRecipe | TrainingRecipe] = {
    arm.name: arm for arm in (TEACHER, SOLUTIONS, F_TENTH, A_TENTH, B_TENTH, E_TENTH, C_TENTH, A_TAUGHT, A_LARGE, A)
}
TAUGHT = "taught"
STARTS = {BASE: A.model, TAUGHT: A_TAUGHT.model}
