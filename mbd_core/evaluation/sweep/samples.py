"""A sweep's graded samples as they arrive: written, gathered for the report; and what an engine died of."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from mbd_core.evaluation.measures.rates import RULES, GradedSample, SampleCounts
from mbd_core.evaluation.measures.summary import ReportKey
from mbd_core.evaluation.sweep.endpoint import ENDPOINT_DEFAULT
from mbd_core.evaluation.sweep.folder import SweepFolder, read_record, read_samples
from mbd_core.evaluation.sweep.grading import grade_table
from mbd_core.evaluation.sweep.parts import COUNTS, DECODED_COLUMNS, PLANNED_COLUMNS, Part, Row
from mbd_core.evaluation.sweep.timing import TimedCase
from mbd_core.evaluation.tasks.benchmarks import TASKS

# How far a sweep is: for each model and task the problems that all its configurations have done, and the time left.
#
# All configurations of a problem are in one part, so that they are equally far.

SECONDS = 30.0  # between two reports

Subject = tuple[str, str]  # model, task


class SweepProgress:
    """Counts the rows of `parts`, of which those with the numbers `missing` are to come from `num_engines` engines.

    The rate is that of the rows after each engine's first part: engines start together, and the first parts come
    together, after the time that it takes to start them.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        missing: Collection[int],
        *,
        num_engines: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts, self._clock = {part.number: part for part in parts}, clock
        self._planned, self._left = Counter[Subject](), Counter[Subject]()
        self._configurations: dict[Subject, set[tuple[str, str]]] = {}
        for part in parts:
            rows = Counter(map(_subject, part.rows))
            self._planned += rows
            if part.number in missing:
                self._left += rows
            for row in part.rows:
                self._configurations.setdefault(_subject(row), set()).add((row["method"], row["config"]))
        self._said = self._begun = clock()
        self._num_first = num_engines  # parts until the rate begins
        self._num_done = 0  # rows since then

    def done(self, number: int) -> list[str]:
        """Count a part that has come; the lines to show: of a task that a model has ended, or of all after a while."""
        rows = Counter(map(_subject, self._parts[number].rows))
        self._left -= rows
        ended = [subject for subject in rows if not self._left[subject]]
        now = self._clock()
        if self._num_first:
            self._num_first -= 1
            self._begun = now
        else:
            self._num_done += rows.total()
        if now - self._said < SECONDS:
            return [self._line(subject) for subject in ended]
        self._said = now
        return [self._line(subject) for subject in self._planned if self._left[subject] or subject in ended]

    def _line(self, subject: Subject) -> str:
        model, task = subject
        configurations = len(self._configurations[subject])
        num_problems, left = self._planned[subject] // configurations, self._left[subject] // configurations
        text = f"{model} on {task}: {num_problems - left} of {num_problems} problems"
        text += f" by each of {configurations} configurations"
        return text + (f", about {_duration(self._seconds_left(model))} left" if left and self._num_done else "")

    def _seconds_left(self, model: str) -> float:
        """Until the model has ended: models are decoded in their order."""
        models = list(dict.fromkeys(name for name, _ in self._planned))
        before = models[: models.index(model) + 1]
        rows = sum(left for (name, _), left in self._left.items() if name in before)
        return rows * (self._clock() - self._begun) / self._num_done


def _subject(row: Row) -> Subject:
    return (row["model"], row["task"])


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# Writes a sweep's graded samples to its folder as they arrive, and gathers them by configuration for the report.

COLUMNS = (
    *("sample", "model", "method", "task", "config", "problem_id", "seed", "correct", "error", "finish_reason"),
    *(f"{rule}_correct" for rule in RULES),
    *COUNTS,
)

Samples = dict[ReportKey, list[GradedSample]]


def collect_samples(
    tables: Iterable[tuple[int, pa.Table]], folder: SweepFolder, parts: Sequence[Part], *, num_engines: int = 1
) -> None:
    """Write each table, with the number of its part, and show progress; `parts` are all parts of the folder.

    Raises `RuntimeError` if some are missing at the end.
    """
    missing = set(folder.missing())
    progress = SweepProgress(parts, missing, num_engines=num_engines)
    total = sum(len(part.rows) for part in parts if part.number in missing)
    with tqdm(total=total, unit="sample", desc="sweep", mininterval=1.0) as bar:
        for number, table in tables:
            folder.write_part(number, table)
            bar.update(len(table))
            for line in progress.done(number):
                bar.write(f"sweep: {line}", file=sys.stderr)
    if still := folder.missing():
        raise RuntimeError(f"{len(still)} of {len(parts)} parts did not come back; repeat the command for them")


def collect_times(tables: Iterable[tuple[int, pa.Table]], folder: SweepFolder, cases: Sequence[TimedCase]) -> None:
    """Write the timed requests of each case, and show progress and what could not be timed, which is not written and
    so timed again by the same command."""
    with tqdm(total=len(cases), unit="configuration", desc="timing", disable=not cases) as bar:
        for number, table in tables:
            bar.update()
            errors = [error for error in table["error"].to_pylist() if error is not None]
            if not errors:
                folder.write_case(number, table)
            for error in errors:
                bar.write(f"{table['method'][0]} on {table['task'][0]} cannot be timed: {error}", file=sys.stderr)


def load_samples(folders: Sequence[Path]) -> Samples:
    """The samples of sweeps by configuration, in the order of their plans, those of one configuration by number.

    A sample that several folders hold is counted once if their sweeps are the same. Raises `ValueError` if two sweeps
    that differ have a model's configuration and a problem in common: which of the rows counts? A seed makes another
    problem of it only if the task draws its problems; those of a file are the same under each, and so are the answers.
    """
    samples: Samples = {}
    plans: dict[tuple[ReportKey, str, int | None], int] = {}  # (configuration, problem, seed) -> the plan it is of
    found: list[tuple[int, int, ReportKey, GradedSample]] = []
    known: list[Any] = []
    for folder in folders:
        record = read_record(folder)
        for key in record.subjects():
            samples.setdefault(key, [])
        if record.plan not in known:
            known.append(record.plan)
        plan = known.index(record.plan)
        for row in read_samples(folder, columns=COLUMNS):
            key = ReportKey(row["model"], row["method"], row["task"], row["config"])
            subject = (key, row["problem_id"], row["seed"] if _is_drawn(key.task) else None)
            if subject in plans:
                if plans[subject] != plan:
                    raise ValueError(
                        f"{folder} and an earlier folder hold {row['problem_id']} of model '{key.model}' by method "
                        f"'{key.method}', from sweeps that differ; join sweeps of different problems or models"
                        f"{'' if _is_drawn(key.task) else ' (a seed changes nothing of the problems of a file)'}"
                    )
                continue
            plans[subject] = plan
            found.append((plan, row["sample"], key, graded_sample(row)))
    for _, _, key, sample in sorted(found, key=lambda one: one[:2]):
        samples[key].append(sample)
    return {key: _counted(graded) for key, graded in samples.items() if graded}


def _is_drawn(task: str) -> bool:
    """Whether a seed decides the problems of a task."""
    return task not in TASKS or TASKS[task].generate is not None


def _counted(graded: list[GradedSample]) -> list[GradedSample]:
    """A configuration's samples: an error of an endpoint that says forwards with others makes it no bare one."""
    if all(sample.is_bare for sample in graded):
        return graded
    return [replace(sample, is_bare=False) for sample in graded]


def graded_sample(row: dict[str, Any]) -> GradedSample:
    """The sample of a row of `GRADED_COLUMNS`."""
    counts = None
    if row["error"] is None:
        counts = SampleCounts(**{name: row[name] for name in COUNTS})
    return GradedSample(
        problem=row["problem_id"],
        correct=row["correct"],
        counts=counts,
        cut=row["finish_reason"] == "length",
        **{f"{rule}_correct": row[f"{rule}_correct"] for rule in RULES},
        is_bare=row["method"] == ENDPOINT_DEFAULT and row["num_forwards"] is None,
        seed=row["seed"],
    )


# What becomes of a sweep's work that the engine's process dies of: rows with the reason, or the sweep's end.
#
# A part that was begun `MOST_DEATHS` times and never ended is put aside. Once the other parts are decoded, its
# samples are decoded one by one, and one that was begun as often and never ended is a row with the reason. A model
# that decodes nothing at all ends the sweep.

MOST_DEATHS = 2  # of one part, then of one sample by itself
MOST_LOST = 4  # parts, or samples, of a model that decodes none
DIED = f"the engine's process died {MOST_DEATHS} times while it decoded this sample"
NOTHING = DECODED_COLUMNS.empty_table()  # in the place of what an engine's process died of too often


class Attempts:
    """How often each piece of work was begun and not ended. It outlives the processes that do the work."""

    def __init__(self) -> None:
        self._begun = Counter[int]()

    def begin(self, number: int) -> bool:
        """Begin a piece of work, by its number; false if it was begun too often, and is not to be done again."""
        if self._begun[number] == MOST_DEATHS:
            return False
        self._begun[number] += 1
        return True

    def end(self, number: int) -> None:
        """The work was done. Where its result is lost later, it may be done again."""
        del self._begun[number]


class ModelDies(RuntimeError):
    """An engine's process dies of whatever a model is to decode."""


class DeathWatch:
    """What engines died of, by model; `decoding` are the models that are known to decode something."""

    def __init__(self, decoding: Iterable[str]) -> None:
        self.decoding = set(decoding)
        self._lost: dict[str, list[str]] = {}

    def decoded(self, model: str) -> None:
        self.decoding.add(model)

    def lost(self, model: str, work: str) -> None:
        """Note what an engine died of too often. Raises `ModelDies` if the model decodes nothing else either."""
        self._lost.setdefault(model, []).append(work)
        if len(self._lost[model]) == MOST_LOST:
            self.check(model)

    def check(self, model: str) -> None:
        """Raise `ModelDies` if nothing of the model was decoded."""
        if model not in self.decoding:
            raise ModelDies(
                f"model '{model}' cannot be decoded: the engine's process died {MOST_DEATHS} times on each of "
                f"{', '.join(self._lost[model])}, and decoded nothing else; try one method with --limit 1"
            )


class DividedParts:
    """Parts that were put aside, while their samples come one by one."""

    def __init__(self, parts: Iterable[Part], watch: DeathWatch) -> None:
        self._waiting, self._watch = list(parts), watch
        self._part_of = {row["sample"]: part for part in self._waiting for row in part.rows}
        self._row_of = {row["sample"]: row for part in self._waiting for row in part.rows}
        self._come: dict[int, pa.Table] = {}

    def samples(self) -> list[tuple[int, pa.Table]]:
        """Each sample by itself (`PLANNED_COLUMNS`), with its number."""
        return [
            (sample, pa.Table.from_pylist([dict(row)], schema=PLANNED_COLUMNS)) for sample, row in self._row_of.items()
        ]

    def add(self, sample: int, graded: pa.Table) -> list[tuple[int, pa.Table]]:
        """The numbers and tables of the parts that are whole with this sample; one without rows killed the engine.

        A part waits until its model has decoded something. Raises `ModelDies`.
        """
        part = self._part_of[sample]
        if len(graded):
            self._watch.decoded(part.model)
            self._come[sample] = graded
        else:
            self._watch.lost(part.model, f"sample {sample} of part {part.number}")
            self._come[sample] = _dead(self._row_of[sample])
        whole = [part for part in self._waiting if self._is_whole(part)]
        self._waiting = [part for part in self._waiting if part not in whole]
        return [(part.number, _joined([self._come[row["sample"]] for row in part.rows])) for part in whole]

    def check_end(self) -> None:
        """Raise `ModelDies` if parts still wait for their model to decode something."""
        for part in self._waiting:
            self._watch.check(part.model)

    def _is_whole(self, part: Part) -> bool:
        return part.model in self._watch.decoding and all(row["sample"] in self._come for row in part.rows)


def dead_samples(folder: Path) -> set[int]:
    """The samples of a sweep's folder that killed the engine."""
    return {row["sample"] for row in read_samples(folder, columns=("sample", "error")) if row["error"] == DIED}


def _joined(samples: Sequence[pa.Table]) -> pa.Table:
    """A part of its samples, with what the graded ones say of how programs were contained."""
    said = next((table.schema.metadata for table in samples if table.schema.metadata), None)
    return pa.concat_tables(samples).replace_schema_metadata(said)


def _dead(row: Row) -> pa.Table:
    """A sample's graded row, with the reason why it has no text."""
    return grade_table(pa.Table.from_pylist([{**row, "error": DIED}], schema=DECODED_COLUMNS))
