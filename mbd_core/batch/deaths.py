"""Samples that kill the engine's process: they become rows with the reason, or end the batch.

A part that killed `MOST_DEATHS` processes is put aside. After the other parts, its samples are decoded one by one, and
a sample that killed as many processes becomes a row with the reason. A model that decodes nothing at all ends the
batch.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import pyarrow as pa

from mbd_core.batch.executor import Executor
from mbd_core.batch.parts import NumberedTable, Part
from mbd_core.batch.postprocess import Postprocess
from mbd_core.batch.rows import DECODED_COLUMNS, PLANNED_COLUMNS, PlannedRow, with_draws

MOST_DEATHS = 2  # processes that a part may kill; each of its samples may later kill as many
MOST_LOST = 4  # parts, or samples, before a model that decodes nothing ends the batch
DEATH_TEXT = f"the engine's process died {MOST_DEATHS} times while it decoded this sample"
NO_SAMPLES = DECODED_COLUMNS.empty_table()  # the result of samples that killed too many processes


class Attempts:
    """Counts how often each piece of work was begun and not ended. It outlives the processes that do the work."""

    def __init__(self) -> None:
        self._num_begun = Counter[int]()

    def begin(self, number: int) -> bool:
        """Begin a piece of work, by its number.

        Returns false if it was begun too often and must not be tried again.
        """
        if self._num_begun[number] == MOST_DEATHS:
            return False
        self._num_begun[number] += 1
        return True

    def end(self, number: int) -> None:
        """The work is done. If its result is lost later, it may be begun again."""
        del self._num_begun[number]


class ModelDies(RuntimeError):
    """A model's engine dies on every sample."""


class DeathWatch:
    """The work that killed engines, by model; `decoding` are the models that have decoded something."""

    def __init__(self, decoding: Iterable[str]) -> None:
        self.decoding = set(decoding)
        self._losses: dict[str, list[str]] = {}

    def note_decoded(self, model: str) -> None:
        self.decoding.add(model)

    def note_lost(self, model: str, work: str) -> None:
        """Records samples that killed an engine too often. Raises `ModelDies` if the model decodes no other sample."""
        self._losses.setdefault(model, []).append(work)
        if len(self._losses[model]) == MOST_LOST:
            self.check(model)

    def check(self, model: str) -> None:
        """Raise `ModelDies` if nothing of the model was decoded."""
        if model not in self.decoding:
            raise ModelDies(
                f"model '{model}' cannot be decoded: the engine's process died {MOST_DEATHS} times on each of "
                f"{', '.join(self._losses[model])}, and decoded nothing else; try one method with --limit 1"
            )


class DividedParts:
    """Parts that were put aside; their samples come one by one."""

    def __init__(self, parts: Iterable[Part], watch: DeathWatch, postprocess: Postprocess) -> None:
        self._waiting, self._watch, self._postprocess = list(parts), watch, postprocess
        self._part_of = {row["sample"]: part for part in self._waiting for row in part.rows}
        self._row_of = {row["sample"]: row for part in self._waiting for row in part.rows}
        self._tables: dict[int, pa.Table] = {}

    def samples(self) -> list[NumberedTable]:
        """Each sample by itself (`PLANNED_COLUMNS`), with its number."""
        return [
            (sample, pa.Table.from_pylist([dict(row)], schema=with_draws(PLANNED_COLUMNS, [row])))
            for sample, row in self._row_of.items()
        ]

    def add(self, sample: int, table: pa.Table) -> list[NumberedTable]:
        """Add a sample's decoded table; a table without rows means that the sample killed the engine.

        Returns the numbers and tables of the parts that are complete now. A part waits until its model has decoded
        something. Raises `ModelDies`.
        """
        part = self._part_of[sample]
        if len(table):
            self._watch.note_decoded(part.model)
            self._tables[sample] = table
        else:
            self._watch.note_lost(part.model, f"sample {sample} of part {part.number}")
            self._tables[sample] = self._postprocess(_dead(self._row_of[sample]))
        whole_parts = [part for part in self._waiting if self._is_whole(part)]
        self._waiting = [part for part in self._waiting if part not in whole_parts]
        return [
            (part.number, self._postprocess.join([self._tables[row["sample"]] for row in part.rows]))
            for part in whole_parts
        ]

    def check_end(self) -> None:
        """Raise `ModelDies` if parts still wait for their model to decode something."""
        for part in self._waiting:
            self._watch.check(part.model)

    def _is_whole(self, part: Part) -> bool:
        return part.model in self._watch.decoding and all(row["sample"] in self._tables for row in part.rows)


def _dead(row: PlannedRow) -> pa.Table:
    """A sample's decoded row, with the reason why it has no text."""
    return pa.Table.from_pylist([{**row, "error": DEATH_TEXT}], schema=with_draws(DECODED_COLUMNS, [row]))


def decode_parts(parts: Sequence[Part], executor: Executor, *, decoding: Collection[str]) -> Iterator[NumberedTable]:
    """The numbers and processed tables of parts, in any order; `decoding` are the models that have decoded something.

    Raises `ModelDies`, and the executor's errors.
    """
    by_number, lost_parts, watch = {part.number: part for part in parts}, list[Part](), DeathWatch(decoding)
    for number, table in executor.decode([(part.number, part.table()) for part in parts]):
        part = by_number[number]
        if len(table):
            watch.note_decoded(part.model)
            yield number, table
        else:
            watch.note_lost(part.model, f"part {number}")
            lost_parts.append(part)
    lost_parts.sort(key=lambda part: part.number)
    divided = DividedParts(lost_parts, DeathWatch(watch.decoding), executor.postprocess)
    if lost_parts:
        for sample, table in executor.decode(divided.samples()):
            yield from divided.add(sample, table)
        divided.check_end()
