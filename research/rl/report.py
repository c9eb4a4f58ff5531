"""The report of the study of reinforcement learning, made only from its rows: claims with verdicts, cells, plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mbd_core.evaluation.measures.statistics import NUM_DRAWS, Interval, student_interval
from mbd_core.files import file_beside, write_text
from research.ledger.claims import CLAIM_TAU, MARGIN
from research.ledger.plan import BASE, PLOT, REPORT, ROWS
from research.ledger.report import aup_lines, cell_lines, draw_study, signed_text
from research.ledger.rows import DrawnMeans, StudyCell, bootstrap_means, each_seed, paired_rows, read_table, write_rows
from research.rl.arms import ARMS, ITERATIONS
from research.tables import table_lines

ArmMeasure = Literal["tpf", "accuracy", "aup"]
Verdict = Literal["shown", "contradicted", "not shown", "not enough seeds"]
TRAINING = "training.parquet"
SLOTS = 4
LEAST_SEEDS = 3
NAMES = {
    BASE: "the start",
    "rl-A": "A: correctness + TPF, exact states",
    "rl-A-20": "A, 20 iterations",
    "rl-A-20-low": "A, 20 iterations at 1e-5",
    "rl-E-20-low": "E, 20 iterations at 1e-5",
    "rl-B": "B: correctness alone",
    "rl-C": "C: all-masked states",
    "rl-D": "D: MultiTF on right solutions",
    "rl-E": "E: likelihood of correct rollouts",
    "rl-F": "F: shuffled advantages",
    "rl-G": "G: block-local states",
}
RULE = (
    f"What counts as shown, stated before the results: at four slots and tau_m2t = {CLAIM_TAU} (an AUP: over all "
    "thresholds) the 95 % interval of the difference, over problems and seeds, lies above its bound: 0, or for an "
    f"accuracy that must not fall -{MARGIN:g} point. For an arm that must teach nothing, the interval holds 0. A "
    "claim of several differences is shown if all of them are, and contradicted if one interval lies below its bound "
    f"or does not hold 0. Otherwise: not shown. With fewer than {LEAST_SEEDS} seeds of both sides: not enough seeds."
)
NOTES = f"""Brackets are 95 % percentile intervals of {NUM_DRAWS} draws of seeds and, in each, of problems. Over seeds:
the mean of the seeds' own differences with Student's 95 % interval, which leaves problems out and decides no verdict.
A difference is of the seeds that both of its sides have. The y_max of its AUPs is the best accuracy of the two sides;
in the table of AUPs it is the best accuracy of all models. Cells, AUPs and plot are of the models that have all seeds.
Accuracy in percent. NFE: forwards of an answer. TPF: useful tokens per forward, the mean over answers. AUP: d3LLM's
over the thresholds. It drops a point that is more than 5 points less accurate than the slowest point, so it jumps
where a point crosses that line."""


@dataclass(frozen=True, kw_only=True)
class ArmClaim:
    """`first`, at its threshold `first_tau`, is above `second` at `CLAIM_TAU` in each of `measures`.

    Each measure has a bound of the difference; without a bound the difference's interval must contain 0. An AUP is
    over all thresholds.
    """

    text: str
    first: str
    second: str
    measures: tuple[tuple[ArmMeasure, float | None], ...]
    first_tau: float = CLAIM_TAU


AUP_ABOVE: tuple[tuple[ArmMeasure, float | None], ...] = (("aup", 0.0),)
CLAIMS = (
    ArmClaim(
        text="TPF rises at equal accuracy",
        first="rl-A",
        second=BASE,
        measures=(("tpf", 0.0), ("accuracy", -MARGIN)),
    ),
    ArmClaim(text="worth more than supervised training: A above D", first="rl-A", second="rl-D", measures=AUP_ABOVE),
    ArmClaim(text="and A above E", first="rl-A", second="rl-E", measures=AUP_ABOVE),
    ArmClaim(text="replay matters: A above C", first="rl-A", second="rl-C", measures=AUP_ABOVE),
    ArmClaim(text="the states of several blocks matter: A above G", first="rl-A", second="rl-G", measures=AUP_ABOVE),
    ArmClaim(
        text="it is the reward: F stays at the start",
        first="rl-F",
        second=BASE,
        measures=(("tpf", None), ("accuracy", None)),
    ),
)


@dataclass(frozen=True, kw_only=True)
class JudgedArmClaim:
    """A claim with the difference in each of its measures (none if the rows lack a side), and its verdict."""

    claim: ArmClaim
    num_seeds: int
    differences: tuple[Interval, ...] = ()
    over_seeds: tuple[Interval | None, ...] = ()
    verdict: Verdict


def judge(claim: ArmClaim, table: pa.Table) -> JudgedArmClaim:
    """The verdict on a claim from the seeds that both sides have."""
    rows = of_recipes(table, (claim.first, claim.second))
    if rows is None:
        return JudgedArmClaim(claim=claim, num_seeds=0, verdict="not enough seeds")
    paired = paired_rows(rows)
    means, seeds = bootstrap_means(paired), each_seed(paired)
    intervals = [
        Interval.of_weightings(differences(means, claim.first, claim.second, name, first_tau=claim.first_tau))
        for name, _ in claim.measures
    ]
    verdicts = [_verdict(difference, bound) for difference, (_, bound) in zip(intervals, claim.measures, strict=True)]
    verdict: Verdict = (
        "not enough seeds"
        if len(paired.seeds) < LEAST_SEEDS
        else "contradicted"
        if "contradicted" in verdicts
        else "shown"
        if set(verdicts) == {"shown"}
        else "not shown"
    )
    over_seeds = tuple(
        student_interval(differences(seeds, claim.first, claim.second, name, first_tau=claim.first_tau).tolist())
        for name, _ in claim.measures
    )
    return JudgedArmClaim(
        claim=claim,
        num_seeds=len(paired.seeds),
        differences=tuple(intervals),
        over_seeds=over_seeds,
        verdict=verdict,
    )


def _verdict(difference: Interval, bound: float | None) -> Verdict:
    if bound is None:
        return "contradicted" if difference.is_above() or difference.is_below() else "shown"
    return "shown" if difference.is_above(bound) else "contradicted" if difference.is_below(bound) else "not shown"


def differences(
    means: DrawnMeans, first: str, second: str, measure: ArmMeasure, *, first_tau: float = CLAIM_TAU
) -> np.ndarray:
    """The first recipe's measure minus the second's in each draw (D,)."""
    if measure == "aup":
        curves = means.rows.curves
        return means.aup(curves[first, SLOTS]) - means.aup(curves[second, SLOTS])
    first_cell, second_cell = StudyCell(first, SLOTS, first_tau), StudyCell(second, SLOTS, CLAIM_TAU)
    return means.difference(first_cell, second_cell, measure)


def of_recipes(table: pa.Table, recipes: Sequence[str]) -> pa.Table | None:
    """The rows of these recipes for their common seeds; `None` without such a seed."""
    common = set.intersection(*(seeds_of(table, name) for name in recipes))
    if not common:
        return None
    is_in = pc.and_(pc.is_in(table["recipe"], pa.array(recipes)), pc.is_in(table["seed"], pa.array(sorted(common))))
    return table.filter(is_in)


def seeds_of(table: pa.Table, recipe: str) -> set[int]:
    """The seeds of a recipe's rows."""
    return set(table.filter(pc.equal(table["recipe"], recipe))["seed"].unique().to_pylist())


def gathered(out: Path) -> pa.Table:
    """The rows of a study's finished pieces, which are also written as one file, beside the numbers of the training.
    If there are no pieces, the rows of that file."""
    pieces = sorted((out / "rows").glob("*.parquet"))
    if pieces:
        write_rows(out / ROWS, [read_table(piece) for piece in pieces])
        trained = [pq.read_table(piece) for piece in sorted((out / "training").glob("*.parquet"))]
        if trained:
            with file_beside(out / TRAINING) as file:
                pq.write_table(pa.concat_tables(trained, promote_options="permissive"), file, compression="zstd")
    return read_table(out / ROWS)


def report(out: Path) -> str:
    """Gathers the rows of the finished pieces, and writes study.md and study.png; returns the Markdown.

    Raises `ValueError` if there are no rows, or no rows of the start.
    """
    table = gathered(out)
    start = seeds_of(table, BASE)
    whole = [name for name in (BASE, *sorted(ARMS)) if seeds_of(table, name) == start]
    rows = of_recipes(table, whole)
    if rows is None:
        raise ValueError(f"{out / ROWS} has no rows of the start, with which all models are compared")
    means = bootstrap_means(paired_rows(rows))
    with file_beside(out / PLOT) as new_file, new_file.open("wb") as file:
        draw_study(means, file, names=NAMES)
    training = pq.read_table(out / TRAINING) if (out / TRAINING).exists() else None
    text = render(table, means, training)
    write_text(out / REPORT, text)
    return text


def render(table: pa.Table, means: DrawnMeans, training: pa.Table | None) -> str:
    """The Markdown of all rows; `means` are the means in its tables."""
    seeds = ", ".join(map(str, means.rows.seeds))
    lines = ["# Does reinforcement learning win back the forwards that MultiTF costs?", ""]
    lines += [
        f"`ledger-mbd`, {ITERATIONS} iterations of 64 answers unless said otherwise, four slots; "
        f"{means.rows.num_problems} unseen problems of ledger-mini over the seeds {seeds}.",
        "",
        RULE,
        "",
        "## Claims",
        "",
        *claim_lines([judge(claim, table) for claim in CLAIMS]),
        "",
        f"## Each model minus the start, at tau_m2t = {CLAIM_TAU}",
        "",
        "No claim was stated of most of these.",
        "",
        *arm_lines(table, {name: NAMES[name] for name in sorted(ARMS)}),
        "",
        *(["## What training saw", "", *training_lines(training, NAMES), ""] if training is not None else []),
        *cell_sections(means, NAMES),
        NOTES,
        "",
    ]
    return "\n".join(lines)


def cell_sections(means: DrawnMeans, names: Mapping[str, str]) -> list[str]:
    """The sections that end a report: each cell, AUP, the plot."""
    return [
        "## All cells",
        "",
        *cell_lines(means, names=names),
        "",
        "## AUP",
        "",
        *aup_lines(means, names=names),
        "",
        f"![accuracy over tokens per forward]({PLOT})",
        "",
    ]


def claim_lines(verdicts: Sequence[JudgedArmClaim]) -> list[str]:
    """A row for each measure of each claim."""
    rows = []
    for judged in verdicts:
        for number, (measure, bound) in enumerate(judged.claim.measures):
            has_rows = bool(judged.differences)
            rows.append(
                [
                    judged.claim.text,
                    f"{measure} {'holds 0' if bound is None else f'> {bound:g}'}",
                    judged.num_seeds,
                    signed_text(judged.differences[number] if has_rows else None),
                    signed_text(judged.over_seeds[number] if has_rows else None),
                    judged.verdict,
                ]
            )
    heads = ["Claim", "Difference in", "Seeds", "Difference [95 %]", "Over seeds, t [95 %]", "Verdict"]
    return table_lines(heads, rows, num_text=2)


def arm_lines(table: pa.Table, names: Mapping[str, str]) -> list[str]:
    """Each model minus the start, over the seeds that both have."""
    measures: tuple[ArmMeasure, ...] = ("accuracy", "tpf", "aup")
    lines = []
    for name, text in names.items():
        rows = of_recipes(table, (name, BASE))
        if rows is not None:
            means = bootstrap_means(paired_rows(rows))
            intervals = [Interval.of_weightings(differences(means, name, BASE, measure)) for measure in measures]
            lines.append([text, len(means.rows.seeds), *map(signed_text, intervals)])
    return table_lines(["Model", "Seeds", "Accuracy [95 %]", "TPF [95 %]", "AUP [95 %]"], lines, num_text=1)


def training_lines(training: pa.Table, names: Mapping[str, str]) -> list[str]:
    """For each arm, over all of its seeds: what a run and an answer gave to the learner, the labels' mean entropy (in
    nats) at its start and end, and the drift from the start at its end."""
    rows = []
    for recipe in sorted(set(training["recipe"].to_pylist())):
        lines = [line for line in training.to_pylist() if line["recipe"] == recipe]
        seeds, last = len({line["seed"] for line in lines}), max(line["iteration"] for line in lines)
        largest = [line["d_max"] for line in lines if line["d_max"] is not None]
        begins, ends = ([line for line in lines if line["iteration"] == iteration] for iteration in (0, last))
        learned, labels, tokens = (
            sum(line[name] or 0 for line in lines) for name in ("answers_learned", "labels", "tokens")
        )
        rows.append(
            [
                names[recipe],
                seeds,
                round(learned / seeds),
                round(tokens / seeds),
                *(f"{total / learned:.0f}" if learned else "-" for total in (labels, tokens)),
                _mean_text(begins, "entropy", ".3f"),
                _mean_text(ends, "entropy", ".3f"),
                _mean_text(ends, "kl_reference", ".4f"),
                f"{max(largest):.1e}" if largest else "-",
            ]
        )
    heads = [
        *("Model", "Seeds", "Answers learned from", "Learner tokens", "Labels an answer", "Tokens an answer"),
        *("Entropy, first", "Entropy, last", "KL to the start, last", "Largest |d|"),
    ]
    return table_lines(heads, rows, num_text=1)


def _mean_text(lines: Sequence[Mapping[str, float | None]], name: str, form: str) -> str:
    """The mean of a number over the lines that have it; a dash without such lines."""
    values = [value for line in lines if (value := line[name]) is not None]
    return format(sum(values) / len(values), form) if values else "-"
