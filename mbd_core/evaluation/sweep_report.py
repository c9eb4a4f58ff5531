"""The numbers of a sweep's report: a summary of every configuration, and both AUPs with their points."""

import json
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
    """Both AUPs of a model and method on a task; `y_max` is the best accuracy of any row on the task."""

    model: str
    method: str
    task: str
    aup_eq41: float
    aup_d3llm: float
    points: tuple[AupPoint, ...]
    dropped: tuple[AupPoint, ...]
    y_max: float
    alpha: float


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
    """Both AUPs of every (model, method, task), over all its configurations."""
    best: dict[str, float] = {}
    points: dict[tuple[str, str, str], list[AupPoint]] = {}
    for row in rows:
        key, s = row.key, row.summary
        best[key.task] = max(best.get(key.task, 0.0), s.accuracy)
        points.setdefault((key.model, key.method, key.task), []).append((s.tpf, s.accuracy))
    aups = []
    for (model, method, task), curve in points.items():
        weighted = aup_d3llm(curve, y_max=best[task], alpha=alpha)
        aups.append(
            AupRow(
                model=model,
                method=method,
                task=task,
                aup_eq41=aup_eq41(curve),
                aup_d3llm=weighted.value,
                points=tuple(sorted(curve)),
                dropped=weighted.dropped,
                y_max=best[task],
                alpha=alpha,
            )
        )
    return aups


def best_row(rows: Iterable[ReportRow]) -> ReportRow:
    """The row of best accuracy, the higher TPF on ties."""
    return max(rows, key=lambda row: (row.summary.accuracy, row.summary.tpf))


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
