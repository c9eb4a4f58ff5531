"""Learning from the same weights at one slot, compared with a reward and with right solutions: arms, seeds, report.

`ledger-mbd` is right in 80 % of the answers at one slot and in 60 % at four. It draws answers at four slots; its
frozen copy reads them block by block, after finished blocks, and teaches. All arms see the same number of answers, to
problems that no model was trained on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jobs.command_line import OutFolder, OwnThreads
from mbd_core.command_line import command, refuse_given
from mbd_core.fields import OUTPUT, Flag
from mbd_core.files import file_beside, write_text
from mbd_core.multitf.data.prepared import TinyData
from mbd_core.multitf.recipes.shipped import LEDGER_MBD
from mbd_core.rl.config import FRESH_STREAMS
from mbd_core.rl.recipes import LEDGER_OPD, LEDGER_RL
from research.ledger.plan import BASE, PLOT, REPORT, ROWS
from research.rl.study import ArmStudySize, compute_arms
from research.tables import table_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from mbd_core.multitf.recipes.recipe import TrainingRecipe
    from mbd_core.rl.config import RLRecipe

TEACHER = replace(
    LEDGER_OPD, name="opd-teacher", train=replace(LEDGER_OPD.train, warmup=2, precision="float32"), iterations=20
)
REWARD = replace(LEDGER_RL, name="opd-reward", iterations=TEACHER.iterations)
"""`ledger-rl`: correctness and TPF, 8 answers to each of 8 problems."""

assert isinstance(LEDGER_MBD.data, TinyData)
SOLUTIONS = replace(
    LEDGER_MBD,
    name="opd-solutions",
    base="ledger-mbd",
    data=replace(LEDGER_MBD.data, per_task=TEACHER.answers * TEACHER.iterations, seed=FRESH_STREAMS),
    train=replace(
        TEACHER.train,
        steps=TEACHER.iterations,
        batch_size=TEACHER.answers,
        teacher=None,
        pack=None,  # a dense mask computes the pairs of a whole training sequence
        micro_batch=4,
    ),
)
"""MultiTF on the same number of right solutions, with the teacher's optimizer, rate and batch. It is a recipe of
`mbd train`."""

TEACHER_ARMS: dict[str, RLRecipe | TrainingRecipe] = {arm.name: arm for arm in (TEACHER, SOLUTIONS, REWARD)}
NAMES = {
    BASE: "the start",
    TEACHER.name: "taught by itself at one slot",
    SOLUTIONS.name: "MultiTF on right solutions",
    REWARD.name: "rewarded: correctness + TPF",
}
SIZE = ArmStudySize(seeds=(1, 2, 3), problems=300, taus=(0.8, 0.85, 0.9, 0.95))
START_TAU, TAUGHT_TAU = 0.9, 0.85


def run(
    *,
    out: OutFolder,
    size: ArmStudySize = SIZE,
    threads: OwnThreads = None,
    report_only: Annotated[bool, Flag("Write the report again, from the rows that are there.", OUTPUT)] = False,
) -> None:
    """Teach ledger-mbd at four slots by itself at one slot, compared with a reward and with right solutions.

    The same command computes what is missing. If it runs twice at once, both share the work.
    """
    if report_only:
        refuse_given(run, "with --report-only", threads=threads, **vars(size))
    else:
        compute_arms(out, TEACHER_ARMS, size, threads)
    print(report(out))


def report(out: Path) -> str:
    """Gathers the rows of finished pieces, and writes study.md and study.png; returns the Markdown. The models are
    compared on the seeds that all of them have."""
    from research.ledger.report import draw_study
    from research.ledger.rows import bootstrap_means, paired_rows
    from research.rl.report import cell_sections, gathered, of_recipes

    table = gathered(out)
    names = [name for name in NAMES if name in set(table["recipe"].to_pylist())]
    rows = of_recipes(table, names)
    if rows is None:
        raise ValueError(f"{out / ROWS} has no seed that {', '.join(names)} share")
    means = bootstrap_means(paired_rows(rows))
    with file_beside(out / PLOT) as new_file, new_file.open("wb") as file:
        draw_study(means, file, names=NAMES)
    lines = [
        "# What the same weights at one slot teach",
        "",
        f"`ledger-mbd`, four slots, {TEACHER.answers * TEACHER.iterations:,} answers each; {means.rows.num_problems} "
        f"unseen problems of ledger-mini of seed {', '.join(map(str, means.rows.seeds))}. Brackets: 95 % "
        "intervals over problems and seeds; of one seed they say nothing of another run.",
        "",
        f"## Each model minus the start at tau_m2t = {START_TAU}",
        "",
        "Over the seeds that both have.",
        "",
        *difference_lines(table, names, NAMES, taus=(START_TAU, TAUGHT_TAU)),
        "",
        *cell_sections(means, NAMES),
    ]
    text = "\n".join(lines)
    write_text(out / REPORT, text)
    return text


def difference_lines(
    table: pa.Table, names: Sequence[str], texts: Mapping[str, str], *, taus: Sequence[float]
) -> list[str]:
    """Each model at each threshold minus the start at `START_TAU`, over the seeds that both have."""
    from mbd_core.evaluation.measures.statistics import Interval
    from research.ledger.report import signed_text
    from research.ledger.rows import StudyCell, bootstrap_means, paired_rows
    from research.rl.report import SLOTS, of_recipes

    start, lines = StudyCell(BASE, SLOTS, START_TAU), []
    for name in names:
        rows = of_recipes(table, [name, BASE])
        assert rows is not None, "all of them share a seed"
        means = bootstrap_means(paired_rows(rows))
        for tau in taus if name != BASE else (TAUGHT_TAU,):
            cell = StudyCell(name, SLOTS, tau)
            intervals = [Interval.of_weightings(means.difference(cell, start, kind)) for kind in ("accuracy", "tpf")]
            lines.append([texts[name], f"{tau:g}", len(means.rows.seeds), *map(signed_text, intervals)])
    return table_lines(["Model", "tau_m2t", "Seeds", "Accuracy [95 %]", "TPF [95 %]"], lines, num_text=1)


main = command(run, "python -m research teacher", go_on="the same command computes what is missing")
