"""Who holds which batch row: in the Block Buffer, in the host's ledger, in the device's page table, or on a canvas.

A sequence is admitted by the scheduler, joins (its prefix is being stored), is seated (it decodes), and leaves: at its
end, or set aside by a preemption with what stands in its row.

Shape legend: R batch rows, P pages of a row.
"""

from torch import Tensor

from mbd_core.decoding.block_buffer import BlockBuffer
from mbd_core.engine.batch import to_device
from mbd_core.engine.canvas_rows import CanvasRuns
from mbd_core.engine.ledger import Ledger
from mbd_core.engine.scheduler import PrefillChunk, Scheduler
from mbd_core.engine.sequence import SequenceState


class Seating:
    """Moves sequences between the scheduler's rows and the tensors of the rows."""

    def __init__(
        self,
        scheduler: Scheduler,
        buffer: BlockBuffer,
        ledger: Ledger,
        canvases: CanvasRuns,
        tables_RP: Tensor,
        adapters_R: Tensor | None = None,
    ) -> None:
        self.scheduler, self.buffer, self.ledger = scheduler, buffer, ledger
        self.canvases, self.tables_RP, self._adapters_R = canvases, tables_RP, adapters_R
        self._joining: list[SequenceState] = []  # they run, and their prefix is not stored yet

    @property
    def num_pages(self) -> int:
        """Pages that any sequence in the buffer or on its way there has at most."""
        return max([self.ledger.most_pages, *(len(s.pages) for s in self._joining)]) or 1

    def make_room(self, *, unread: int) -> None:
        """Pages for the sequences that may outgrow theirs in this step, `unread` steps being under way. Where pages
        run out the youngest sequences are set aside."""
        rows = self.ledger.missing_pages_R(unread=unread).nonzero()[0].tolist()
        if not rows:
            return
        needed_positions_R = self.ledger.needed_positions_R(unread=unread)
        short = sorted((self.ledger.sequences[row] for row in rows), key=lambda s: s.arrival)
        for sequence in self.scheduler.grow(lambda s: int(needed_positions_R[s.row]), short):
            self.set_aside(sequence)
        grown = [s for s in short if s.seated]
        for sequence in grown:
            self.ledger.update(sequence)
        self._extend_tables(*grown)

    def admit(self) -> list[SequenceState]:
        """Requests that run from now on; those that decode in blocks are seated when their prefix is stored."""
        admitted = self.scheduler.admit()
        if self._adapters_R is not None and admitted:
            slots = [(s.row, 0 if s.adapter is None else s.adapter.slot) for s in admitted]
            row, slot = to_device(slots, self._adapters_R.device).T
            self._adapters_R[row] = slot
        for sequence in admitted:
            if sequence.is_canvas:
                self.canvases.join(sequence)
            else:
                self._joining.append(sequence)
                self._extend_tables(sequence)
        return admitted

    def prefill(self) -> list[PrefillChunk]:
        """Prompt chunks of this step; a sequence whose prefix they complete is seated."""
        chunks = self.scheduler.prefill() if self._joining else []
        for sequence in [s for s in self._joining if s.decodes]:
            self._joining.remove(sequence)
            self._seat(sequence)
        return chunks

    def finish(self, sequence: SequenceState) -> None:
        """A sequence ends, wherever it is; its row and pages are free."""
        if self.scheduler.is_running(sequence):
            self._leave(sequence)
        self.scheduler.release(sequence)

    @property
    def adapts(self) -> bool:
        """Whether any running sequence decodes with an adapter."""
        return self._adapters_R is not None and any(s.adapter for s in self.scheduler.running.values())

    @property
    def decides_on_host(self) -> bool:
        """Whether the host has a part in decoding: canvases, or tokens of some row."""
        return bool(self.canvases.running) or self.ledger.steers

    def set_aside(self, sequence: SequenceState) -> None:
        """A preempted sequence: what stands in its buffer row is kept. A canvas keeps nothing and begins anew; what it
        repeats is no part of its NFE."""
        if sequence.seated and not sequence.is_canvas:
            sequence.saved = self.buffer.save(sequence.row)
        self._leave(sequence)
        if sequence.is_canvas:
            sequence.num_prefill_forwards += sequence.num_forwards
            sequence.num_forwards, sequence.decode_seconds = 0, 0.0

    def _seat(self, sequence: SequenceState) -> None:
        if sequence.saved is None:
            self.buffer.join(sequence.row, sequence.request)
        else:
            self.buffer.restore(sequence.row, sequence.saved)
            sequence.saved = None
        self.ledger.seat(sequence)
        sequence.seated = True

    def _leave(self, sequence: SequenceState) -> None:
        """Nothing of a running sequence stays in its row."""
        if sequence.is_canvas:
            self.canvases.leave(sequence.row)
        elif sequence.seated:
            self.buffer.leave(sequence.row)
            self.ledger.leave(sequence)
        else:
            self._joining.remove(sequence)
        sequence.seated = False

    def _extend_tables(self, *sequences: SequenceState) -> None:
        """Write their new pages into the device's table. Rows without a sequence keep what they had, and nobody reads
        it."""
        new = [
            (s.row, place, s.pages[place]) for s in sequences for place in range(s.num_pages_in_table, len(s.pages))
        ]
        if new:
            row, place, page = to_device(new, self.tables_RP.device).T
            self.tables_RP[row, place] = page
        for sequence in sequences:
            sequence.num_pages_in_table = len(sequence.pages)
