"""The numbers of a sweep's report: a summary of every configuration, and both AUPs with their points and intervals.

The intervals are of a bootstrap over a task's problems, with the same draws for every configuration. Each draw
computes all curves anew: the points, their order, y_max, and the points that d3LLM drops. All of these depend on the
problems.

The interval of a mean over tasks comes from the means over tasks of each draw. Draws of different tasks are
independent. Tasks of the same problems share their draws, because the answers to a problem in two tasks are not
independent.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mbd_core.evaluation.measures.aup import ALPHA, AupPoint, are_kept, aup_d3llm, aup_eq41, sorted_points
from mbd_core.evaluation.measures.rates import GradedSample, Summary, summarize
from mbd_core.evaluation.measures.statistics import NUM_DRAWS, Interval, bootstrap, mean


@dataclass(frozen=True)
class ReportKey:
    """The subject of one summary; `config` is the whole decoding configuration as JSON text."""

    model: str
    method: str
    task: str
    config: str


@dataclass(frozen=True)
class ReportRow:
    """One configuration's summary; `varied` has the fields in which its method's configurations differ."""

    key: ReportKey
    config: Mapping[str, Any]
    varied: str
    summary: Summary


SamplesByKey = Mapping[ReportKey, Sequence[GradedSample]]


@dataclass(frozen=True, kw_only=True)
class AupRow:
    """Both AUPs of a model and method on a task, with the settings that they depend on.

    eq41, d3llm  without bounds if the bootstrap gives none
    anchor       the slowest point; d3LLM's area up to it is a rectangle without weight, and no point is added at TPF 1
    y_max        the best accuracy in the pool, which is every row on the task; `y_max_of` is the row that has it
    y_max_pool   the models and methods of the pool, with their numbers of configurations
    slots        the buffer size of the points; `None`: they are of every size
    """

    model: str
    method: str
    task: str
    eq41: Interval
    d3llm: Interval
    points: tuple[AupPoint, ...]
    dropped: tuple[AupPoint, ...]
    anchor: AupPoint
    y_max: float
    y_max_of: str
    y_max_pool: tuple[str, ...]
    alpha: float
    slots: int | None = None


@dataclass(frozen=True, kw_only=True)
class AupMean:
    """Both AUPs of a model and method as means over these tasks."""

    model: str
    method: str
    tasks: tuple[str, ...]
    eq41: Interval
    d3llm: Interval


def build_rows(samples: Mapping[ReportKey, Sequence[GradedSample]]) -> list[ReportRow]:
    """A summary for every key, in the order of `samples`."""
    configs = {key: json.loads(key.config) for key in samples}
    fields = {key: dict(_flat(config)) for key, config in configs.items()}
    by_method: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for key in samples:
        by_method.setdefault((key.model, key.method), []).append(fields[key])
    names = {method: _varied_fields(configs) for method, configs in by_method.items()}
    return [
        ReportRow(key, configs[key], _varied_text(fields[key], names[key.model, key.method]), summarize(graded))
        for key, graded in samples.items()
    ]


def build_aup(rows: Sequence[ReportRow], *, by_slots: bool = False, alpha: float = ALPHA) -> list[AupRow]:
    """Both AUPs of every (model, method, task), over all its configurations, without bounds. An endpoint of unknown
    TPF has no AUP, but is in the pool of y_max.

    With `by_slots`, also over its configurations of each buffer size, if they have several sizes.
    """
    by_task: dict[str, list[ReportRow]] = {}
    points: dict[tuple[str, str, str, int | None], list[AupPoint]] = {}
    sizes: dict[tuple[str, str, str], set[int | None]] = {}
    for row in rows:
        key, s = row.key, row.summary
        by_task.setdefault(key.task, []).append(row)
        if s.tpf is not None:
            slots = slots_of(row.config) if by_slots else None
            sizes.setdefault((key.model, key.method, key.task), set()).add(slots)
            points.setdefault((key.model, key.method, key.task, slots), []).append((s.tpf, s.accuracy))
    aups = []
    for (model, method, task, slots), of_curve in points.items():
        if by_slots and (slots is None or len(sizes[model, method, task]) < 2):
            continue
        best, curve = best_row(by_task[task]), sorted_points(of_curve)
        y_max = best.summary.accuracy
        aups.append(
            AupRow(
                model=model,
                method=method,
                task=task,
                eq41=Interval(value=float(aup_eq41(curve))),
                d3llm=Interval(value=float(aup_d3llm(curve, y_max=y_max, alpha=alpha))),
                points=tuple(sorted(of_curve)),
                dropped=tuple((tpf, accuracy) for tpf, accuracy in curve[~are_kept(curve)].tolist()),
                anchor=(float(curve[0, 0]), float(curve[0, 1])),
                y_max=y_max,
                y_max_of=", ".join(filter(None, (best.key.model, best.key.method, best.varied))),
                y_max_pool=_pool(by_task[task]),
                alpha=alpha,
                slots=slots,
            )
        )
    return aups


def slots_of(config: Mapping[str, Any]) -> int | None:
    """The buffer size of a stored configuration; `None` for a canvas, and for an endpoint that chooses its own
    decoding."""
    return None if config.get("canvas") is not None else config.get("buffer_size")


def _pool(rows: Iterable[ReportRow]) -> tuple[str, ...]:
    """The models and methods of the rows, with their numbers of configurations."""
    counts = Counter(f"{row.key.model}, {row.key.method}" for row in rows)
    return tuple(f"{name} ({count})" for name, count in counts.items())


def best_row(rows: Iterable[ReportRow]) -> ReportRow:
    """The row of best accuracy, the higher TPF on ties."""
    return max(rows, key=lambda row: (row.summary.accuracy, row.summary.tpf or 0.0))


def token_efficiency(row: ReportRow) -> float | None:
    """The token-efficiency factor (MBD-LMs, Section 4.5): TPF over the buffer_size x block_size positions of a whole
    Block Buffer. `None` for a canvas, which has no buffer, and if TPF or a size is unknown."""
    size = row.config.get("block_size")
    if row.config.get("canvas") is not None or row.summary.tpf is None or size is None:
        return None
    return row.summary.tpf / (row.config.get("buffer_size", 1) * size)


def _flat(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The fields that are not `None`, with dotted names for the fields of parts."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        elif value is not None:
            yield f"{path}{name}", tuple(value) if isinstance(value, list) else value


def _varied_fields(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields whose values differ between the configurations."""
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({config.get(name) for config in configs}) > 1]


def _varied_text(config: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={config[name]}" for name in names if name in config)


# Intervals of both AUPs.

SEED = 0
DIGITS = 6  # of an interval's bounds; further digits may depend on a machine's order of addition


CurveKey = tuple[str, str, int | None]  # model, method, buffer size; `None`: of every size


def _curve(aup: AupRow) -> CurveKey:
    return aup.model, aup.method, aup.slots


def with_intervals(
    aups: Sequence[AupRow], samples: SamplesByKey, *, num_draws: int = NUM_DRAWS
) -> tuple[list[AupRow], list[AupMean]]:
    """The AUPs with their percentile intervals, and the means over tasks of the AUPs over every size, with their
    intervals. A task's interval does not depend on other tasks."""
    areas: dict[tuple[CurveKey, str], np.ndarray] = {}
    for task in dict.fromkeys(key.task for key in samples):
        of_task = {key: graded for key, graded in samples.items() if key.task == task}
        curves = [_curve(aup) for aup in aups if aup.task == task]
        alpha = next((aup.alpha for aup in aups if aup.task == task), ALPHA)
        for curve, areas_2D in zip(curves, task_areas(of_task, curves, alpha, num_draws=num_draws), strict=True):
            areas[curve, task] = areas_2D

    def measured(of_curve: Sequence[AupRow]) -> tuple[Interval, Interval]:
        """Both AUPs as means over tasks."""
        eq41_D, d3llm_D = np.mean([areas[_curve(aup), aup.task] for aup in of_curve], axis=0)
        return (
            Interval.of_draws(mean([aup.eq41.value for aup in of_curve]), eq41_D, digits=DIGITS),
            Interval.of_draws(mean([aup.d3llm.value for aup in of_curve]), d3llm_D, digits=DIGITS),
        )

    rows = []
    for aup in aups:
        eq41, d3llm = measured([aup])
        rows.append(replace(aup, eq41=eq41, d3llm=d3llm))
    means = []
    for model, method in dict.fromkeys((aup.model, aup.method) for aup in aups):
        of_curve = [aup for aup in aups if _curve(aup) == (model, method, None)]
        eq41, d3llm = measured(of_curve)
        tasks = tuple(aup.task for aup in of_curve)
        means.append(AupMean(model=model, method=method, tasks=tasks, eq41=eq41, d3llm=d3llm))
    return rows, means


def task_areas(
    samples: SamplesByKey, curves: Sequence[CurveKey], alpha: float, *, num_draws: int
) -> Iterator[np.ndarray]:
    """Eq. 4.1's AUP and d3LLM's in every draw (2, D) for each curve on the task of `samples`; NaN if the task has a
    single problem."""
    problems = {sample.problem for graded in samples.values() for sample in graded}
    if len(problems) < 2:
        yield from (np.full((2, num_draws), np.nan) for _ in curves)
        return
    points_K2D = drawn_points(samples, seed=zlib.crc32("\n".join(sorted(problems)).encode()), num_draws=num_draws)
    y_max_D = np.nanmax(points_K2D[:, 1], axis=0)
    keys = list(samples)
    sizes = [slots_of(json.loads(key.config)) for key in keys]
    for model, method, slots in curves:
        of_curve = [
            number
            for number, key in enumerate(keys)
            if (key.model, key.method) == (model, method) and slots in (None, sizes[number])
        ]
        curve = points_K2D[of_curve]
        yield np.stack([aup_eq41(curve), aup_d3llm(curve, y_max=y_max_D, alpha=alpha)])


def drawn_points(samples: SamplesByKey, *, seed: int, num_draws: int) -> np.ndarray:
    """TPF and accuracy of every configuration in every draw (K, 2, D); NaN where a draw holds none of its problems, as
    in a sweep that is not finished."""
    problems = {name: n for n, name in enumerate(sorted({s.problem for graded in samples.values() for s in graded}))}
    sums_PC = np.zeros((len(problems), 4 * len(samples)))  # samples, right samples, decoded samples, TPF
    for number, graded in enumerate(samples.values()):
        for sample in graded:
            row = sums_PC[problems[sample.problem], 4 * number : 4 * number + 4]
            row += (1, sample.correct, *((0, 0.0) if sample.counts is None else (1, sample.counts.tpf or 0.0)))
    blocks = bootstrap(np.zeros(len(problems), dtype=int), num_draws=num_draws, seed=(SEED, seed))
    drawn_DC = np.concatenate([counts_DP @ sums_PC for counts_DP in blocks])
    n, right, decoded, tpf = drawn_DC.reshape(num_draws, len(samples), 4).transpose(2, 1, 0)
    num_samples = np.where(n > 0, n, np.nan)
    mean_tpf = np.where(n > 0, tpf / np.maximum(decoded, 1), np.nan)
    return np.stack([mean_tpf, 100 * right / num_samples], axis=1)
