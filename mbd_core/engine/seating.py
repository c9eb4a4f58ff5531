"""Who holds which batch row: in the Block Buffer, in the host's arrays, in the device's page table, or on a canvas.

Shape legend: R rows (sequences), N slots, K parts of the optional work.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.answers.slots import SlotState
from mbd_core.decoding.blocks.block_buffer import BlockBuffer
from mbd_core.decoding.blocks.levenshtein import EditTokens
from mbd_core.decoding.blocks.work import WORK_NAMES, StepWork, work_of_request
from mbd_core.engine.schedule.pacing import Pace
from mbd_core.engine.schedule.scheduler import PrefillChunk, Scheduler
from mbd_core.engine.sequences.sequence import SequenceState
from mbd_core.engine.step.batch import to_device
from mbd_core.engine.step.planned_rows import PlannedRuns
from mbd_core.engine.step.report import StepReport
from mbd_core.engine.step.steering import SharedWork, Steering

# The host's knowledge of each batch row, in arrays, so that the host's work in a step hardly grows with the rows.


class Ledger:
    """The sequences in the Block Buffer, by batch row: their progress, their needs in a step, and their counts.

    sequences  by row; a new dict whenever a sequence is seated or leaves, so that a step can keep the dict that it
               began with
    num_rows   number of rows up to the last row in use

    The arrays have for each row:

    committed          number of committed tokens
    span               number of positions that it may ever store
    window             number of positions of its whole buffer
    num_resident       number of resident blocks after the last step that was read
    num_asked          number of these blocks' positions that need logits
    limit, last_limit  number of blocks to which it may grow in the next step, and in the last
    work               the optional work that it needs
    ages               age of the block in each slot, in forwards
    """

    def __init__(self, num_rows: int, *, num_slots: int, block_size: int, page_size: int) -> None:
        self._block_size, self._page_size = block_size, page_size
        columns = [np.zeros(num_rows, dtype=np.int64) for _ in range(11)]
        self._committed_R, self._span_R, self._window_R, self._num_pages_R, self._num_asked_R = columns[:5]
        self._num_forwards_R, self._num_store_forwards_R, self._num_positions_R = columns[5:8]
        self._num_resident_R, self._limit_R, self._last_limit_R = columns[8:]
        self._adaptive_R = np.zeros(num_rows, dtype=bool)
        self._seconds_R = np.zeros(num_rows)
        self._work_RK = np.zeros((num_rows, len(WORK_NAMES)), dtype=bool)
        self._ages_RN = np.zeros((num_rows, num_slots), dtype=np.int64)
        self._columns = (*columns, self._adaptive_R, self._seconds_R, self._work_RK, self._ages_RN)
        self._set_sequences({})

    def seat(self, sequence: SequenceState) -> None:
        """A sequence takes its batch row."""
        row = sequence.row
        self._work_RK[row] = list(vars(work_of_request(sequence.request)).values())
        self._num_asked_R[row] = self._window_R[row] = sequence.window
        self._num_resident_R[row], self._adaptive_R[row] = sequence.num_resident, sequence.request.decoding.adaptive
        self._span_R[row] = sequence.span
        if sequence.block_ages is not None:
            self._ages_RN[row] = sequence.block_ages
        self._set_sequences({**self.sequences, row: sequence})
        self.update(sequence)

    def _set_sequences(self, sequences: dict[int, SequenceState]) -> None:
        self.sequences = sequences
        self._rows = _rows_of(sequences)
        self._work = StepWork(*np.logical_or.reduce(self._work_RK).tolist())
        self.num_rows = max(sequences, default=-1) + 1
        self._steered_rows = {row: s for row, s in sequences.items() if s.request.steered}

    @property
    def steers(self) -> bool:
        """Whether the host decides tokens of some row."""
        return bool(self._steered_rows)

    def steering(self, share: SharedWork, *, tries: float, ids: EditTokens | None) -> Steering | None:
        """The next step's steering, if it needs any; `tries` bounds the work of its guides, `ids` are the edit
        tokens."""
        if not self._steered_rows:
            return None
        forwards = {
            row: s.request.first_forward + self.counts(s).num_forwards for row, s in self._steered_rows.items()
        }
        return Steering(self._steered_rows, forwards, share, tries=tries, ids=ids)

    def update(self, sequence: SequenceState) -> None:
        """Read a sequence's progress and pages anew, after it has committed or got pages."""
        self._committed_R[sequence.row] = sequence.committed
        self._num_pages_R[sequence.row] = len(sequence.pages)

    def count(self, decoding: Mapping[int, SequenceState], report: StepReport, seconds: float) -> bool:
        """Counts a step of `seconds` with the rows `decoding`; false if it stored the blocks of all rows and decoded
        no block."""
        rows = self._rows if decoding is self.sequences else _rows_of(decoding)
        stores = report.storing_only_R[rows] > 0
        self._num_forwards_R[rows] += 1
        self._num_store_forwards_R[rows] += stores
        self._seconds_R[rows] += seconds
        self._num_resident_R[rows] = report.num_resident_R[rows]
        self._num_asked_R[rows] = report.num_asked_R[rows]
        is_resident_RN = report.states_RN[rows] != int(SlotState.DUMMY)
        self._num_positions_R[rows] += is_resident_RN.sum(1) * self._block_size
        self._ages_RN[rows] += is_resident_RN
        return not (len(stores) and stores.all())

    def take_ages(self, row: int, num_blocks: int) -> list[int]:
        """The ages of a row's first blocks, which leave the buffer; the others move to the front."""
        ages = self._ages_RN[row]
        lifetimes = ages[:num_blocks].tolist()
        ages[: len(ages) - num_blocks] = ages[num_blocks:]
        ages[len(ages) - num_blocks :] = 0
        return lifetimes

    def counts(self, sequence: SequenceState) -> Counts:
        """A sequence's counts, with the counts of its row while it has a row."""
        counts, row = sequence.counts(), sequence.row
        if self.sequences.get(row) is not sequence:
            return counts
        return counts + self._of_row(row)

    def _of_row(self, row: int) -> Counts:
        return Counts(
            num_forwards=int(self._num_forwards_R[row]),
            num_store_forwards=int(self._num_store_forwards_R[row]),
            num_positions=int(self._num_positions_R[row]),
            decode_seconds=float(self._seconds_R[row]),
        )

    def leave(self, sequence: SequenceState) -> None:
        """A sequence leaves its row. The row's counts are added to the sequence's own counts."""
        row = sequence.row
        sequence.counted += self._of_row(row)
        sequence.block_ages = self._ages_RN[row].copy()
        sequence.num_resident = int(self._num_resident_R[row])
        for column in self._columns:
            column[row] = 0
        self._set_sequences({r: s for r, s in self.sequences.items() if r != row})

    def work(self) -> StepWork:
        """The work that some row asks for."""
        return self._work

    def needed_positions_R(self, *, unread: int) -> np.ndarray:
        """Positions for which each row needs pages in its next step. `unread` steps are running, and each can commit a
        whole window."""
        return np.minimum(self._span_R, self._committed_R + (1 + unread) * self._window_R)

    def missing_pages_R(self, *, unread: int) -> np.ndarray:
        """The number of pages that each row lacks for `needed_positions_R`."""
        return np.maximum(-(-self.needed_positions_R(unread=unread) // self._page_size) - self._num_pages_R, 0)

    @property
    def most_pages(self) -> int:
        return int(self._num_pages_R.max())

    def hold_to(self, max_blocks: int) -> None:
        """The next step lets adaptive requests grow to `max_blocks` blocks (`BlockBuffer.hold_to`)."""
        self._last_limit_R[:] = self._limit_R
        size_R = self._window_R // self._block_size
        self._limit_R[:] = np.where(self._adaptive_R, np.minimum(size_R, max_blocks), size_R)

    def asks_at_most(self, *, unread: int) -> int:
        """Positions whose logits the next forward of all rows may need. A step can activate one more block in every
        row with room, and each of `unread` running steps may have made room."""
        opens_R = self._num_resident_R < (self._last_limit_R if unread else self._limit_R)
        return int(np.minimum(self._num_asked_R + (opens_R + unread) * self._block_size, self._window_R).sum())

    def most_slots(self, *, unread: int) -> int:
        """The most blocks that a row may have in the next forward, with `unread` steps under way."""
        most_R = self._num_resident_R
        for limit_R in (self._last_limit_R, self._limit_R)[1 - unread :]:
            most_R = np.maximum(most_R, np.minimum(limit_R, most_R + 1))
        return int(most_R.max())


def _rows_of(sequences: Mapping[int, SequenceState]) -> np.ndarray | slice:
    """The rows of some sequences; the first rows are given as a slice, which numpy reads faster."""
    rows = sorted(sequences)
    return slice(len(rows)) if rows == list(range(len(rows))) else np.array(rows)


# The moves of sequences between batch rows.
#
# A sequence is admitted by the scheduler, joins (its prefix is being stored), is seated (it decodes), and leaves: at
# its end, or set aside by a preemption with the content of its row.
#
# Shape legend: R batch rows, P pages of a row.


class Seating:
    """Moves sequences between the scheduler's rows and the tensors of the rows."""

    def __init__(
        self,
        scheduler: Scheduler,
        buffer: BlockBuffer,
        ledger: Ledger,
        planned: PlannedRuns,
        tables_RP: Tensor,
        adapters_R: Tensor | None = None,
    ) -> None:
        self.scheduler, self.buffer, self.ledger = scheduler, buffer, ledger
        self.planned, self.tables_RP, self._adapters_R = planned, tables_RP, adapters_R
        self._newcomers: list[SequenceState] = []  # they run, and their prefix is not stored yet

    @property
    def num_pages(self) -> int:
        """The most pages of any sequence. Canvases are left out, because each of their lanes has pages of its own."""
        planned = [run.sequence for run in self.planned.running if not run.sequence.is_canvas]
        return max([self.ledger.most_pages, *(len(s.pages) for s in (*self._newcomers, *planned))]) or 1

    def make_room(self, *, unread: int) -> None:
        """Gives pages to the sequences that may outgrow their pages in this step, while `unread` steps are running. If
        pages run out, the youngest sequences are set aside."""
        rows = self.ledger.missing_pages_R(unread=unread).nonzero()[0].tolist()
        short_of_pages = [self.ledger.sequences[row] for row in rows] + self._planned_short_of_pages()
        if not short_of_pages:
            return
        short_of_pages.sort(key=lambda s: s.arrival)
        needed_positions_R = self.ledger.needed_positions_R(unread=unread)

        def upto(sequence: SequenceState) -> int:
            return sequence.next_stop if sequence.is_planned else int(needed_positions_R[sequence.row])

        for sequence in self.scheduler.grow(upto, short_of_pages):
            self.set_aside(sequence)
        seated_sequences = [s for s in short_of_pages if s.seated and not s.is_planned]
        for sequence in seated_sequences:
            self.ledger.update(sequence)
        self._extend_tables(*seated_sequences)

    def _planned_short_of_pages(self) -> list[SequenceState]:
        """Sequences with planned rows that lack pages for their longest row."""
        size = self.scheduler.page_size
        running = (run.sequence for run in self.planned.running)
        return [s for s in running if not s.is_canvas and s.next_stop > len(s.pages) * size]

    def admit(self) -> list[SequenceState]:
        """Requests that run from now on; requests that decode in blocks are seated when their prefix is stored."""
        sequences = self.scheduler.admit()
        if self._adapters_R is not None and sequences:
            slots = [(s.row, 0 if s.adapter is None else s.adapter.slot) for s in sequences]
            row, slot = to_device(slots, self._adapters_R.device).T
            self._adapters_R[row] = slot
        for sequence in sequences:
            if sequence.is_canvas:
                self.planned.join(sequence)
            else:
                self._newcomers.append(sequence)
                self._extend_tables(sequence)
        return sequences

    def prefill(self, pace: Callable[[], Pace | None]) -> list[PrefillChunk]:
        """The prompt chunks of this step. A sequence whose prefix is then stored is seated. `pace` applies if
        sequences decode in the step."""
        if not self._newcomers:
            return []
        has_streams = bool(self.ledger.sequences or self.planned.running)
        chunks = self.scheduler.prefill(pace() if has_streams else None)
        for sequence in [s for s in self._newcomers if s.prompt_stored]:
            self._newcomers.remove(sequence)
            self._seat(sequence)
        return chunks

    def finish(self, sequence: SequenceState) -> None:
        """Ends a sequence, wherever it is, and frees its row and pages."""
        if self.scheduler.is_running(sequence):
            self._leave(sequence)
        self.scheduler.release(sequence)

    @property
    def adapts(self) -> bool:
        """Whether any running sequence decodes with an adapter."""
        running = self.scheduler.running.values()
        return self._adapters_R is not None and any(s.adapter or s.draft_adapter for s in running)

    @property
    def decides_on_host(self) -> bool:
        """Whether the host has a part in decoding: planned rows, or tokens of some row."""
        return bool(self.planned.running) or self.ledger.steers

    def set_aside(self, sequence: SequenceState) -> None:
        """Keeps the buffer row of a preempted sequence. A canvas keeps nothing and begins anew; repeated forwards do
        not count in its NFE."""
        if sequence.seated and not sequence.is_planned:
            sequence.saved_row = self.buffer.save(sequence.row)
        self._leave(sequence)
        if sequence.is_canvas:
            counted = sequence.counted
            undone = counted.num_prefill_forwards + counted.num_forwards
            sequence.counted = replace(counted, num_prefill_forwards=undone, num_forwards=0, decode_seconds=0.0)

    def _seat(self, sequence: SequenceState) -> None:
        if sequence.is_planned:
            self.planned.join(sequence)
            return
        if sequence.saved_row is None:
            self.buffer.join(sequence.row, sequence.request)
        else:
            self.buffer.restore(sequence.row, sequence.saved_row)
            sequence.saved_row = None
        self.ledger.seat(sequence)
        sequence.seated = True

    def _leave(self, sequence: SequenceState) -> None:
        """Clears a running sequence's row."""
        if sequence.is_planned and sequence.seated:
            self.planned.leave(sequence.row)
        elif sequence.seated:
            self.buffer.leave(sequence.row)
            self.ledger.leave(sequence)
        else:
            self._newcomers.remove(sequence)
        sequence.seated = False

    def _extend_tables(self, *sequences: SequenceState) -> None:
        """Writes new pages into the device's table. Rows without a sequence keep old entries, which nobody reads."""
        entries = [
            (s.row, place, s.pages[place]) for s in sequences for place in range(s.num_pages_in_table, len(s.pages))
        ]
        if entries:
            row, place, page = to_device(entries, self.tables_RP.device).T
            self.tables_RP[row, place] = page
        for sequence in sequences:
            sequence.num_pages_in_table = len(sequence.pages)
