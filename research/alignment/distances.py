"""Distances of training's states from inference's: total variation and Wasserstein-1 (paper Section 4.4, Eq. A.5).

Every distance is computed for several weightings of the inference states at once: the first counts every state once,
the other weightings are bootstrap samples of the problems. The training states are drawn, so they are fixed and many.

Shape legend: W weightings, S states, N slots, B bins.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from mbd_core.evaluation.measures.statistics import Interval
from mbd_core.multitf.states.fitted_noise import FittedNoise
from mbd_core.multitf.states.layout import Layouts, StateConfig
from mbd_core.multitf.states.noise import SCHEDULES, NoiseBounds
from research.alignment.states import ModelTraces, States, halves, training_states

NUM_BINS = 10
LEAST_STATES = 30
"""A running-set size, or a slot, with fewer states of either side has no distance of its own."""


@dataclass(frozen=True, kw_only=True)
class SizeDistance:
    """Wasserstein-1 of the vectors of mask ratios of one running-set size, under the l1 metric.

    It lies between `lower`, the sum of the slots' own distances, and `upper`, the cost of the best of a few explicit
    couplings; for one slot the two are the same.
    """

    size: int
    num_inference: int
    num_training: int
    lower: Interval
    upper: float


@dataclass(frozen=True, kw_only=True)
class Distances:
    """A schedule's states against a model's.

    delta_r      total variation of the running-set sizes: a lower bound of Eq. A.5's term, which compares the sets
                 themselves
    slots_tv     total variation of each slot's mask ratios in `NUM_BINS` bins, over all sizes; rare slots are left out
    slots_w1     Wasserstein-1 of each slot's mask ratios, over all sizes
    by_size      Wasserstein-1 of the vectors of mask ratios, for every size that both sides have often enough
    mean_w1      mean of the lower bounds in `by_size`, weighted by inference's frequency of each size
    delta_t      the largest lower and upper bound in `by_size`; Eq. A.5's term also covers the sizes left out here
    left_out     share of the inference states whose size has no distance
    """

    delta_r: Interval
    slots_tv: tuple[Interval, ...]
    slots_w1: tuple[Interval, ...]
    by_size: tuple[SizeDistance, ...]
    mean_w1: Interval | None
    delta_t: tuple[float, float] | None
    left_out: float


def compare(inference: States, training: States, *, num_bootstrap: int, seed: int) -> Distances:
    """The distances of a noise-schedule and layout from a model's traces."""
    weights_WS = bootstrap_weights(inference, num_bootstrap=num_bootstrap, seed=seed)
    num_slots = max(inference.ratios_SN.shape[1], training.ratios_SN.shape[1])
    sizes_W = _total_variation(
        _shares(inference.sizes_S, weights_WS, num_slots + 1), np.bincount(training.sizes_S, minlength=num_slots + 1)
    )
    slots_tv, slots_w1 = [], []
    for inference_ratios, weights, training_ratios in _slots(inference, training, weights_WS):
        bins = np.minimum((inference_ratios * NUM_BINS).astype(int), NUM_BINS - 1)
        histogram = np.histogram(training_ratios, bins=NUM_BINS, range=(0.0, 1.0))[0]
        slots_tv.append(Interval.of_weightings(_total_variation(_shares(bins, weights, NUM_BINS), histogram)))
        slots_w1.append(Interval.of_weightings(wasserstein(inference_ratios, weights, training_ratios)))
    by_size, lower_W, weight_W = [], np.zeros(len(weights_WS)), np.zeros(len(weights_WS))
    for size in range(1, num_slots + 1):
        in_inference, in_training = inference.sizes_S == size, training.sizes_S == size
        if min(in_inference.sum(), in_training.sum()) < LEAST_STATES:
            continue
        inference_ratios, training_ratios = (
            inference.ratios_SN[in_inference, :size],
            training.ratios_SN[in_training, :size],
        )
        weights = weights_WS[:, in_inference]
        bound_W = sum(
            (wasserstein(inference_ratios[:, n], weights, training_ratios[:, n]) for n in range(size)),
            np.zeros(len(weights)),
        )
        by_size.append(
            SizeDistance(
                size=size,
                num_inference=int(in_inference.sum()),
                num_training=int(in_training.sum()),
                lower=Interval.of_weightings(bound_W),
                upper=coupling_cost(inference_ratios, training_ratios),
            )
        )
        lower_W += bound_W * weights.sum(1)
        weight_W += weights.sum(1)
    return Distances(
        delta_r=Interval.of_weightings(sizes_W),
        slots_tv=tuple(slots_tv),
        slots_w1=tuple(slots_w1),
        by_size=tuple(by_size),
        mean_w1=Interval.of_weightings(lower_W / np.maximum(weight_W, 1)) if by_size else None,
        delta_t=(max(s.lower.value for s in by_size), max(s.upper for s in by_size)) if by_size else None,
        left_out=float(1.0 - weight_W[0] / weights_WS[0].sum()),
    )


def bootstrap_weights(states: States, *, num_bootstrap: int, seed: int) -> np.ndarray:
    """The weight of each state (1 + `num_bootstrap`, S): 1 first, then the number of times its problem was drawn.

    All counts of a bootstrap sample come from one draw, and the published distances depend on this.
    `statistics.bootstrap` draws the problems one by one.
    """
    share = np.full(states.num_problems, 1.0 / states.num_problems)
    counts = np.random.default_rng(seed).multinomial(states.num_problems, share, size=num_bootstrap)
    return np.vstack([np.ones(states.num_problems, dtype=np.int64), counts])[:, states.problem_S]


def wasserstein(inference_S: np.ndarray, weights_WS: np.ndarray, training: np.ndarray) -> np.ndarray:
    """Wasserstein-1 of numbers, for each weighting of `inference_S`: the area between the distribution functions."""
    grid, place = np.unique(np.concatenate([inference_S, training]), return_inverse=True)
    q = np.bincount(place[len(inference_S) :], minlength=len(grid)) / len(training)
    p_W = _shares(place[: len(inference_S)], weights_WS, len(grid))
    return np.abs(np.cumsum(p_W - q, axis=1))[:, :-1] @ np.diff(grid)


def coupling_cost(inference_SN: np.ndarray, training_SN: np.ndarray) -> float:
    """An upper bound of Wasserstein-1 under the l1 metric: both sides are sorted and paired, in the cheapest order.

    Tried are the orders by the sum of the ratios, and by each slot, with ties broken by the other slots.
    """
    size = inference_SN.shape[1]
    grid = np.union1d(
        np.arange(1, len(inference_SN) + 1) / len(inference_SN), np.arange(1, len(training_SN) + 1) / len(training_SN)
    )
    share = np.diff(grid, prepend=0.0)
    costs = []
    for first in (None, *range(size)):
        pairs = []
        for rows in (inference_SN, training_SN):
            keys = [rows[:, n] for n in range(size - 1, -1, -1) if n != first]
            order = np.lexsort([*keys, rows.sum(1) if first is None else rows[:, first]])
            pairs.append(rows[order[((grid - share / 2) * len(rows)).astype(int)]])
        costs.append(share @ np.abs(pairs[0] - pairs[1]).sum(1))
    return float(min(costs))


def _slots(
    inference: States, training: States, weights_WS: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For every slot that both sides have often enough: its mask ratios, their weights, and its ratios in training."""
    for slot in range(min(inference.ratios_SN.shape[1], training.ratios_SN.shape[1])):
        inference_ratios, training_ratios = inference.ratios_SN[:, slot], training.ratios_SN[:, slot]
        in_inference, in_training = ~np.isnan(inference_ratios), ~np.isnan(training_ratios)
        if min(in_inference.sum(), in_training.sum()) >= LEAST_STATES:
            yield inference_ratios[in_inference], weights_WS[:, in_inference], training_ratios[in_training]


def _shares(values_S: np.ndarray, weights_WS: np.ndarray, num_values: int) -> np.ndarray:
    """The share of each whole number, for each weighting."""
    counts = np.stack([np.bincount(values_S, weights, minlength=num_values) for weights in weights_WS])
    return counts / np.maximum(counts.sum(1, keepdims=True), 1e-300)


def _total_variation(p_WB: np.ndarray, counts_B: np.ndarray) -> np.ndarray:
    return np.abs(p_WB - counts_B / counts_B.sum()).sum(1) / 2


FITTED = "fitted"
D2F_BOUNDS = NoiseBounds(t_low=0.2, t_high=0.7, margin=0.0)


@dataclass(frozen=True, kw_only=True)
class ComparedSchedule:
    """A schedule's states, and their distances from the model's."""

    name: str
    states: States
    distances: Distances


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """A model's measured states, and every schedule beside them. States to which `fitted` was fitted are left out."""

    name: str
    inference: States
    fitted: FittedNoise
    schedules: tuple[ComparedSchedule, ...]


def schedule_config(name: str, base: StateConfig, *, noise: FittedNoise | None) -> StateConfig:
    """Training states of the schedule and layout of that name. Raises `ValueError` for an unknown name, and for a
    schedule that cannot be drawn."""
    schedule, mark, layouts = name.partition("@")
    if schedule not in SCHEDULES:
        raise ValueError(f"noise-schedule '{schedule}' is unknown; known: {', '.join(SCHEDULES)}")
    # d2f is one sequence without a clean sequence, and so without a running-set
    known_layouts = [kind for kind in get_args(Layouts) if kind != "d2f"]
    if mark and layouts not in known_layouts:
        raise ValueError(f"layout '{layouts}' of {name} is unknown; known: {', '.join(known_layouts)}")
    bounds = D2F_BOUNDS if schedule == "d2f_monotonic" else base.bounds
    changes: dict[str, Any] = {"schedule": schedule, "bounds": replace(bounds, fitted=noise)}
    if layouts == "one_group":
        changes |= {"layouts": layouts, "max_group": 1, "num_random": 0, "num_layouts": 1}
    elif layouts:
        changes |= {"layouts": layouts, "num_random": max(1, base.num_random)}
    return replace(base, **changes)


def check_schedules(names: Sequence[str], base: StateConfig) -> None:
    """Raises `ValueError` for a schedule that cannot be drawn: `NAME` or `NAME@LAYOUT`, with `base`'s other fields."""
    any_noise = FittedNoise(states=(((1.0,), 1),), source="nothing yet")
    for name in names:
        schedule_config(name, base, noise=any_noise)


def compare_models(
    models: Sequence[ModelTraces],
    schedules: Sequence[str],
    base: StateConfig,
    *,
    draws: int,
    num_bootstrap: int,
    seed: int,
) -> list[ComparedModel]:
    """Every model beside every schedule, whose layouts are drawn `draws` times for every problem.

    `fitted` is fitted to even-numbered problems, and every distance is measured from the odd-numbered problems. Raises
    `ValueError` for a trace without its block size or with too few problems.
    """
    for traces in models:
        if traces.run.block_size is None:
            raise ValueError(f"the trace of {traces.name} does not say its block size")
    results = []
    for traces in models:
        assert traces.run.block_size is not None
        noise, inference, examples = halves(traces)
        of_model, of_schedules = replace(base, block_size=traces.run.block_size), []
        for name in schedules:
            config = schedule_config(name, of_model, noise=noise if name.partition("@")[0] == FITTED else None)
            states = training_states(examples, config, draws=draws, seed=seed)
            distances = compare(inference, states, num_bootstrap=num_bootstrap, seed=seed)
            of_schedules.append(ComparedSchedule(name=name, states=states, distances=distances))
        results.append(
            ComparedModel(name=traces.name, inference=inference, fitted=noise, schedules=tuple(of_schedules))
        )
    return results
