"""Expected seconds of a forward by its load, from measured forwards.

Seconds are base + rows * r + positions * p + prompt tokens * t, fitted by least squares of relative errors. A draft
model has a base and positions of its own. Older forwards count less. Forwards with similar numbers of rows are fitted
together, because no line holds for all loads.
"""

from dataclasses import dataclass

import numpy as np

KEPT_FORWARDS = 128
"""Forwards after which a measure has lost most of its weight (a factor of e)."""
CARRIED = 0.05
"""The weight of measures at other numbers of rows, until this number is measured."""
OUTLIER = 1.5
"""A forward that exceeds its expected seconds by this factor counts less."""
RIDGE = 1e-9
"""The ridge, a share of the fit's own weight: without it a feature that never varied (rows, at a constant load) has no
solution."""
LEAST_SECONDS = 1e-9


@dataclass(frozen=True)
class StepLoad:
    """The load of a step: of its forward, or of one forward of each model.

    rows             rows of sequences that decode
    positions        positions of these rows
    prompt_tokens    prompt tokens that are stored beside them
    draft_positions  positions of the draft model's rows
    """

    rows: int
    positions: int
    prompt_tokens: int = 0
    draft_positions: int = 0

    @property
    def features(self) -> tuple[float, ...]:
        """The quantities whose costs add up to the step's seconds."""
        drafts, runs = self.draft_positions, self.positions + self.prompt_tokens > 0
        return float(runs), self.rows, self.positions, self.prompt_tokens, float(drafts > 0), drafts


class ForwardSeconds:
    """Learns from measured forwards, and expects the seconds of others."""

    def __init__(self) -> None:
        self.num_measured = 0
        self._fits: dict[int, _Fit] = {}  # by the power of two of the rows

    def observe(self, load: StepLoad, seconds: float) -> None:
        self.num_measured += 1
        power = load.rows.bit_length()
        if power not in self._fits:
            self._fits[power] = _Fit(self._nearest(power))
        self._fits[power].observe(load.features, seconds)

    def of(self, load: StepLoad) -> float:
        """The seconds of a forward with this load; some forward must have been measured."""
        fit = self._nearest(load.rows.bit_length())
        assert fit is not None, "no forward was measured"
        return fit.seconds(load.features)

    def _nearest(self, power: int) -> "_Fit | None":
        nearest = min(self._fits, key=lambda other: abs(other - power), default=None)
        return None if nearest is None else self._fits[nearest]


class _Fit:
    """The fit at similar numbers of rows; it begins with the measures of a `neighbour`."""

    def __init__(self, neighbour: "_Fit | None") -> None:
        # the normal equations, a row per coefficient: its feature times all features, and times the seconds
        self._products: np.ndarray = np.zeros((6, 7)) if neighbour is None else CARRIED * neighbour._products
        self._coefficients: list[float] | None = None  # `None`: to be computed

    def observe(self, features: tuple[float, ...], seconds: float) -> None:
        scale = seconds
        if self._products.any():
            scale = min(max(self.seconds(features), seconds / OUTLIER), seconds * OUTLIER)
        relative = np.array([*features, seconds]) / scale
        self._products = (1 - 1 / KEPT_FORWARDS) * self._products + np.outer(relative[:-1], relative)
        self._coefficients = None

    def seconds(self, features: tuple[float, ...]) -> float:
        if self._coefficients is None:
            weight = self._products.diagonal()
            ridge = np.diag(np.where(weight > 0, RIDGE * weight, 1.0))
            self._coefficients = np.linalg.solve(self._products[:, :-1] + ridge, self._products[:, -1]).tolist()
        expected = sum(c * feature for c, feature in zip(self._coefficients, features, strict=True))
        return max(LEAST_SECONDS, expected)
