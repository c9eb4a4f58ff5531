"""Where a sweep computes: an executor decodes, grades and times; and what becomes of work that its engines die of."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.decoding import DecodeStage, DecodingModel
from mbd_core.evaluation.sweep.folder import read_samples
from mbd_core.evaluation.sweep.grading import grade_table, with_votes
from mbd_core.evaluation.sweep.parts import DECODED_COLUMNS, PLANNED_COLUMNS, Part, Row, TimedCase, with_draws
from mbd_core.evaluation.sweep.timed_runs import TimedStage, timing_engine

NumberedTable = tuple[int, pa.Table]


class Executor(Protocol):
    """A pool of engines, and processes that grade: a Ray cluster (`actors/evaluation/sweep.py`), or this process.

    engine       the configuration of each of its `num_engines` engines
    on_gpu       whether they run on GPUs
    cluster_cpus the CPUs of its cluster, `None` without one

    All methods raise `ModelRefused` for a model that cannot be loaded, and `ExecutorFailed`.
    """

    @property
    def engine(self) -> EngineConfig: ...
    @property
    def num_engines(self) -> int: ...
    @property
    def on_gpu(self) -> bool: ...
    @property
    def cluster_cpus(self) -> float | None: ...

    def decode(self, tables: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        """Planned tables, decoded and graded, in any order; one of which processes died too often has no rows."""

    def grade(self, tables: Iterable[NumberedTable]) -> Iterator[NumberedTable]:
        """Decoded tables, graded, as they come."""

    def time(self, cases: Sequence[TimedCase], *, left_out: Collection[int]) -> Iterator[NumberedTable]:
        """The timed requests of each case, one case after the other, without the samples `left_out`."""


class ExecutorFailed(RuntimeError):
    """An executor can go on no more, for this reason; `traceback` has the workers' own in it."""

    def __init__(self, reason: str, traceback: str) -> None:
        super().__init__(reason)
        self.traceback = traceback


class LocalExecutor:
    """One engine in this process, and nothing beside it.

    `load` loads a model by the name in the rows. With `isolated` a machine without bubblewrap and Landlock refuses to
    grade programs.
    """

    num_engines, cluster_cpus = 1, None

    def __init__(
        self,
        load: Callable[[str, EngineConfig], DecodingModel],
        engine: EngineConfig,
        *,
        concurrency: int,
        on_gpu: bool = False,
        isolated: bool = False,
    ) -> None:
        self.engine, self.on_gpu = engine, on_gpu
        self._load, self._concurrency, self._isolated = load, concurrency, isolated

    def decode(self, tables: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        stage = DecodeStage(lambda name: self._load(name, self.engine))
        try:
            for number, table in tables:
                yield number, grade_table(stage(table), isolated=self._isolated)
        finally:
            stage.close()

    def grade(self, tables: Iterable[NumberedTable]) -> Iterator[NumberedTable]:
        for number, table in tables:
            yield number, grade_table(table, isolated=self._isolated)

    def time(self, cases: Sequence[TimedCase], *, left_out: Collection[int]) -> Iterator[NumberedTable]:
        def load(name: str, buffer_size: int) -> DecodingModel:
            return self._load(name, timing_engine(self.engine, buffer_size, concurrency=self._concurrency))

        stage = TimedStage(load, concurrency=self._concurrency)
        try:
            for case in cases:
                yield case.number, stage(case, left_out=left_out)
        finally:
            stage.close()


# What becomes of a sweep's work that the engine's process dies of: rows with the reason, or the sweep's end.
#
# A part that was begun `MOST_DEATHS` times and never ended is put aside. Once the other parts are decoded, its
# samples are decoded one by one, and one that was begun as often and never ended is a row with the reason. A model
# that decodes nothing at all ends the sweep.

MOST_DEATHS = 2  # of one part, then of one sample by itself
MOST_LOST = 4  # parts, or samples, of a model that decodes none
DEATH_TEXT = f"the engine's process died {MOST_DEATHS} times while it decoded this sample"
NO_SAMPLES = DECODED_COLUMNS.empty_table()  # in the place of what an engine's process died of too often


class Attempts:
    """How often each piece of work was begun and not ended. It outlives the processes that do the work."""

    def __init__(self) -> None:
        self._num_begun = Counter[int]()

    def begin(self, number: int) -> bool:
        """Begin a piece of work, by its number; false if it was begun too often, and is not to be done again."""
        if self._num_begun[number] == MOST_DEATHS:
            return False
        self._num_begun[number] += 1
        return True

    def end(self, number: int) -> None:
        """The work was done. Where its result is lost later, it may be done again."""
        del self._num_begun[number]


class ModelDies(RuntimeError):
    """An engine's process dies of whatever a model is to decode."""


class DeathWatch:
    """What engines died of, by model; `decoding` are the models that are known to decode something."""

    def __init__(self, decoding: Iterable[str]) -> None:
        self.decoding = set(decoding)
        self._losses: dict[str, list[str]] = {}

    def note_decoded(self, model: str) -> None:
        self.decoding.add(model)

    def note_lost(self, model: str, work: str) -> None:
        """Note what an engine died of too often. Raises `ModelDies` if the model decodes nothing else either."""
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
    """Parts that were put aside, while their samples come one by one."""

    def __init__(self, parts: Iterable[Part], watch: DeathWatch) -> None:
        self._waiting, self._watch = list(parts), watch
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
        """The numbers and tables of the parts that are whole with this sample; one without rows killed the engine.

        A part waits until its model has decoded something. Raises `ModelDies`.
        """
        part = self._part_of[sample]
        if len(table):
            self._watch.note_decoded(part.model)
            self._tables[sample] = table
        else:
            self._watch.note_lost(part.model, f"sample {sample} of part {part.number}")
            self._tables[sample] = _dead(self._row_of[sample])
        whole_parts = [part for part in self._waiting if self._is_whole(part)]
        self._waiting = [part for part in self._waiting if part not in whole_parts]
        return [
            (part.number, _join_samples([self._tables[row["sample"]] for row in part.rows])) for part in whole_parts
        ]

    def check_end(self) -> None:
        """Raise `ModelDies` if parts still wait for their model to decode something."""
        for part in self._waiting:
            self._watch.check(part.model)

    def _is_whole(self, part: Part) -> bool:
        return part.model in self._watch.decoding and all(row["sample"] in self._tables for row in part.rows)


def _join_samples(samples: Sequence[pa.Table]) -> pa.Table:
    """A part of its samples, with what the graded ones say of how programs were contained."""
    metadata = next((table.schema.metadata for table in samples if table.schema.metadata), None)
    return with_votes(pa.concat_tables(samples)).replace_schema_metadata(metadata)


def _dead(row: Row) -> pa.Table:
    """A sample's graded row, with the reason why it has no text."""
    return grade_table(pa.Table.from_pylist([{**row, "error": DEATH_TEXT}], schema=with_draws(DECODED_COLUMNS, [row])))


def decode_parts(parts: Sequence[Part], executor: Executor, *, decoding: Collection[str]) -> Iterator[NumberedTable]:
    """The numbers and graded samples of parts, in any order; `decoding` are the models that are known to decode.

    Raises `ModelDies`, and as the executor does.
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
    divided = DividedParts(sorted(lost_parts, key=lambda part: part.number), DeathWatch(watch.decoding))
    if lost_parts:
        for sample, table in executor.decode(divided.samples()):
            yield from divided.add(sample, table)
        divided.check_end()


def dead_samples(folder: Path) -> set[int]:
    """The samples of a sweep's folder that killed the engine."""
    return {row["sample"] for row in read_samples(folder, columns=("sample", "error")) if row["error"] == DEATH_TEXT}
