"""A study's report from its rows alone: the claims with their verdicts, the table of all cells, the AUPs, the plot."""

from collections.abc import Sequence
from pathlib import Path

from mbd_core.evaluation.markdown_sections import table_line
from mbd_core.files import write_text
from mbd_core.multitf.ledger_recipes import ABLATION_ROWS
from mbd_core.studies.ledger.claims import CLAIM_TAU, CLAIMS, RULE, Judged, judge
from mbd_core.studies.ledger.paired_bootstrap import (
    NUM_DRAWS,
    Bootstrap,
    Interval,
    Measure,
    curves,
    each_seed,
    over_seeds,
)
from mbd_core.studies.ledger.study_plan import BASE, FITTED, PLOT, REPORT, Experiment
from mbd_core.studies.ledger.study_plot import draw_study
from mbd_core.studies.ledger.study_rows import Cell, PairedRows

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
