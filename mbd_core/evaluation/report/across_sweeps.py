"""Tables of several sweeps: over their seeds, of settings on other tasks, and of problems known from training."""

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mbd_core.evaluation.measures.statistics import mean_and_stderr
from mbd_core.evaluation.report.metrics import ACCURACY, NFE, TPF
from mbd_core.evaluation.sweep.best import decoding_fields, knee
from mbd_core.evaluation.sweep.folder import read_report, read_samples
from mbd_core.tables import Cell, Table
from mbd_core.tasks import gsm_mini

# Sweeps that differ only in their seed: mean and standard error over the seeds.

RowKey = tuple[str, str, str, str]


def seed_table(folders: Sequence[Path]) -> Table:
    """Each configuration over the sweeps. `ValueError` for fewer than two sweeps, or a row that is not in all."""
    if len(folders) < 2:
        raise ValueError("a standard error over seeds needs at least two sweeps")
    by_key: dict[RowKey, list[dict[str, Any]]] = defaultdict(list)
    for folder in folders:
        for key, row in _rows_by_key(folder).items():
            by_key[key].append(row)
    metrics = (ACCURACY, TPF, NFE)
    table_rows: list[Sequence[Cell]] = []
    for key, rows in by_key.items():
        if len(rows) != len(folders):
            raise ValueError(f"{' '.join(key)} is in {len(rows)} of {len(folders)} sweeps")
        means = [_mean_text([row[metric.field] for row in rows]) for metric in metrics]
        table_rows.append((*key, sum(row["n"] for row in rows), *means))
    heads = ("model", "method", "task", "config", "n", *(metric.head for metric in metrics))
    return Table(columns=heads, rows=table_rows)


def _rows_by_key(folder: Path) -> dict[RowKey, dict[str, Any]]:
    """A report's rows by model, method, task and the settings in which its configurations differ."""
    rows = read_report(folder)["rows"]
    varied = varied_names([row["config"] for row in rows])
    return {(row["model"], row["method"], row["task"], _settings_text(row["config"], varied)): row for row in rows}


def varied_names(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields in which configurations differ."""
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({str(config.get(name)) for config in configs}) > 1]


def _settings_text(config: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={config.get(name)}" for name in names)


def _mean_text(values: Sequence[float | None]) -> str | None:
    """`None` for what an endpoint does not say."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return None
    mean, stderr = mean_and_stderr(numbers)
    return f"{mean:.2f} ± {stderr:.2f}"


# Decoding settings that are chosen on one task, used on the others: what a default costs where it is not tuned.

ChosenBy = Literal["accuracy", "knee"]
MODEL_SETTING = "block_size"  # the model's own, which does not go from one model to another


@dataclass(frozen=True)
class ModelOnTask:
    """A model on a task."""

    model: str
    task: str

    def __str__(self) -> str:
        return f"{self.model} on {self.task}"


SweptSetting = str  # the fields as JSON
Results = Mapping[ModelOnTask, Mapping[SweptSetting, Mapping[str, Any]]]


def transfer_table(chosen_on: Sequence[Path], reported_on: Sequence[Path], *, by: ChosenBy) -> Table:
    """Each subject of the sweeps `reported_on` under the settings chosen on each subject of the sweeps `chosen_on`,
    SingleBD's left out.

    The most accurate setting is chosen (the higher TPF on ties), or the knee of accuracy against TPF. Raises
    `ValueError` for subjects that one side lacks, and for a setting that was not measured on a subject.
    """
    if shared_folders := {folder.resolve() for folder in chosen_on} & {folder.resolve() for folder in reported_on}:
        raise ValueError(
            f"{min(shared_folders)} is on both sides: report settings on other problems than they were chosen on"
        )
    tuning, results = _multi(chosen_on), _multi(reported_on)
    if lone_subjects := sorted(map(str, tuning.keys() ^ results.keys())):
        raise ValueError(f"{lone_subjects[0]} is on one side alone; sweep the same models and tasks on both")
    choices = {subject: _choice(rows, by) for subject, rows in tuning.items()}
    varied = varied_names([json.loads(setting) for setting in choices.values()])
    return Table(
        columns=("Settings chosen on", "they are", *map(str, results)),
        rows=[
            (
                str(source),
                _settings_text(json.loads(setting), varied) or "the same",
                *(_transfer_text(rows, setting, source, subject) for subject, rows in results.items()),
            )
            for source, setting in choices.items()
        ],
    )


def _multi(folders: Sequence[Path]) -> Results:
    """The rows of sweeps by subject and setting."""
    results: dict[ModelOnTask, dict[SweptSetting, Mapping[str, Any]]] = {}
    for folder in folders:
        for row in read_report(folder)["rows"]:
            fields = decoding_fields(row["config"])
            if fields.get("buffer_size", 1) == 1:
                continue
            setting = json.dumps({name: value for name, value in sorted(fields.items()) if name != MODEL_SETTING})
            subject = ModelOnTask(row["model"], row["task"])
            if setting in results.setdefault(subject, {}):
                raise ValueError(f"{folder}: {subject} has one setting twice; give one sweep of each")
            results[subject][setting] = row
    if not results:
        raise ValueError(f"{', '.join(map(str, folders))}: no configuration with several slots was swept")
    return results


def _choice(rows: Mapping[SweptSetting, Mapping[str, Any]], by: ChosenBy) -> SweptSetting:
    places = {setting: (row["accuracy"], row["tpf"] or 0.0) for setting, row in rows.items()}
    best = max(places.values()) if by == "accuracy" else knee(list(places.values()))
    return next(setting for setting, place in places.items() if place == best)


def _transfer_text(
    rows: Mapping[SweptSetting, Mapping[str, Any]], setting: SweptSetting, source: ModelOnTask, subject: ModelOnTask
) -> str:
    if setting not in rows:
        raise ValueError(f"the setting chosen on {source} was not measured on {subject}; sweep the same grid there")
    row = rows[setting]
    return (
        f"{row['accuracy']:.1f} [{row['accuracy_low']:.1f}, {row['accuracy_high']:.1f}], TPF {row['tpf'] or 0.0:.2f}"
    )


# gsm-mini test problems whose arithmetic chain occurs in training, and the accuracy with and without them.
# A chain is the sequence of an answer's equations, without the words around them.

Chain = tuple[str, ...]

EQUATION = re.compile(r"\d+ [-+*] \d+ = \d+")


def chain(answer: str) -> Chain:
    """The equations of a worked answer."""
    return tuple(EQUATION.findall(answer))


def training_chains(streams: Collection[tuple[int, int]]) -> set[Chain]:
    """The chains of all training problems, which are generated again: `streams` are (seed, number of problems)."""
    return {
        chain(row["answer"])
        for seed, num_problems in streams
        for row in itertools.islice(gsm_mini.generate(split="train", seed=seed), num_problems)
    }


def overlap_table(folders: Sequence[Path], training: Collection[Chain]) -> Table:
    """Accuracy by model, method, threshold and whether the chain is in `training`.

    `folders` are sweeps on gsm-mini's test split, whose problems are generated again.
    """
    correct: dict[tuple[str, str, float, bool], list[bool]] = defaultdict(list)
    for folder in folders:
        settings = read_report(folder)["settings"]
        problems = itertools.islice(
            gsm_mini.generate(split="test", seed=settings["seed"]), settings["tasks"]["gsm-mini"]["n"]
        )
        is_known = {row["question"]: chain(row["answer"]) in training for row in problems}
        for row in read_samples(folder):
            if row["task"] == "gsm-mini":
                tau_m2t = json.loads(row["config"])["tau_m2t"]
                correct[row["model"], row["method"], tau_m2t, is_known[row["prompt"]]].append(row["correct"])
    return Table(
        columns=("model", "method", "tau_m2t", "chain", "n", ACCURACY.head),
        rows=[
            (
                *(model, method, tau_m2t, "in training" if is_known else "unseen", len(values)),
                f"{100 * sum(values) / len(values):.2f}",
            )
            for (model, method, tau_m2t, is_known), values in sorted(correct.items())
        ],
    )
