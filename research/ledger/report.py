"""A study's report, made only from its rows: the claims with their verdicts, the table of all cells, the AUPs, the
plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mbd_core.evaluation.measures.statistics import NUM_DRAWS, Interval, p_text, student_interval
from mbd_core.files import file_beside, write_text
from mbd_core.multitf.recipes.shipped import ABLATION_ROWS
from research.ledger.claims import CLAIM_TAU, CLAIMS, RULE, JudgedClaim, judge
from research.ledger.distances import correlations, distance_lines, read_distances
from research.ledger.plan import BASE, DISTANCES, FITTED, INFERENCE, PLOT, REPORT, Experiment, row_files
from research.ledger.rows import DrawnMeans, Measure, StudyCell, bootstrap_means, each_seed, read_rows
from research.tables import table_lines


def draw_study(means: DrawnMeans, file: BinaryIO, *, names: Mapping[str, str]) -> None:
    """Write the plot as PNG; bars are 95 % intervals over problems and seeds."""
    curves = means.rows.curves
    sizes = sorted({size for _, size in curves})
    figure = Figure(figsize=(max(7.0, 5.0 * len(sizes)), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    recipes = list(dict.fromkeys(recipe for recipe, _ in curves))
    for panel, size in zip(panels, sizes, strict=True):
        for number, recipe in enumerate(recipes):
            points = sorted(
                (
                    [Interval.of_weightings(means.mean(cell, name)) for name in ("tpf", "accuracy")]
                    for cell in curves.get((recipe, size), [])
                ),
                key=lambda point: point[0].value,
            )
            if not points:
                continue
            speeds, accuracies = ([point[axis] for point in points] for axis in (0, 1))
            panel.errorbar(
                [x.value for x in speeds],
                [y.value for y in accuracies],
                xerr=_bars(speeds),
                yerr=_bars(accuracies),
                marker="osD^vP*Xh"[number % 9],
                color=f"C{number % 10}",
                capsize=2,
                linewidth=1.2,
                label=names.get(recipe, recipe),
            )
        panel.set_title("SingleBD" if size == 1 else f"MultiBD, {size} slots")
        panel.set_xlabel("tokens per forward (TPF)")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy (%)")
    legend = panels[-1].get_legend_handles_labels()
    figure.legend(*legend, fontsize="small", loc="outside lower center", ncols=min(3, 1 + len(sizes)))
    figure.savefig(file, format="png", dpi=130)


def _bars(values: Sequence[Interval]) -> list[list[float]]:
    """The intervals' lengths below and above the values. With few draws a value may lie outside its interval."""
    bounds = [(v.value, *v.bounds) for v in values]
    return [[max(0.0, value - low) for value, low, _ in bounds], [max(0.0, high - value) for value, _, high in bounds]]


TITLES: dict[Experiment, str] = {
    "ordering": "Does MultiTF raise accuracy and tokens per forward under MultiBD?",
    "ablation": "Which training states matter?",
    "alignment": "Do training states that are nearer to inference's do better?",
    "thresholds": "Can SingleBD be as fast as MBD by a low threshold alone?",
}
NAMES = {
    BASE: "the base",
    FITTED: "noise fitted to traces",
    **{recipe.name: row for row, recipe in ABLATION_ROWS.items()},
}
NOTES = f"""Brackets are 95 % percentile intervals of {NUM_DRAWS} draws of training seeds and, in each, of problems.
With one seed they are over problems alone. With few seeds they are too narrow if seeds differ by more than the chance
of their problems, and too wide if they differ by less. A share of 0 or 100 % has no width. Over seeds: the mean of the
seeds' own differences, with Student's 95 % interval, which leaves problems out. It was added after the results, and
decides no verdict. Accuracy in percent. NFE: forwards of an answer, also those that only store. TPF: useful tokens per
forward, the mean over answers. AUP: d3LLM's over the thresholds. Its y_max is the best accuracy in this report (over
seeds: in that seed). It drops a point that is more than 5 points less accurate than the slowest point, so it jumps
where a point crosses that line. Buffer size 1 is SingleBD. `p` is the exact McNemar test's, on the problems that only
one side has right."""


def report(out: Path, experiment: Experiment) -> str:
    """Write study.md and study.png of an experiment, from its rows, the rows of earlier experiments, and for alignment
    its distances.

    Returns the Markdown. Raises `ValueError` if one of these is missing.
    """
    folder, means, extra = out / experiment, bootstrap_means(read_rows(row_files(out, experiment))), []
    if experiment == "alignment":
        distances = read_distances(folder / INFERENCE / DISTANCES)
        extra = distance_lines(distances, correlations(distances, means), names=NAMES)
    with file_beside(folder / PLOT) as new_file, new_file.open("wb") as file:
        draw_study(means, file, names=NAMES)
    text = render(experiment, means, extra=extra)
    write_text(folder / REPORT, text)
    return text


def render(experiment: Experiment, means: DrawnMeans, *, extra: Sequence[str] = ()) -> str:
    """The Markdown; `extra` are lines after the claims."""
    seeds = ", ".join(map(str, means.rows.seeds))
    lines = [f"# {TITLES[experiment]}", ""]
    lines += [
        f"{means.rows.num_problems} unseen problems of ledger-mini over the training seeds {seeds}.",
        "",
        RULE,
        "",
    ]
    lines += ["## Claims", "", *_claim_lines(judge(CLAIMS[experiment], means)), "", *extra]
    lines += [f"## What several slots cost, at tau_m2t = {CLAIM_TAU}", "", *_cost_lines(means), ""]
    lines += ["## All cells", "", *cell_lines(means, names=NAMES), ""]
    lines += ["## AUP", "", *aup_lines(means, names=NAMES), "", f"![accuracy over tokens per forward]({PLOT})", ""]
    return "\n".join([*lines, NOTES, ""])


def _name(recipe: str) -> str:
    return NAMES.get(recipe, recipe)


def signed_text(interval: Interval | None) -> str:
    """A difference with its interval."""
    return "-" if interval is None else interval.text("+.2f")


def _claim_lines(verdicts: Sequence[JudgedClaim]) -> list[str]:
    rows = []
    for verdict in verdicts:
        counts: tuple[object, ...] = ("-", "-", "-")
        if verdict.test is not None:
            counts = verdict.test.first_only, verdict.test.second_only, p_text(verdict.test.p_value)
        differences = signed_text(verdict.difference), signed_text(verdict.over_seeds)
        rows.append([verdict.claim.text, verdict.buffer_size, *differences, *counts, verdict.verdict])
    heads = ["Claim", "Buffer", "Difference [95 %]", "Over seeds, t [95 %]"]
    return table_lines([*heads, "Only first", "Only second", "p", "Verdict"], rows, num_text=1)


def _cost_lines(means: DrawnMeans) -> list[str]:
    """The accuracy that each recipe loses from SingleBD to MultiBD."""
    rows, seeds = [], each_seed(means.rows)
    for cell in means.rows.cells:
        single = StudyCell(cell.recipe, 1, CLAIM_TAU)
        if cell.buffer_size == 1 or cell.tau_m2t != CLAIM_TAU or single not in means.rows.correct:
            continue
        loss = Interval.of_weightings(means.difference(single, cell, "accuracy"))
        over_seeds = student_interval(seeds.difference(single, cell, "accuracy").tolist())
        rows.append([_name(cell.recipe), cell.buffer_size, signed_text(loss), signed_text(over_seeds)])
    table = table_lines(["Recipe", "Buffer", "Lost [95 %]", "Over seeds, t [95 %]"], rows, num_text=1)
    return ["Accuracy under SingleBD minus accuracy under MultiBD; no claim was stated of most of these.", "", *table]


def cell_lines(means: DrawnMeans, *, names: Mapping[str, str]) -> list[str]:
    """The table of all cells."""
    measures: tuple[Measure, ...] = ("accuracy", "nfe", "tpf")
    rows = []
    for cell in means.rows.cells:
        cell_means = [Interval.of_weightings(means.mean(cell, measure)).text() for measure in measures]
        rows.append(
            [names.get(cell.recipe, cell.recipe), cell.buffer_size, cell.tau_m2t, means.rows.num_problems, *cell_means]
        )
    heads = ["Recipe", "Buffer", "tau_m2t", "n", "Accuracy [95 %]", "NFE [95 %]", "TPF [95 %]"]
    return table_lines(heads, rows, num_text=1)


def aup_lines(means: DrawnMeans, *, names: Mapping[str, str]) -> list[str]:
    """The table of the AUPs."""
    rows = []
    for (recipe, buffer_size), curve in means.rows.curves.items():
        taus = ", ".join(str(cell.tau_m2t) for cell in curve)
        rows.append(
            [names.get(recipe, recipe), buffer_size, taus, Interval.of_weightings(means.aup(curve)).text(".1f")]
        )
    return table_lines(["Recipe", "Buffer", "Thresholds", "AUP [95 %]"], rows, num_text=1)
