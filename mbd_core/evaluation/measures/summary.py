"""The numbers of a sweep's report: a summary of every configuration, and both AUPs with their points and intervals.

A draw takes as many problems as the task has, with replacement. All points of all curves are computed anew on it, and
with them y_max, the order of the points and which of them d3LLM drops: an AUP is a function of the problems, and each
of these is a part of that function. A y_max that stayed as it was would be a number from outside: no draw could pass
it, though every one may fall behind it.

A mean over tasks has its own interval: of the means of the tasks' draws, which are independent of each other, but for
tasks of the same problems: these share their draws, since an answer to one says much of the answer to the other.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mbd_core.evaluation.measures.aup import AupPoint, aup_d3llm, aup_eq41
from mbd_core.evaluation.measures.rates import GradedSample, Summary, summarize
from mbd_core.evaluation.measures.statistics import mean


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


@dataclass(frozen=True)
class AupRow:
    """Both AUPs of a model and method on a task, with what they depend on.

    anchor      the slowest point, up to which d3LLM's area is a rectangle without weight; no point is added at TPF 1
    y_max       the best accuracy in the pool, which is every row on the task; `y_max_of` is the row that has it
    y_max_pool  the models and methods of the pool, with their numbers of configurations
    *_interval  95 % intervals (`aup_interval`), `None` where none can be drawn
    """

    model: str
    method: str
    task: str
    aup_eq41: float
    aup_d3llm: float
    points: tuple[AupPoint, ...]
    dropped: tuple[AupPoint, ...]
    anchor: AupPoint
    y_max: float
    y_max_of: str
    y_max_pool: tuple[str, ...]
    alpha: float
    eq41_interval: tuple[float, float] | None = None
    d3llm_interval: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class AupMean:
    """Both AUPs of a model and method as means over these tasks, with 95 % intervals of the means (`aup_interval`)."""

    model: str
    method: str
    tasks: tuple[str, ...]
    aup_eq41: float
    aup_d3llm: float
    eq41_interval: tuple[float, float] | None
    d3llm_interval: tuple[float, float] | None


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


def build_aup(rows: Sequence[ReportRow], *, alpha: float = 3.0) -> list[AupRow]:
    """Both AUPs of every (model, method, task), over all its configurations; none of an endpoint whose TPF is not
    known, which is in the pool of y_max all the same."""
    by_task: dict[str, list[ReportRow]] = {}
    curves: dict[tuple[str, str, str], list[AupPoint]] = {}
    for row in rows:
        key, s = row.key, row.summary
        by_task.setdefault(key.task, []).append(row)
        if s.tpf is not None:
            curves.setdefault((key.model, key.method, key.task), []).append((s.tpf, s.accuracy))
    aups = []
    for (model, method, task), curve in curves.items():
        best = best_row(by_task[task])
        weighted = aup_d3llm(curve, y_max=best.summary.accuracy, alpha=alpha)
        aups.append(
            AupRow(
                model=model,
                method=method,
                task=task,
                aup_eq41=aup_eq41(curve),
                aup_d3llm=weighted.value,
                points=tuple(sorted(curve)),
                dropped=weighted.dropped,
                anchor=weighted.points[0],
                y_max=best.summary.accuracy,
                y_max_of=", ".join(filter(None, (best.key.model, best.key.method, best.varied))),
                y_max_pool=_pool(by_task[task]),
                alpha=alpha,
            )
        )
    return aups


def _pool(rows: Iterable[ReportRow]) -> tuple[str, ...]:
    """The models and methods of the rows, with their numbers of configurations."""
    counts = Counter(f"{row.key.model}, {row.key.method}" for row in rows)
    return tuple(f"{name} ({count})" for name, count in counts.items())


def best_row(rows: Iterable[ReportRow]) -> ReportRow:
    """The row of best accuracy, the higher TPF on ties."""
    return max(rows, key=lambda row: (row.summary.accuracy, row.summary.tpf or 0.0))


def token_efficiency(row: ReportRow) -> float | None:
    """The token-efficiency factor (MBD-LMs, Section 4.5): TPF over the buffer_size x block_size positions of a whole
    Block Buffer. `None` for a canvas, whose forwards are no buffer's, and where TPF or the sizes are not known."""
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


# Intervals of both AUPs: a bootstrap over a task's problems, the same drawn problems for every configuration.

NUM_DRAWS = 2000
SEED = 0
LEVEL = 95.0  # percent
DIGITS = 6  # beyond them a sum may depend on how a machine adds
ENTRIES = 4_000_000  # numbers of one block of draws

Interval = tuple[float, float]
Samples = Mapping[ReportKey, Sequence[GradedSample]]
Areas = tuple[np.ndarray, np.ndarray]  # of every draw (D,): Eq. 4.1's AUP and d3LLM's


def with_intervals(
    aups: Sequence[AupRow], samples: Samples, *, num_draws: int = NUM_DRAWS
) -> tuple[list[AupRow], list[AupMean]]:
    """The AUPs with their percentile intervals, and their means over tasks with theirs. What `samples` says of a task
    does not depend on other tasks."""
    areas: dict[tuple[str, str, str], Areas | None] = {}
    for task in dict.fromkeys(key.task for key in samples):
        of_task = {key: graded for key, graded in samples.items() if key.task == task}
        curves = [(aup.model, aup.method) for aup in aups if aup.task == task]
        alpha = next((aup.alpha for aup in aups if aup.task == task), 0.0)
        for curve, drawn in zip(curves, task_areas(of_task, curves, alpha, num_draws=num_draws), strict=True):
            areas[(*curve, task)] = drawn
    rows = []
    for aup in aups:
        plain, weighted = mean_intervals([areas[aup.model, aup.method, aup.task]])
        rows.append(replace(aup, eq41_interval=plain, d3llm_interval=weighted))
    return rows, [
        _mean([aup for aup in aups if (aup.model, aup.method) == curve], areas)
        for curve in dict.fromkeys((aup.model, aup.method) for aup in aups)
    ]


def _mean(aups: Sequence[AupRow], areas: Mapping[tuple[str, str, str], Areas | None]) -> AupMean:
    """The mean of one model's and method's AUPs."""
    plain, weighted = mean_intervals([areas[aup.model, aup.method, aup.task] for aup in aups])
    return AupMean(
        model=aups[0].model,
        method=aups[0].method,
        tasks=tuple(aup.task for aup in aups),
        aup_eq41=mean([aup.aup_eq41 for aup in aups]),
        aup_d3llm=mean([aup.aup_d3llm for aup in aups]),
        eq41_interval=plain,
        d3llm_interval=weighted,
    )


def mean_intervals(areas: Sequence[Areas | None]) -> tuple[Interval | None, Interval | None]:
    """The intervals of the means over tasks, of each task's areas; none if a task has none."""
    drawn = [one for one in areas if one is not None]
    if len(drawn) < len(areas):
        return None, None
    plain_D, weighted_D = np.mean(drawn, axis=0)
    return interval(plain_D), interval(weighted_D)


def task_areas(
    samples: Samples, curves: Sequence[tuple[str, str]], alpha: float, *, num_draws: int
) -> Iterator[Areas | None]:
    """Both AUPs of every draw for each (model, method) on the task of `samples`; none of a single problem."""
    problems = {sample.problem for graded in samples.values() for sample in graded}
    if len(problems) < 2:
        yield from (None for _ in curves)
        return
    tpf_KD, accuracy_KD = drawn_points(
        samples, seed=zlib.crc32("\n".join(sorted(problems)).encode()), num_draws=num_draws
    )
    y_max_D = np.nanmax(accuracy_KD, axis=0)
    keys = list(samples)
    for model, method in curves:
        curve = [number for number, key in enumerate(keys) if (key.model, key.method) == (model, method)]
        points = sorted_points(tpf_KD[curve], accuracy_KD[curve])
        yield eq41(*points), d3llm(*points, y_max_D, alpha=alpha)


def drawn_points(samples: Samples, *, seed: int, num_draws: int) -> tuple[np.ndarray, np.ndarray]:
    """TPF and accuracy of every configuration (K) in every draw (D); NaN where a draw holds none of its problems, as
    in a sweep that is not finished."""
    problems = {name: n for n, name in enumerate(sorted({s.problem for graded in samples.values() for s in graded}))}
    sums_PC = np.zeros((len(problems), 4 * len(samples)))  # samples, right ones, decoded ones, TPF
    for number, graded in enumerate(samples.values()):
        for sample in graded:
            row = sums_PC[problems[sample.problem], 4 * number : 4 * number + 4]
            row += (1, sample.correct, *((0, 0.0) if sample.counts is None else (1, sample.counts.tpf or 0.0)))
    generator = np.random.default_rng([SEED, seed])
    drawn = np.concatenate([weights @ sums_PC for weights in draws(generator, len(problems), num_draws)])
    n, right, decoded, tpf = drawn.reshape(num_draws, len(samples), 4).transpose(2, 1, 0)
    there = np.where(n > 0, n, np.nan)
    return np.where(n > 0, tpf / np.maximum(decoded, 1), np.nan), 100 * right / there


def draws(generator: np.random.Generator, num_problems: int, num_draws: int) -> Iterator[np.ndarray]:
    """How often each problem is drawn, in blocks of draws."""
    block = max(1, ENTRIES // num_problems)
    for first in range(0, num_draws, block):
        counts = [
            np.bincount(generator.integers(num_problems, size=num_problems), minlength=num_problems)
            for _ in range(first, min(first + block, num_draws))
        ]
        yield np.array(counts, dtype=np.float64)


def sorted_points(tpf_KD: np.ndarray, accuracy_KD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points of each draw in the order of `aup`: by TPF, equal ones by falling accuracy."""
    order = np.lexsort((-accuracy_KD, tpf_KD), axis=0)
    return np.take_along_axis(tpf_KD, order, 0), np.take_along_axis(accuracy_KD, order, 0)


def eq41(tpf_KD: np.ndarray, accuracy_KD: np.ndarray) -> np.ndarray:
    """`aup_eq41` of every draw."""
    return (np.diff(tpf_KD, axis=0) * (accuracy_KD[1:] + accuracy_KD[:-1]) / 2).sum(axis=0)


def d3llm(
    tpf_KD: np.ndarray, accuracy_KD: np.ndarray, y_max_D: np.ndarray, *, alpha: float, y_min_offset: float = 5.0
) -> np.ndarray:
    """`aup_d3llm` of every draw."""
    share_KD = np.divide(accuracy_KD, y_max_D, out=np.zeros_like(accuracy_KD), where=y_max_D > 0)
    weighted_KD = accuracy_KD * np.minimum(np.exp(-alpha * (1 - share_KD)), 1.0)
    last_tpf_D, last_weighted_D = tpf_KD[0], weighted_KD[0]
    area_D = tpf_KD[0] * accuracy_KD[0]
    for tpf_D, accuracy_D, weighted_D in zip(tpf_KD[1:], accuracy_KD[1:], weighted_KD[1:], strict=True):
        kept_D = ~(accuracy_D < accuracy_KD[0] - y_min_offset)
        area_D = area_D + np.where(kept_D, (tpf_D - last_tpf_D) * (weighted_D + last_weighted_D) / 2, 0.0)
        last_tpf_D = np.where(kept_D, tpf_D, last_tpf_D)
        last_weighted_D = np.where(kept_D, weighted_D, last_weighted_D)
    return area_D


def interval(values_D: np.ndarray) -> Interval | None:
    """The percentiles of the draws that hold samples of all points, `None` if no draw does."""
    values = values_D[~np.isnan(values_D)]
    if not len(values):
        return None
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return round(float(low), DIGITS), round(float(high), DIGITS)
