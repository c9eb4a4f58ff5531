"""A study's report from its rows alone: the claims with their verdicts, the table of all cells, the AUPs, the plot."""

from collections.abc import Sequence
from pathlib import Path

from mbd_core.evaluation.aup_interval import Interval as Bounds
from mbd_core.evaluation.markdown_sections import table_line
from mbd_core.evaluation.statistics import wilson_interval
from mbd_core.files import write_text
from mbd_core.multitf.ledger_recipes import ABLATION_ROWS
from mbd_core.studies.ledger.claims import CLAIMS, RULE, Judged, judge
from mbd_core.studies.ledger.paired_bootstrap import NUM_DRAWS, Bootstrap, Interval, curves
from mbd_core.studies.ledger.study_plan import BASE, FITTED, PLOT, REPORT, Experiment
from mbd_core.studies.ledger.study_plot import draw_study
from mbd_core.studies.ledger.study_rows import PairedRows

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
With one seed they are over problems alone. Accuracy in percent, with its Wilson interval in the table of all cells;
NFE: forwards of an answer, those that store included; TPF: useful tokens per forward, the mean over answers; AUP:
d3LLM's over the thresholds, its y_max the best accuracy in this report. Buffer size 1 is SingleBD. `p` is the exact
McNemar test's, on the problems that one side alone has right."""


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
    lines += ["## All cells", "", *_cell_lines(rows, bootstrap), ""]
    lines += ["## AUP", "", *_aup_lines(rows, bootstrap), "", f"![accuracy over tokens per forward]({PLOT})", ""]
    return "\n".join([*lines, NOTES, ""])


def _head(*names: str, text: int = 1) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|" + "---|" * text + "---:|" * (len(names) - text)]


def _claim_lines(judged: Sequence[Judged]) -> list[str]:
    lines = _head("Claim", "Buffer", "Difference [95 %]", "Only first", "Only second", "p", "Verdict")
    for one in judged:
        counts = ("-", "-", "-")
        if one.test is not None:
            counts = (str(one.test.first_only), str(one.test.second_only), f"{one.test.p_value:.2g}")
        form = "+.2f"
        lines.append(table_line([one.claim.text, one.buffer_size, one.difference.text(form), *counts, one.verdict]))
    return lines


def _cell_lines(rows: PairedRows, bootstrap: Bootstrap) -> list[str]:
    lines = _head("Recipe", "Buffer", "tau_m2t", "n", "Accuracy [95 %]", "NFE [95 %]", "TPF [95 %]")
    for cell in rows.cells:
        bounds: Bounds = wilson_interval(int(rows.correct[cell].sum()), rows.num_problems)
        accuracy = Interval(value=100 * float(rows.correct[cell].mean()), low=100 * bounds[0], high=100 * bounds[1])
        nfe, tpf = (Interval.of(bootstrap.mean(cell, name)) for name in ("nfe", "tpf"))
        cells = [NAMES.get(cell.recipe, cell.recipe), cell.buffer_size, cell.tau_m2t, rows.num_problems]
        lines.append(table_line([*cells, accuracy.text(), nfe.text(), tpf.text()]))
    return lines


def _aup_lines(rows: PairedRows, bootstrap: Bootstrap) -> list[str]:
    lines = _head("Recipe", "Buffer", "Thresholds", "AUP [95 %]")
    for (recipe, buffer_size), curve in curves(rows).items():
        taus = ", ".join(str(cell.tau_m2t) for cell in curve)
        area = Interval.of(bootstrap.aup(curve))
        lines.append(table_line([NAMES.get(recipe, recipe), buffer_size, taus, area.text(".1f")]))
    return lines
