"""The numbers of a sweep's report: a summary of every configuration, and both AUPs with their points."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mbd_core.evaluation.aup import AupPoint, aup_d3llm, aup_eq41
from mbd_core.evaluation.rates import GradedSample, Summary, summarize


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
