"""Whether drafts pay: drafts and single tokens give the same tokens, so the mode with more tokens a second is chosen.

Drafts turn many positions into tokens in few forwards. That pays while positions cost little, as with few requests at
once, and while the drafts agree. Neither is known beforehand. So measured steps give the cost of a step by its rows
and positions, and verified rows give the yield of drafts. The other mode is tried now and then, and so rarely that its
expected loss is a small share of the time.
"""

import math
from dataclasses import dataclass

import numpy as np

KEPT_STEPS = 128
"""Steps after which a measure has lost most of its weight (a factor of e)."""
CARRIED = 0.05
"""The weight of measures at other loads, until this load is measured."""
LEAST_VERIFIED = 32
"""Requests draft until this number of rows was verified. Old rows are forgotten only beyond this number. With many
requests a few steps show the yield of drafts. A single request needs many steps, in several passages of its text."""
KEPT_YIELD = 1024
"""Steps after which the yield of drafts has lost most of its weight while nobody drafts."""
OUTLIER = 4.0
"""A step that exceeds its expected seconds by this factor counts less."""
TRIED_SHARE = 0.005
"""The share of the time that tries of the other mode may lose."""
LEAST_STEPS = 16
"""The steps between two tries, at least."""
FITTED_STEPS = 16
"""The most steps between two fits. The first fits come sooner, and a try is fitted at once."""
RIDGE = 1e-9
"""The ridge, a share of the fit's own weight: without it a feature that never varied (rows, at a constant load) has no
solution."""
LEAST_SECONDS = 1e-9
STEPS_OF_A_DRAFT = 2
"""A draft is verified by the step behind it."""


@dataclass(frozen=True)
class StepLoad:
    """The load of a forward.

    rows           rows of sequences that decode
    positions      positions of these rows
    prompt_tokens  prompt tokens that are stored beside them
    """

    rows: int
    positions: int
    prompt_tokens: int = 0

    @property
    def features(self) -> tuple[float, ...]:
        """The quantities whose costs add up to the step's seconds."""
        return 1.0, self.rows, self.positions, self.prompt_tokens


@dataclass(frozen=True, kw_only=True)
class DraftChoices:
    """The next forward in both modes: drafts, or single tokens; and the number of requests that may draft."""

    drafts: StepLoad
    single: StepLoad
    number: int


@dataclass(frozen=True, kw_only=True)
class DraftedStep:
    """A step's work for the requests that may draft.

    load      the load of its forward
    single    rows of single tokens
    drafts    draft rows and verify rows
    verified  verify rows
    tokens    tokens that the verify rows gave
    """

    load: StepLoad
    single: int
    drafts: int
    verified: int
    tokens: int


class LoadRange:
    """Expected seconds of a step at similar numbers of rows, and how long ago each mode was measured.

    Seconds are base + rows * r + positions * p + prompt tokens * t, fitted by least squares of relative errors; older
    steps count less.
    """

    def __init__(self, neighbour: "LoadRange | None") -> None:
        if neighbour is not None and neighbour._relative:
            neighbour._fit()
        # the normal equations, a row per coefficient: its feature times all features, and times the seconds
        self._products: np.ndarray = np.zeros((4, 5)) if neighbour is None else CARRIED * neighbour._products
        self._relative: list[tuple[float, ...]] = []  # features and seconds of steps not fitted yet
        self._num_steps = 0
        self._coefficients: list[float] = [] if neighbour is None else neighbour._coefficients
        self.unseen_steps = {True: LEAST_STEPS, False: LEAST_STEPS}
        self.unseen_seconds = {True: math.inf, False: math.inf}

    def observe(self, load: StepLoad, seconds: float, *, drafts: bool) -> None:
        scale = seconds
        if self._coefficients:
            scale = min(max(self.seconds(load), seconds / OUTLIER), seconds * OUTLIER)
        self._relative.append(tuple(value / scale for value in (*load.features, seconds)))
        self._num_steps += 1
        is_try = self.unseen_steps[drafts] >= LEAST_STEPS
        if is_try or len(self._relative) >= min(self._num_steps // 2, FITTED_STEPS):
            self._fit()
        for mode in (True, False):
            self.unseen_steps[mode] += 1
            self.unseen_seconds[mode] += seconds
        self.unseen_steps[drafts] = 0
        if load.prompt_tokens <= load.positions or math.isfinite(self.unseen_seconds[drafts]):
            self.unseen_seconds[drafts] = 0.0  # steps that mostly store prompts are no first measure of a mode

    def _fit(self) -> None:
        relative = np.array(self._relative)
        self._relative.clear()
        decay = (1 - 1 / KEPT_STEPS) ** np.arange(len(relative) - 1, -1, -1)
        self._products *= decay[0] * (1 - 1 / KEPT_STEPS)
        self._products += (relative[:, :-1] * decay[:, None]).T @ relative
        weight = self._products.diagonal()
        ridge = np.diag(np.where(weight > 0, RIDGE * weight, 1.0))
        self._coefficients = np.linalg.solve(self._products[:, :4] + ridge, self._products[:, 4]).tolist()

    def seconds(self, load: StepLoad) -> float:
        """Expected seconds of a step, by the last fit; a fit must exist."""
        expected = sum(c * feature for c, feature in zip(self._coefficients, load.features, strict=True))
        return max(LEAST_SECONDS, expected)

    def may_try(self, mode: bool, loss: float) -> bool:
        """Whether a try of `mode` is due, if the try is expected to lose `loss` seconds."""
        return self.unseen_steps[mode] >= LEAST_STEPS and loss <= TRIED_SHARE * self.unseen_seconds[mode]


class Drafting:
    """Learns from measured steps, and says whether requests draft in the next one."""

    def __init__(self) -> None:
        self._ranges: dict[int, LoadRange] = {}  # by the power of two of the rows
        self._verified = self._tokens = 0.0  # verify rows, and their tokens; older rows count less
        self._leader_drafts: bool | None = None
        self._chosen_in: LoadRange | None = None  # range of the last choice; rows that join in its step count there

    def observe(self, step: DraftedStep, seconds: float) -> None:
        """Records that a step took `seconds`."""
        if not step.single + step.drafts or seconds <= 0:
            return
        here = self._chosen_in or self._range(step.load.rows)
        here.observe(step.load, seconds, drafts=step.drafts > step.single)
        decay = 1 - 1 / (KEPT_STEPS if step.drafts else KEPT_YIELD)
        if decay * self._verified < LEAST_VERIFIED:
            decay = 1.0
        self._verified = decay * self._verified + step.verified
        self._tokens = decay * self._tokens + step.tokens

    def choose(self, choices: DraftChoices) -> bool:
        """Whether the requests that may draft do so in the next step. The answer changes only after a step."""
        self._chosen_in = None
        if self._leader_drafts is not None:
            return self._leader_drafts
        if not choices.number or self._verified < LEAST_VERIFIED:
            return True
        here = self._chosen_in = self._range(choices.single.rows)
        number = choices.number
        others = choices.single.rows - number  # each counts as a token
        seconds = {True: here.seconds(choices.drafts), False: here.seconds(choices.single)}
        drafted = self._tokens / self._verified / STEPS_OF_A_DRAFT
        tokens = {True: others + number * drafted, False: others + number}
        rate = {mode: tokens[mode] / seconds[mode] for mode in (True, False)}
        best = rate[True] >= rate[False]
        loss = STEPS_OF_A_DRAFT * (seconds[not best] - tokens[not best] / rate[best])
        return not best if here.may_try(not best, loss) else best

    def follow(self, drafts: bool) -> None:
        """The next steps draft if rank 0's do."""
        self._leader_drafts = drafts

    def _range(self, rows: int) -> LoadRange:
        """The range for this number of rows; a new range starts from the measures of the nearest range."""
        power = rows.bit_length()
        if power not in self._ranges:
            nearest = min(self._ranges, key=lambda other: abs(other - power), default=None)
            self._ranges[power] = LoadRange(None if nearest is None else self._ranges[nearest])
        return self._ranges[power]
