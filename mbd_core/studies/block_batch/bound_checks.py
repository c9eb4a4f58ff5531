"""The checks of the bounds in Propositions 1 to 3 on all watched caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mbd_core.studies.block_batch.cache_bounds import Bound, Drift, error_bounds, measured_drift
from mbd_core.studies.block_batch.cache_events import CacheRun
from mbd_core.studies.block_batch.study import StudiedPrompt

FLOAT_ROUNDING = 8.0  # the allowed error of a refresh, in relative errors of the dtype
TINY = 1e-9  # a bound below this counts as this


@dataclass(frozen=True, kw_only=True)
class BoundCheck:
    """A statement of a proposition, true in `held` of `count` checks; `value` and `bound` of the tightest check."""

    proposition: str
    statement: str
    relation: str
    block_length: int | None
    count: int
    held: int
    value: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.held == self.count


def checks_of(prompts: Sequence[StudiedPrompt], *, rounding: float) -> list[BoundCheck]:
    """Every bound of Props. 1 to 3 on the watched caches; `rounding` is the relative error of their dtype."""
    records = [p.caches for p in prompts if p.caches is not None]
    checks: list[BoundCheck | None] = []
    for n in sorted(records[0].singles) if records else []:
        watches = [r.singles[n] for r in records]
        checks += _first_proposition(n, watches)
        checks += _second_proposition(n, watches, rounding)
    distances = [b for r in records for b in r.distances]
    checks.append(_check("3", "projected distance d_proj of two branches, at most their distance d", None, distances))
    return [c for c in checks if c is not None]


def _first_proposition(n: int, watches: Sequence[CacheRun]) -> list[BoundCheck | None]:
    energies = [Bound(mean, share) for w in watches for mean, share in w.energies]
    movements = [m for w in watches for m in w.movements]
    against = [b for m in movements if (b := m.against_refresh) is not None]
    return [
        _check("Lemma 1", "E |P_B Δ_full|² = m/L |Δ_full|²", n, energies, relation="=", test=_equal),
        _check("1", "E |P_B Δ_full| ≤ √(m/L) |Δ_full|", n, [p for w in watches for p in w.projections]),
        _check("1", "E |Δ_blk| ≤ √(m/L) |Δ_full| + E |r|", n, [m.bound for m in movements]),
        _check(
            "1",
            f"E |Δ_blk| < |Δ_full| where E |r| < (1 − √(m/L)) |Δ_full| (so in {len(against)} of {len(movements)})",
            n,
            against,
            relation="<",
        ),
    ]


def _second_proposition(n: int, watches: Sequence[CacheRun], rounding: float) -> list[BoundCheck | None]:
    exact = [
        Bound(e.error, FLOAT_ROUNDING * rounding * e.norm)
        for w in watches
        for e in w.events
        if e.kind == "refresh" and e.error is not None and e.norm is not None
    ]
    drifts = [measured_drift(w.errors, w.kinds) for w in watches]
    own = [b for w, drift in zip(watches, drifts, strict=True) for b in error_bounds(w.errors, w.kinds, drift)]
    foreign = []
    for number, w in enumerate(watches):
        others = drifts[:number] + drifts[number + 1 :]
        if others:
            foreign += error_bounds(w.errors, w.kinds, _widest(others))
    return [
        _check("2", "a full refresh is exact (β = 0, ε_F = 0): E after it, at most rounding", n, exact),
        _check("2", "E ≤ a^r Y + ε_B Σ a^i, constants of the same run (true if the code is)", n, own),
        _check("2", "the same, constants of the other prompts' runs (a prediction)", n, foreign),
    ]


def _widest(drifts: Sequence[Drift]) -> Drift:
    return Drift(
        growth=max(d.growth for d in drifts),
        block_noise=max(d.block_noise for d in drifts),
        contraction=max(d.contraction for d in drifts),
        refresh_noise=max(d.refresh_noise for d in drifts),
    )


def _equal(bound: Bound) -> bool:
    return bool(np.isclose(bound.value, bound.bound, rtol=1e-6))


def _check(
    proposition: str,
    statement: str,
    block_length: int | None,
    bounds: Sequence[Bound],
    *,
    relation: str = "≤",
    test: Callable[[Bound], bool] = lambda bound: bound.holds,
) -> BoundCheck | None:
    if not bounds:
        return None
    tightest = max(bounds, key=lambda b: (not test(b), b.value / max(b.bound, TINY)))
    return BoundCheck(
        proposition=proposition,
        statement=statement,
        relation=relation,
        block_length=block_length,
        count=len(bounds),
        held=sum(map(test, bounds)),
        value=tightest.value,
        bound=tightest.bound,
    )
