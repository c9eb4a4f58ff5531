"""A sweep's report: the rows, both AUPs with their points, and the table in the layout of the paper's Table 1."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mbd_core.evaluation.aup import aup_d3llm, aup_eq41
from mbd_core.evaluation.rates import Sample, Summary, summarize

CAPTION = (
    "Accuracy (Acc, percent) and tokens per forward (TPF, mean over samples). Each cell pair is that row's "
    "configuration of best accuracy on that task, the higher TPF on ties; it was chosen on the very samples it is "
    "reported on, so with many configurations the accuracies lean high. Average columns are means over the tasks. "
    "AUP takes all configurations of the row, per task, then the mean over tasks: Eq. 4.1 is the plain trapezoid "
    "(0 with a single configuration), d3LLM's has the first rectangle and weights (no point at TPF 1 is added)."
)


@dataclass(frozen=True)
class RunKey:
    """What one summary is of; `config` is the whole decoding configuration as JSON text."""

    model: str
    method: str
    task: str
    config: str


@dataclass(frozen=True)
class Row:
    """One configuration's summary and the few fields that tell it from its method's other configurations."""

    key: RunKey
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
    points: tuple[tuple[float, float], ...]
    dropped: tuple[tuple[float, float], ...]
    y_max: float
    alpha: float


def build_rows(samples: Mapping[RunKey, Sequence[Sample]], *, configs: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Summaries in the order of `samples`; `configs` maps a key's JSON text to its fields."""
    fields = {text: dict(_flat(config)) for text, config in configs.items()}
    of_method: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for key in samples:
        of_method.setdefault((key.model, key.method), []).append(fields[key.config])
    differing = {method: _differing(of) for method, of in of_method.items()}
    return [
        Row(key, configs[key.config], _varied(fields[key.config], differing[key.model, key.method]), summarize(of))
        for key, of in samples.items()
    ]


def build_aup(rows: Sequence[Row], *, alpha: float = 3.0) -> list[AupRow]:
    """Both AUPs of every (model, method, task), over all its configurations."""
    best: dict[str, float] = {}
    points: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in rows:
        key, s = row.key, row.summary
        best[key.task] = max(best.get(key.task, 0.0), s.accuracy)
        points.setdefault((key.model, key.method, key.task), []).append((s.tpf, s.accuracy))
    found = []
    for (model, method, task), given in points.items():
        weighted = aup_d3llm(given, y_max=best[task], alpha=alpha)
        kept = tuple(sorted(given))
        found.append(
            AupRow(model, method, task, aup_eq41(given), weighted.value, kept, weighted.dropped, best[task], alpha)
        )
    return found


def best_row(rows: Iterable[Row]) -> Row:
    """The row of best accuracy, the higher TPF on ties."""
    return max(rows, key=lambda row: (row.summary.accuracy, row.summary.tpf))


def render_markdown(
    rows: Sequence[Row], aups: Sequence[AupRow], *, labels: Mapping[str, str], settings: Mapping[str, Any]
) -> str:
    """The report as Markdown. `labels` maps the task names to column heads, in column order; of `settings` it names
    seed, machine, engine and what each task's problems are."""
    heads = [f"{label} {what}" for label in labels.values() for what in ("Acc ↑", "TPF ↑")]
    heads += ["Average Acc ↑", "Average TPF ↑", "AUP Eq. 4.1 ↑", "AUP d3LLM ↑"]
    lines = ["# Evaluation sweep", "", CAPTION, ""]
    lines += ["| Model | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    chosen: list[str] = []
    for model, block_size in dict.fromkeys((row.key.model, row.config["block_size"]) for row in rows):
        lines.append(f"| *{model} (blksz={block_size})* |" + " |" * len(heads))
        for method in dict.fromkeys(row.key.method for row in rows if row.key.model == model):
            best = {
                task: best_row(
                    row for row in rows if (row.key.model, row.key.method, row.key.task) == (model, method, task)
                )
                for task in labels
            }
            areas = [a for a in aups if (a.model, a.method) == (model, method)]
            summaries = [best[task].summary for task in labels]
            cells = [f"{value:.2f}" for s in summaries for value in (s.accuracy, s.tpf)]
            cells += [
                f"{_mean([s.accuracy for s in summaries]):.2f}",
                f"{_mean([s.tpf for s in summaries]):.2f}",
                f"{_mean([a.aup_eq41 for a in areas]):.2f}",
                f"{_mean([a.aup_d3llm for a in areas]):.2f}",
            ]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
            used = "; ".join(f"{labels[t]}: {row.varied or 'the only one'}" for t, row in best.items())
            chosen.append(f"- {model}, {method}: {used}")
    lines += ["", "Configuration of each table row:", "", *chosen, ""]
    lines += _details(rows, labels)
    lines += _aup_lines(aups, labels)
    lines += ["## What was run", ""]
    lines += [f"- {name}: {_shown(value)}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def _details(rows: Sequence[Row], labels: Mapping[str, str]) -> list[str]:
    lines = ["## Every configuration", ""]
    lines.append("| Model | Method | Task | Config | n | Acc ± se | TPF ± se | TPF (sums) | TPS | NFE | Errors |")
    lines.append("|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        k, s = row.key, row.summary
        lines.append(
            f"| {k.model} | {k.method} | {labels[k.task]} | {row.varied or '-'} | {s.n} "
            f"| {s.accuracy:.2f} ± {s.accuracy_stderr:.2f} | {s.tpf:.2f} ± {s.tpf_stderr:.2f} "
            f"| {s.tpf_ratio_of_sums:.2f} | {s.tps:.1f} | {s.nfe:.1f} | {s.errors} |"
        )
    return [
        *lines,
        "",
        "NFE: mean decode forwards a sample, store-only ones included, prompt-only prefill not. TPF: useful tokens "
        "(before EOS) per NFE. TPS: useful tokens / decode seconds of a request beside the others of its batch, on "
        "the machine named below; no warm-up is left out. An error (a request that could not be decoded) counts as "
        "wrong and is left out of the rates. se: standard error, binomial for accuracy.",
        "",
    ]


def _aup_lines(aups: Sequence[AupRow], labels: Mapping[str, str]) -> list[str]:
    lines = ["## AUP by task, with its points", ""]
    lines += ["| Model | Method | Task | Eq. 4.1 | d3LLM | y_max | Points (TPF, Acc) | Dropped by d3LLM |"]
    lines += ["|---|---|---|---:|---:|---:|---|---|"]
    for a in aups:
        lines.append(
            f"| {a.model} | {a.method} | {labels[a.task]} | {a.aup_eq41:.2f} | {a.aup_d3llm:.2f} | {a.y_max:.2f} "
            f"| {_points(a.points)} | {_points(a.dropped) or 'none'} |"
        )
    return [*lines, ""]


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"({p:.2f}, {y:.2f})" for p, y in points)


def _flat(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The fields that are set, those of parts under dotted names."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        elif value is not None:
            yield f"{path}{name}", tuple(value) if isinstance(value, list) else value


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fields that do not have one value in all configurations."""
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({config.get(name) for config in configs}) > 1]


def _varied(config: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={config[name]}" for name in names if name in config)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_shown(inner) for inner in value)
    return str(value)
