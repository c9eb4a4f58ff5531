"""Decoding settings that were chosen on one task, used on the others: what a default costs where it was not tuned."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mbd_core.evaluation.report.sections import table_line
from mbd_core.evaluation.sweep.best import decoding_fields, knee

ChosenBy = Literal["accuracy", "knee"]
OWN = "block_size"
"""The model's own: it is no setting that goes from one model to another."""


@dataclass(frozen=True)
class Subject:
    """A model on a task."""

    model: str
    task: str

    def __str__(self) -> str:
        return f"{self.model} on {self.task}"


Setting = str  # the fields as JSON
Measured = Mapping[Subject, Mapping[Setting, Mapping[str, Any]]]


def transfer_table(chosen_on: Sequence[Path], reported_on: Sequence[Path], *, by: ChosenBy) -> str:
    """As Markdown: each subject of the sweeps `reported_on` under the settings chosen on each subject of the sweeps
    `chosen_on`, SingleBD's left out.

    The most accurate setting is chosen (the higher TPF on ties), or the knee of accuracy against TPF. Raises
    `ValueError` for subjects that one side lacks, and for a setting that was not measured on a subject.
    """
    if both := {folder.resolve() for folder in chosen_on} & {folder.resolve() for folder in reported_on}:
        raise ValueError(f"{min(both)} is on both sides: report settings on other problems than they were chosen on")
    tuning, measured = _multi(chosen_on), _multi(reported_on)
    if alone := sorted(map(str, tuning.keys() ^ measured.keys())):
        raise ValueError(f"{alone[0]} is on one side alone; sweep the same models and tasks on both")
    chosen = {subject: _choice(rows, by) for subject, rows in tuning.items()}
    varied = _varied(chosen.values())
    lines = [table_line(["Settings chosen on", "they are", *map(str, measured)]), "|" + "---|" * (2 + len(measured))]
    for source, setting in chosen.items():
        shown = ", ".join(f"{name}={json.loads(setting).get(name)}" for name in varied)
        cells = [_cell(rows, setting, source, subject) for subject, rows in measured.items()]
        lines.append(table_line([str(source), shown or "the same", *cells]))
    return "\n".join(lines)


def _multi(folders: Sequence[Path]) -> Measured:
    """The rows of sweeps by subject and setting."""
    from mbd_core.evaluation.sweep.folder import read_report

    found: dict[Subject, dict[Setting, Mapping[str, Any]]] = {}
    for folder in folders:
        for row in read_report(folder)["rows"]:
            fields = decoding_fields(row["config"])
            if fields.get("buffer_size", 1) == 1:
                continue
            setting = json.dumps({name: value for name, value in sorted(fields.items()) if name != OWN})
            subject = Subject(row["model"], row["task"])
            if setting in found.setdefault(subject, {}):
                raise ValueError(f"{folder}: {subject} stands there again with one setting; give one sweep of each")
            found[subject][setting] = row
    if not found:
        raise ValueError(f"{', '.join(map(str, folders))}: no configuration with several slots was swept")
    return found


def _choice(rows: Mapping[Setting, Mapping[str, Any]], by: ChosenBy) -> Setting:
    places = {setting: (row["accuracy"], row["tpf"] or 0.0) for setting, row in rows.items()}
    best = max(places.values()) if by == "accuracy" else knee(list(places.values()))
    return next(setting for setting, place in places.items() if place == best)


def _varied(settings: Iterable[Setting]) -> list[str]:
    """The fields in which the settings differ."""
    known = [json.loads(setting) for setting in settings]
    names = dict.fromkeys(name for fields in known for name in fields)
    return [name for name in names if len({str(fields.get(name)) for fields in known}) > 1]


def _cell(rows: Mapping[Setting, Mapping[str, Any]], setting: Setting, source: Subject, subject: Subject) -> str:
    if setting not in rows:
        raise ValueError(f"the setting chosen on {source} was not measured on {subject}; sweep the same grid there")
    row = rows[setting]
    return (
        f"{row['accuracy']:.1f} [{row['accuracy_low']:.1f}, {row['accuracy_high']:.1f}], TPF {row['tpf'] or 0.0:.2f}"
    )
