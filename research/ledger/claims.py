"""The claims of the papers, each a comparison with its rule, stated before any result.

A claim compares two sides under one buffer size, at the recommended threshold `CLAIM_TAU`. It may set another
threshold for one side; a claim about AUP covers all thresholds. A claim is *shown* if the 95 % interval over problems
and seeds lies on the paper's side of its bound. A claim about accuracy also needs a McNemar p below `ALPHA` divided by
the experiment's number of accuracy claims (Bonferroni). It is *contradicted* if the interval lies on the other side of
0. A claim of no loss allows `MARGIN`, is contradicted beyond it, and has no p. Everything else is *not shown*,
whatever the means are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mbd_core.evaluation.measures.statistics import Interval, student_interval
from mbd_core.multitf.recipes.shipped import ABLATION_ROWS, LEDGER_MBD, LEDGER_TF
from research.ledger.plan import BASE, FITTED, LOW_TAUS, Experiment
from research.ledger.rows import DrawnMeans, McNemar, PairedRows, StudyCell, each_seed, mcnemar

ClaimVerdict = Literal["shown", "contradicted", "not shown"]
CLAIM_TAU = 0.9
ALPHA = 0.05
MARGIN = 1.0
"""Percentage points that a claim of "no loss" allows."""
RULE = (
    f"What counts as shown, stated before the results: at tau_m2t = {CLAIM_TAU} (an AUP: over all thresholds) the "
    "95 % interval of the difference, over problems and training seeds, lies on the claimed side of 0, and for an "
    f"accuracy the exact McNemar p is below {ALPHA} divided by the number of claims of accuracy. A claim of no loss "
    f"allows {MARGIN:g} point, is contradicted beyond it, and has no p. Contradicted: the interval lies on the other "
    "side of 0. Otherwise: not shown."
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The claim that recipe `first` is higher than recipe `second` in `measure` (for `nfe`: takes fewer forwards).

    single    whether `second` decodes by SingleBD; if both are the same recipe, the claim is that SingleBD is higher
    no_loss   whether the claim is only that `first` is not lower by `MARGIN` points
    tau       the threshold of `second`, if it is not `CLAIM_TAU`
    """

    text: str
    first: str
    second: str
    measure: Literal["accuracy", "nfe", "aup"]
    single: bool = False
    no_loss: bool = False
    tau: float = CLAIM_TAU

    @property
    def is_tested(self) -> bool:
        """Whether it needs McNemar's test."""
        return self.measure == "accuracy" and not self.no_loss


MBD, TF = LEDGER_MBD.name, LEDGER_TF.name
ORDERING = (
    Claim(
        text="training-free MultiBD loses accuracy: the base under SingleBD is above it",
        first=BASE,
        second=BASE,
        measure="accuracy",
        single=True,
    ),
    Claim(text="MBD is more accurate than training-free MultiBD", first=MBD, second=BASE, measure="accuracy"),
    Claim(text="and more than the control with the same compute", first=MBD, second=TF, measure="accuracy"),
    Claim(
        text="MBD loses nothing against the base under SingleBD",
        first=MBD,
        second=BASE,
        measure="accuracy",
        single=True,
        no_loss=True,
    ),
    Claim(text="MBD takes fewer forwards than training-free MultiBD", first=MBD, second=BASE, measure="nfe"),
    Claim(text="and fewer than the control", first=MBD, second=TF, measure="nfe"),
    Claim(text="MBD's AUP is above training-free MultiBD's", first=MBD, second=BASE, measure="aup"),
    Claim(text="and above the control's", first=MBD, second=TF, measure="aup"),
    Claim(text="and above SingleBD's", first=MBD, second=BASE, measure="aup", single=True),
)


def _ablation() -> tuple[Claim, ...]:
    """The method of the paper above every other row, in accuracy and AUP."""
    row_names = {description: recipe.name for description, recipe in ABLATION_ROWS.items() if recipe.name != MBD}
    return tuple(
        Claim(text=f"above {description}: {measure}", first=MBD, second=name, measure=measure)
        for measure in ("accuracy", "aup")
        for description, name in row_names.items()
    )


def _above_singlebd(tau: float) -> tuple[Claim, ...]:
    """MBD above the base under SingleBD at a low threshold, in accuracy and in speed."""
    base_text = f"than the base under SingleBD at {tau}"
    return (
        Claim(
            text=f"MBD is more accurate {base_text}", first=MBD, second=BASE, measure="accuracy", single=True, tau=tau
        ),
        Claim(
            text=f"MBD takes fewer forwards {base_text}", first=MBD, second=BASE, measure="nfe", single=True, tau=tau
        ),
    )


CLAIMS: dict[Experiment, tuple[Claim, ...]] = {
    "ordering": ORDERING,
    "ablation": _ablation(),
    "alignment": (
        Claim(text="noise fitted to traces is above chain-uniform", first=FITTED, second=MBD, measure="accuracy"),
        Claim(text="noise fitted to traces takes fewer forwards", first=FITTED, second=MBD, measure="nfe"),
        Claim(text="noise fitted to traces has the higher AUP", first=FITTED, second=MBD, measure="aup"),
    ),
    "thresholds": tuple(claim for tau in LOW_TAUS for claim in _above_singlebd(tau)),
}


@dataclass(frozen=True, kw_only=True)
class JudgedClaim:
    """A claim with its measurement and verdict under one buffer size.

    `over_seeds` is the difference with Student's interval over the training seeds. It decides nothing.
    """

    claim: Claim
    buffer_size: int
    difference: Interval
    over_seeds: Interval | None
    test: McNemar | None
    verdict: ClaimVerdict


def judge(claims: Sequence[Claim], means: DrawnMeans) -> list[JudgedClaim]:
    """Every claim under every buffer size of MultiBD. Raises `ValueError` if the rows lack a compared cell."""
    rows, seeds = means.rows, each_seed(means.rows)
    num_tests = len(rows.buffer_sizes) * sum(claim.is_tested for claim in claims)
    verdicts = []
    for claim in claims:
        for size in rows.buffer_sizes:
            difference = Interval.of_weightings(_differences(claim, size, means))
            test = mcnemar(rows, *_cells(claim, size, rows)) if claim.is_tested else None
            verdicts.append(
                JudgedClaim(
                    claim=claim,
                    buffer_size=size,
                    difference=difference,
                    over_seeds=student_interval(_differences(claim, size, seeds).tolist()),
                    test=test,
                    verdict=_verdict(claim, difference, test, num_tests=num_tests),
                )
            )
    return verdicts


def _sides(claim: Claim, size: int) -> tuple[tuple[str, int], tuple[str, int]]:
    """The compared recipes and buffer sizes; the first is claimed to be higher."""
    first, second = (claim.first, size), (claim.second, 1 if claim.single else size)
    return (second, first) if claim.first == claim.second else (first, second)  # SingleBD above MultiBD of one model


def _cells(claim: Claim, size: int, rows: PairedRows) -> tuple[StudyCell, StudyCell]:
    """The sides at the threshold of the claims; `ValueError` if the rows lack a side."""
    (first, slots), (second, other_slots) = _sides(claim, size)
    first_cell, second_cell = StudyCell(first, slots, CLAIM_TAU), StudyCell(second, other_slots, claim.tau)
    for cell in (first_cell, second_cell):
        if cell not in rows.correct:
            raise ValueError(f"the rows lack {cell}, which a claim compares")
    return first_cell, second_cell


def _differences(claim: Claim, size: int, means: DrawnMeans) -> np.ndarray:
    """The difference in each draw (D,), positive in the claimed direction."""
    if claim.measure == "aup":
        curves = means.rows.curves
        for recipe, slots in _sides(claim, size):
            if (recipe, slots) not in curves:
                raise ValueError(f"the rows lack {recipe} with {slots} slots, which a claim compares")
        first, second = (means.aup(curves[side]) for side in _sides(claim, size))
        return first - second
    first_cell, second_cell = _cells(claim, size, means.rows)
    return (
        means.difference(second_cell, first_cell, "nfe")
        if claim.measure == "nfe"
        else means.difference(first_cell, second_cell, "accuracy")
    )


def _verdict(claim: Claim, difference: Interval, test: McNemar | None, *, num_tests: int) -> ClaimVerdict:
    if claim.no_loss:
        return (
            "shown"
            if difference.is_above(-MARGIN)
            else "contradicted"
            if difference.is_below(-MARGIN)
            else "not shown"
        )
    if difference.is_above():
        return "shown" if test is None or test.p_value < ALPHA / num_tests else "not shown"
    return "contradicted" if difference.is_below() else "not shown"
