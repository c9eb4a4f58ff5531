"""Ledger-mbd learns from ten thousand and a hundred thousand answers: rewards beside a teacher and right solutions.

The arms of `rl/arms.py` had 320 answers, and their updates 64. Here an update has 512 answers to 64 problems that no
model was trained on, and the learning rate falls to 0. An arm has 10,240 answers; `long-A` has ten times as many, at
a third of the rate.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jobs.command_line import OutFolder, OwnThreads
from mbd_core.command_line import command
from mbd_core.fields import MODEL, OUTPUT, Flag
from mbd_core.files import file_beside, write_text
from mbd_core.multitf.data.prepared import TinyData
from mbd_core.multitf.step.objective import PolicyObjective
from mbd_core.rl.groups import GroupConfig
from mbd_core.rl.parts import CORRECT
from mbd_core.rl.recipes import LEDGER_OPD, LEDGER_RL
from mbd_core.rl.rewards import RewardConfig
from research.ledger.plan import BASE, PLOT, REPORT, ROWS
from research.rl.study import ArmStudySize, compute_arms
from research.rl.teacher import SOLUTIONS as FEW_SOLUTIONS

if TYPE_CHECKING:
    import pyarrow as pa

    from mbd_core.multitf.recipes.recipe import TrainingRecipe
    from mbd_core.rl.config import RLRecipe

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
TEACHER = replace(
    LEDGER_OPD,
    name="tenth-teacher",
    train=replace(LEDGER_OPD.train, warmup=5, precision="bfloat16"),
    iterations=ANSWERS // LEDGER_OPD.answers,
)
"""`ledger-opd` for as many answers, 64 an update."""
assert isinstance(FEW_SOLUTIONS.data, TinyData)
SOLUTIONS = replace(
    FEW_SOLUTIONS,
    name="tenth-solutions",
    data=replace(FEW_SOLUTIONS.data, per_task=ANSWERS),
    train=replace(TEACHER.train, steps=TEACHER.iterations, batch_size=TEACHER.answers, teacher=None),
)
"""MultiTF on as many right solutions, with the teacher's optimizer, rate and batch."""

LONG_ARMS: dict[str, RLRecipe | TrainingRecipe] = {
    arm.name: arm for arm in (TEACHER, SOLUTIONS, F_TENTH, A_TENTH, B_TENTH, E_TENTH, C_TENTH, A)
}
NAMES = {
    BASE: "the start",
    A.name: "A: correctness + TPF, 102,400 answers",
    A_TENTH.name: "A: correctness + TPF",
    B_TENTH.name: "B: correctness alone",
    C_TENTH.name: "C: all-masked states",
    SOLUTIONS.name: "D: MultiTF on right solutions",
    E_TENTH.name: "E: likelihood of right answers",
    F_TENTH.name: "F: shuffled advantages",
    TEACHER.name: "taught by itself at one slot",
}
SIZE = ArmStudySize(seeds=(1, 2, 3), problems=300, taus=(0.7, 0.8, 0.85, 0.9, 0.95))
CURVES = "curves.png"
CHOICE = f"Train these arms alone: {', '.join(LONG_ARMS)}."


def run(
    *,
    out: OutFolder,
    size: ArmStudySize = SIZE,
    arms: Annotated[tuple[str, ...], Flag(CHOICE, MODEL, metavar="NAME,...", commas=True, default="all")] = (),
    threads: OwnThreads = None,
    report_only: Annotated[bool, Flag("Write the report again, from the rows that are there.", OUTPUT)] = False,
) -> None:
    """Train ledger-mbd by rewards, by itself at one slot and by right solutions, each on 10,240 answers or more.

    The same command computes what is missing. If it runs twice at once, both share the work.
    """
    if unknown := [name for name in arms if name not in LONG_ARMS]:
        raise ValueError(f"--arms {unknown[0]} is no arm; choose of {', '.join(LONG_ARMS)}")
    if not report_only:
        compute_arms(out, LONG_ARMS, size, threads, only=arms)
    print(report(out))


def report(out: Path) -> str:
    """Gathers the rows of finished pieces, and writes study.md and two pictures; returns the Markdown.

    The cells are of the seeds that all models have.
    """
    import pyarrow.parquet as pq

    from research.ledger.report import draw_study
    from research.ledger.rows import bootstrap_means, paired_rows
    from research.rl.report import TRAINING, arm_lines, cell_sections, gathered, of_recipes
    from research.rl.teacher import TAUGHT_TAU, difference_lines

    table = gathered(out)
    names = [name for name in NAMES if name in set(table["recipe"].to_pylist())]
    rows = of_recipes(table, names)
    if rows is None:
        raise ValueError(f"{out / ROWS} has no seed that {', '.join(names)} share")
    means = bootstrap_means(paired_rows(rows))
    with file_beside(out / PLOT) as new_file, new_file.open("wb") as file:
        draw_study(means, file, names=NAMES)
    draw_curves(pq.read_table(out / TRAINING), out / CURVES)
    lines = [
        "# What ten thousand and a hundred thousand answers teach",
        "",
        f"`ledger-mbd`, four slots, {ANSWERS:,} answers each unless said otherwise; unseen problems of ledger-mini. "
        "Brackets: 95 % intervals over problems and seeds; of one seed they say nothing of another run.",
        "",
        "## Each model minus the start, at tau_m2t = 0.9",
        "",
        *arm_lines(table, {name: NAMES[name] for name in names if name != BASE}),
        "",
        f"## At tau_m2t = {TAUGHT_TAU} minus the start at 0.9",
        "",
        *difference_lines(table, names, NAMES, taus=(TAUGHT_TAU,)),
        "",
        f"![right answers and tokens per forward over rollouts]({CURVES})",
        "",
        *cell_sections(means, NAMES),
    ]
    text = "\n".join(lines)
    write_text(out / REPORT, text)
    return text


def draw_curves(training: pa.Table, path: Path) -> None:
    """Right answers and TPF of the rollouts over the number of answers; means of 2,560 answers at a time."""
    from itertools import groupby
    from statistics import fmean

    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for place, (column, title) in enumerate((("correct", "right rollouts"), ("tpf", "tokens per forward"))):
        axes = figure.add_subplot(1, 2, place + 1)
        for name, label in NAMES.items():
            lines = [line for line in training.to_pylist() if line["recipe"] == name]
            lines.sort(key=lambda line: (line["iteration"], line["seed"]))
            parts = groupby(lines, key=lambda line: line["rollouts"] * line["iteration"] // 2_560)
            points = [
                (
                    fmean(each["rollouts"] * (each["iteration"] + 1) for each in part),
                    fmean(each[column] for each in part),
                )
                for part in ([*of_part] for _, of_part in parts)
            ]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker=".")
        axes.set(xlabel="answers", title=title, xscale="log")
        axes.grid(alpha=0.3)
    figure.axes[1].legend(fontsize=7)
    with file_beside(path) as new_file, new_file.open("wb") as file:
        figure.savefig(file, format="png", dpi=150)


main = command(run, "python -m research long")
