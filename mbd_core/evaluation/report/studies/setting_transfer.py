"""Decoding settings chosen on one task and used on other tasks: the cost of a default on tasks for which it was not
tuned."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mbd_core.evaluation.report.studies.seeds import settings_text, varied_names
from mbd_core.evaluation.sweep.choice.best import decoding_fields, knee
from mbd_core.evaluation.sweep.folder import read_report
from mbd_core.tables import Table

ChosenBy = Literal["accuracy", "knee"]
MODEL_SETTING = "block_size"  # a setting keeps the block size of each model


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
    without SingleBD's settings.

    The most accurate setting is chosen (the higher TPF on ties), or the knee of accuracy against TPF. Raises
    `ValueError` for subjects that one side lacks, and for a setting that was not measured on a subject.
    """
    if shared_folders := {folder.resolve() for folder in chosen_on} & {folder.resolve() for folder in reported_on}:
        raise ValueError(
            f"{min(shared_folders)} is on both sides: report settings on other problems than they were chosen on"
        )
    tuning, results = _multi(chosen_on), _multi(reported_on)
    if lone_subjects := sorted(map(str, tuning.keys() ^ results.keys())):
        raise ValueError(f"{lone_subjects[0]} is on one side only; sweep the same models and tasks on both")
    choices = {subject: _choice(rows, by) for subject, rows in tuning.items()}
    varied = varied_names([json.loads(setting) for setting in choices.values()])
    return Table(
        columns=("Settings chosen on", "they are", *map(str, results)),
        rows=[
            (
                str(source),
                settings_text(json.loads(setting), varied) or "the same",
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
