"""What becomes of a sweep's work that the engine's process dies of: rows with the reason, or the sweep's end.

A part that was begun `MOST_DEATHS` times and never ended is put aside. Once the other parts are decoded, its samples
are decoded one by one, and one that was begun as often and never ended is a row with the reason. A model that decodes
nothing at all ends the sweep.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from mbd_core.evaluation.grade_stage import grade_table
from mbd_core.evaluation.sample_tables import DECODED_COLUMNS, PLANNED_COLUMNS
from mbd_core.evaluation.sweep_folder import read_samples
from mbd_core.evaluation.sweep_parts import Part, Row

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
