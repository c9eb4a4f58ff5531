"""A study's report from its rows alone: the claims with their verdicts, the table of all cells, the AUPs, the plot."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mbd_core.checkpoint.folder import read_folder
from mbd_core.evaluation.report.sections import table_line
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.files import folder_beside, write_text
from mbd_core.multitf.recipes.shipped import ABLATION_ROWS, LEDGER_TASK
from mbd_core.multitf.states.noise import write_noise
from research.alignment.states import Asked, record_models
from research.ledger.claims import CLAIM_TAU, CLAIMS, RULE, Judged, judge
from research.ledger.distances import correlations, distance_lines, measure_rows, read_distances, write_distances
from research.ledger.plan import BASE, DISTANCES, FITTED, NOISE, PLOT, REPORT, Experiment, row_files
from research.ledger.rows import Cell, PairedRows, read_rows
from research.ledger.statistics import NUM_DRAWS, Bootstrap, Interval, Measure, curves, each_seed, over_seeds

# The plot of a study: accuracy over tokens per forward, a panel a buffer size, a curve a recipe, with intervals.


def draw_study(rows: PairedRows, bootstrap: Bootstrap, file: BinaryIO, *, names: Mapping[str, str]) -> None:
    """Write the plot as PNG; bars are 95 % intervals over problems and seeds."""
    known = curves(rows)
    sizes = sorted({size for _, size in known})
    figure = Figure(figsize=(5.0 * len(sizes), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    recipes = list(dict.fromkeys(recipe for recipe, _ in known))
    for panel, size in zip(panels, sizes, strict=True):
        for number, recipe in enumerate(recipes):
            points = sorted(
                (
                    (Interval.of(bootstrap.mean(cell, "tpf")), Interval.of(bootstrap.mean(cell, "accuracy")))
                    for cell in known.get((recipe, size), [])
                ),
                key=lambda point: point[0].value,
            )
            if not points:
                continue
            across, up = ([point[axis] for point in points] for axis in (0, 1))
            panel.errorbar(
                [x.value for x in across],
                [y.value for y in up],
                xerr=_bars(across),
                yerr=_bars(up),
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
    figure.legend(*panels[-1].get_legend_handles_labels(), fontsize="small", loc="outside lower center", ncols=3)
    figure.savefig(file, format="png", dpi=130)


def _bars(values: Sequence[Interval]) -> list[list[float]]:
    """How far the intervals reach below and above the values, which few draws may leave outside them."""
    return [[max(0.0, v.value - v.low) for v in values], [max(0.0, v.high - v.value) for v in values]]


TITLES: dict[Experiment, str] = {
    "ordering": "Does MultiTF raise accuracy and tokens per forward under MultiBD?",
    "ablation": "Which training states matter?",
    "alignment": "Do training states that are nearer to inference's do better?",
}
NAMES = {
    BASE: "the base",
    FITTED: "noise fitted to traces",
    **{recipe.name: what for what, recipe in ABLATION_ROWS.items()},
}
NOTES = f"""Brackets are 95 % percentile intervals of {NUM_DRAWS} draws of training seeds and, in each, of problems.
With one seed they are over problems alone. Of a few they are too narrow where seeds differ by more than the chance of
their problems, and too wide where by less; a share of 0 or 100 % has no width. Over seeds: the mean of the seeds' own
differences with Student's 95 % interval, which leaves problems out; it was added after the results, and decides no
verdict. Accuracy in percent; NFE: forwards of an answer, those that store included; TPF: useful tokens per forward,
the mean over answers; AUP: d3LLM's over the thresholds, its y_max the best accuracy in this report (over seeds: in
that seed); it drops a point that is more than 5 points less accurate than the slowest one, so that it jumps where a
point crosses that line. Buffer size 1 is SingleBD. `p` is the exact McNemar test's, on the problems that one side
alone has right."""


def write_report(folder: Path, experiment: Experiment, rows: PairedRows, *, extra: Sequence[str] = ()) -> str:
    """Write study.md and study.png; returns the Markdown. `extra` are lines after the claims."""
    bootstrap = Bootstrap(rows)
    with (folder / PLOT).open("wb") as file:
        draw_study(rows, bootstrap, file, names=NAMES)
    text = render(experiment, rows, bootstrap, extra=extra)
    write_text(folder / REPORT, text)
    return text


def render(experiment: Experiment, rows: PairedRows, bootstrap: Bootstrap, *, extra: Sequence[str] = ()) -> str:
    seeds = ", ".join(map(str, rows.seeds))
    lines = [f"# {TITLES[experiment]}", ""]
    lines += [f"{rows.num_problems} unseen problems of ledger-mini over the training seeds {seeds}.", "", RULE, ""]
    lines += ["## Claims", "", *_claim_lines(judge(CLAIMS[experiment], rows, bootstrap)), "", *extra]
    lines += [f"## What several slots cost, at tau_m2t = {CLAIM_TAU}", "", *_cost_lines(rows, bootstrap), ""]
    lines += ["## All cells", "", *_cell_lines(rows, bootstrap), ""]
    lines += ["## AUP", "", *_aup_lines(rows, bootstrap), "", f"![accuracy over tokens per forward]({PLOT})", ""]
    return "\n".join([*lines, NOTES, ""])


def _head(*names: str, text: int = 1) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|" + "---|" * text + "---:|" * (len(names) - text)]


def _claim_lines(judged: Sequence[Judged]) -> list[str]:
    lines = _head(
        "Claim", "Buffer", "Difference [95 %]", "Over seeds, t [95 %]", "Only first", "Only second", "p", "Verdict"
    )
    for one in judged:
        counts = ("-", "-", "-")
        if one.test is not None:
            counts = (
                str(one.test.first_only),
                str(one.test.second_only),
                f"{one.test.p_value:.2g}" if one.test.p_value else "< 1e-300",
            )
        differences = [_signed(one.difference), _signed(one.over_seeds)]
        lines.append(table_line([one.claim.text, one.buffer_size, *differences, *counts, one.verdict]))
    return lines


def _signed(interval: Interval | None) -> str:
    return "-" if interval is None else interval.text("+.2f")


def _cost_lines(rows: PairedRows, bootstrap: Bootstrap) -> list[str]:
    """What each recipe's accuracy loses from SingleBD to MultiBD."""
    lines = ["Accuracy under SingleBD minus accuracy under MultiBD; no claim was stated of most of these.", ""]
    lines += _head("Recipe", "Buffer", "Lost [95 %]", "Over seeds, t [95 %]")
    seeds = each_seed(rows)
    for cell in rows.cells:
        alone = Cell(cell.recipe, 1, CLAIM_TAU)
        if cell.buffer_size == 1 or cell.tau_m2t != CLAIM_TAU or alone not in rows.correct:
            continue
        lost = Interval.of(bootstrap.difference(alone, cell, "accuracy"))
        of_seeds = over_seeds(seeds.difference(alone, cell, "accuracy"))
        name = NAMES.get(cell.recipe, cell.recipe)
        lines.append(table_line([name, cell.buffer_size, _signed(lost), _signed(of_seeds)]))
    return lines


def _cell_lines(rows: PairedRows, bootstrap: Bootstrap) -> list[str]:
    lines = _head("Recipe", "Buffer", "tau_m2t", "n", "Accuracy [95 %]", "NFE [95 %]", "TPF [95 %]")
    for cell in rows.cells:
        names: tuple[Measure, ...] = ("accuracy", "nfe", "tpf")
        means = [Interval.of(bootstrap.mean(cell, name)).text() for name in names]
        recipe = NAMES.get(cell.recipe, cell.recipe)
        lines.append(table_line([recipe, cell.buffer_size, cell.tau_m2t, rows.num_problems, *means]))
    return lines


def _aup_lines(rows: PairedRows, bootstrap: Bootstrap) -> list[str]:
    lines = _head("Recipe", "Buffer", "Thresholds", "AUP [95 %]")
    for (recipe, buffer_size), curve in curves(rows).items():
        taus = ", ".join(str(cell.tau_m2t) for cell in curve)
        area = Interval.of(bootstrap.aup(curve))
        lines.append(table_line([NAMES.get(recipe, recipe), buffer_size, taus, area.text(".1f")]))
    return lines


# An experiment's results in the study's folder: what was measured of inference, the rows, and the report of both.

INFERENCE = "inference"
TRACED_SLOTS = 4
DRAWS = 8


def measure_inference(out: Path, base: Path, *, num_problems: int) -> Path:
    """The file of noise fitted to the base's traces under MultiBD, with the distances of all rows beside it; measured
    once, before anything is trained with it."""
    folder = out / "alignment" / INFERENCE
    if not folder.exists():
        asked = Asked(
            task=LEDGER_TASK[0],
            num_problems=num_problems,
            seed=0,
            max_tokens=find_task(LEDGER_TASK[0]).max_tokens,
            buffer_size=TRACED_SLOTS,
            decoding={"tau_m2t": CLAIM_TAU},
        )
        with folder_beside(folder, "measured inference") as beside:
            model = read_folder(base)
            (traces,) = record_models({"base": model}, asked, beside / "traces")
            size = model.config.block_size  # a study trains in its base's blocks
            states = {recipe.name: replace(recipe.states, block_size=size) for recipe in ABLATION_ROWS.values()}
            distances, noise = measure_rows(traces, states, draws=DRAWS, seed=0)
            write_distances(beside / DISTANCES, distances)
            write_noise(beside / NOISE, noise)
    return folder / NOISE


def report(out: Path, experiment: Experiment) -> str:
    """Write the report of an experiment from its rows and those before it, and for alignment its distances.

    Returns the Markdown. Raises `ValueError` if they are not there.
    """
    folder = out / experiment
    rows = read_rows(row_files(out, experiment))
    if experiment != "alignment":
        return write_report(folder, experiment, rows)
    distances, bootstrap = read_distances(folder / INFERENCE / DISTANCES), Bootstrap(rows)
    extra = distance_lines(distances, correlations(distances, rows, bootstrap), names=NAMES)
    return write_report(folder, experiment, rows, extra=extra)
