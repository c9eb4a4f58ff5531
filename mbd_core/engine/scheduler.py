"""Who takes part in the next forward: first come, first served; a request is admitted when all its pages are free.

Reserving to the end means an admitted request always finishes and admission cannot deadlock. Prompts are stored in
whole blocks under a token budget a step, so a long prompt does not stall those who decode.
"""

from collections import deque
from dataclasses import dataclass

from mbd_core.engine.sequence import Sequence, pages_needed
from mbd_core.kvcache.pool import PagePool
from mbd_core.types import Request


@dataclass(frozen=True)
class PrefillChunk:
    """Whole prompt blocks of one sequence, tokens `start` to `stop`, to be stored by the next forward."""

    sequence: Sequence
    start: int
    stop: int


class Scheduler:
    """Waiting requests, running sequences by row, and the pages they own."""

    def __init__(
        self, *, max_rows: int, block_size: int, page_size: int, pool: PagePool, max_prefill_tokens: int
    ) -> None:
        self.block_size, self.page_size, self.pool = block_size, page_size, pool
        self.max_prefill_tokens = max_prefill_tokens // block_size * block_size
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Sequence] = {}
        self._free_rows = list(range(max_rows - 1, -1, -1))

    def admit(self) -> list[Sequence]:
        """Move waiting requests, oldest first, to free rows while their pages are free."""
        admitted = []
        while self.waiting and self._free_rows:
            request = self.waiting[0]
            needed = pages_needed(request, block_size=self.block_size, page_size=self.page_size)
            pages = self.pool.alloc(needed)
            if pages is None:
                break
            self.waiting.popleft()
            row = self._free_rows.pop()
            self.running[row] = Sequence(request, self.block_size, row, pages)
            admitted.append(self.running[row])
        return admitted

    def prefill(self) -> list[PrefillChunk]:
        """Prompt chunks of this step, oldest sequence first, at most `max_prefill_tokens` together."""
        budget = self.max_prefill_tokens
        chunks = []
        for sequence in self.running.values():
            take = min(budget, sequence.prefix_length - sequence.prefilled)
            if take > 0:
                chunks.append(PrefillChunk(sequence, sequence.prefilled, sequence.prefilled + take))
                sequence.prefilled += take
                budget -= take
        return chunks

    def release(self, sequence: Sequence) -> None:
        """Give back a sequence's row and pages."""
        del self.running[sequence.row]
        self._free_rows.append(sequence.row)
        self.pool.free(sequence.pages)
        sequence.pages = []

    def check_integrity(self) -> None:
        """Pages and rows are each owned exactly once; raises `AssertionError`."""
        self.pool.check_integrity({s.request.request_id: s.pages for s in self.running.values()})
        assert not set(self._free_rows) & self.running.keys(), "a running row is also free"
