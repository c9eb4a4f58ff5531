"""The report of the study of ten thousand and a hundred thousand answers, from its rows alone."""

from itertools import groupby
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from mbd_core.files import file_beside, write_text
from research.ledger.plan import BASE, PLOT, REPORT, ROWS
from research.ledger.report import draw_study
from research.ledger.rows import bootstrap_means, paired_rows
from research.rl.long_arms import (
    A_LARGE,
    A_TAUGHT,
    A_TENTH,
    ANSWERS,
    B_TENTH,
    C_TENTH,
    E_TENTH,
    F_TENTH,
    SOLUTIONS,
    TAUGHT,
    TEACHER,
    A,
)
from research.rl.report import (
    AUP_ABOVE,
    TRAINING,
    ArmClaim,
    arm_lines,
    cell_sections,
    claim_lines,
    gathered,
    judge,
    of_recipes,
    seeds_of,
    training_lines,
)
from research.rl.teacher import TAUGHT_TAU, difference_lines

NAMES = {
    BASE: "the start",
    TAUGHT: "the shipped taught model",
    A.name: "A: correctness + TPF, 102,400 answers",
    A_LARGE.name: "A, 102,400 answers in 25 updates",
    A_TAUGHT.name: "A from the taught model",
    A_TENTH.name: "A: correctness + TPF",
    B_TENTH.name: "B: correctness alone",
    C_TENTH.name: "C: all-masked states",
    SOLUTIONS.name: "D: MultiTF on right solutions",
    E_TENTH.name: "E: likelihood of right answers",
    F_TENTH.name: "F: shuffled advantages",
    TEACHER.name: "taught by itself at one slot",
}
CLAIMS = (
    ArmClaim(
        text="a teacher gains 5 points at no lower TPF",
        first=TEACHER.name,
        second=BASE,
        measures=(("accuracy", 5.0), ("tpf", 0.0)),
        first_tau=TAUGHT_TAU,
    ),
    ArmClaim(
        text="a teacher is worth more than as many right solutions",
        first=TEACHER.name,
        second=SOLUTIONS.name,
        measures=AUP_ABOVE,
    ),
    ArmClaim(
        text="a hundred thousand rewarded answers raise the front", first=A.name, second=BASE, measures=AUP_ABOVE
    ),
    ArmClaim(text="as many in updates of 4,096 raise the front", first=A_LARGE.name, second=BASE, measures=AUP_ABOVE),
    ArmClaim(text="rewards raise a taught model's front", first=A_TAUGHT.name, second=TAUGHT, measures=AUP_ABOVE),
    ArmClaim(text="it is the reward: A above F", first=A_TENTH.name, second=F_TENTH.name, measures=AUP_ABOVE),
)
CURVES = "curves.png"


def report(out: Path) -> str:
    """Gathers the rows of finished pieces, and writes study.md and two pictures; returns the Markdown.

    Cells are of the models that have all seeds of the start. Raises `ValueError` if there are no rows of the start.
    """
    table = gathered(out)
    names, start = [name for name in NAMES if seeds_of(table, name)], seeds_of(table, BASE)
    rows = of_recipes(table, [name for name in names if seeds_of(table, name) == start])
    if rows is None:
        raise ValueError(f"{out / ROWS} has no rows of the start, with which all models are compared")
    means = bootstrap_means(paired_rows(rows))
    with file_beside(out / PLOT) as new_file, new_file.open("wb") as file:
        draw_study(means, file, names=NAMES)
    training = pq.read_table(out / TRAINING) if (out / TRAINING).exists() else None
    if training is not None:
        draw_curves(training, out / CURVES)
    lines = [
        "# What ten thousand and a hundred thousand answers teach",
        "",
        f"`ledger-mbd`, four slots, {ANSWERS:,} answers each unless said otherwise; unseen problems of ledger-mini. "
        "Brackets: 95 % intervals over problems and seeds; of one seed they say nothing of another run.",
        "",
        "## Claims",
        "",
        *claim_lines([judge(claim, table) for claim in CLAIMS]),
        "",
        "## Each model minus the start, at tau_m2t = 0.9",
        "",
        *arm_lines(table, {name: NAMES[name] for name in names if name != BASE}),
        "",
        f"## At tau_m2t = {TAUGHT_TAU} minus the start at 0.9",
        "",
        *difference_lines(table, names, NAMES, taus=(TAUGHT_TAU,)),
        "",
        *(["## What training saw", "", *training_lines(training, NAMES), ""] if training is not None else []),
        f"![right answers and tokens per forward over rollouts]({CURVES})",
        "",
        *cell_sections(means, NAMES),
    ]
    text = "\n".join(lines)
    write_text(out / REPORT, text)
    return text


def draw_curves(training: pa.Table, path: Path) -> None:
    """Right answers and TPF of the rollouts over the number of answers; means of 2,560 answers at a time."""
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
