"""Which sequences take part in the next forward, and with which pages: age decides nearly everything.

Running sequences are always older than waiting ones. The oldest waiting sequence is admitted first and none is passed
over. When pages run out, the youngest running sequence is preempted: it loses its pages and waits again, in front. So
the oldest sequence always runs to its end, none starves, and admission cannot deadlock.

A sequence is admitted with pages for its prefix and its first window, and grows as it decodes. Whole pages of final
tokens, prompt or generated, are published in the pool, where the next request with the same prefix (the next turn of a
conversation, a preempted sequence) finds them. The rest of a prefix is stored in whole blocks under a budget of tokens
a step, and of seconds where sequences decode (`pacing.py`), so that a long prompt does not stall them. Only here age
does not decide: the prefix with the least left goes first, so that a short prompt does not wait for a long prompt. In
every fourth step the oldest prefix goes first, so that a long prompt goes on.

One step of the engine:

    grow(upto) -> admit() -> prefill() -> the forward
    -> publish_chunks(chunks), commit(sequence, tokens), release(sequence)
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import SwapMode
from mbd_core.engine.memory.adapters import ResidentAdapter
from mbd_core.engine.memory.pages import PagePool, chain_root, page_hash
from mbd_core.engine.schedule.pacing import Pace
from mbd_core.engine.sequences.sequence import SequenceState

OLDEST_FIRST = 4
"""The oldest prompt comes first in one of this many steps that would pass over it. So it gets its share of the stored
tokens, however many shorter prompts come."""


@dataclass(frozen=True)
class PrefillChunk:
    """Whole blocks of a sequence's prefix, `tokens[start:stop]`, to be stored by the next forward; any number of
    tokens if causal rows store it.

    Where the prompt attends in full (D2F) its chunk is all of it, and blocks after it are chunks of their own.
    """

    sequence: SequenceState
    start: int
    stop: int


class Scheduler:
    """Waiting sequences, running ones by batch row (both oldest first), and the pages they own.

    `namespace` (a model's name) separates equal prefixes of different models. `page_size` is a multiple of
    `block_size`. With `compute_last_block` the last block of a prefix is never taken from the cache.

    closed  whether new sequences are kept waiting; preempted sequences are still admitted
    """

    def __init__(
        self,
        *,
        max_rows: int,
        block_size: int,
        page_size: int,
        pool: PagePool,
        max_prefill_tokens: int,
        prefix_caching: bool,
        namespace: str = "",
        compute_last_block: bool = False,
    ) -> None:
        self.block_size, self.page_size, self.pool = block_size, page_size, pool
        self.max_prefill_tokens = max_prefill_tokens // block_size * block_size
        self.prefix_caching = prefix_caching
        self.compute_last_block = compute_last_block
        self.waiting: deque[SequenceState] = deque()
        self.running: dict[int, SequenceState] = {}
        self._by_id: dict[str, SequenceState] = {}
        self._free_rows = list(range(max_rows))  # a heap: low rows first, so that few are in use
        self._namespace, self._weights_version = namespace, 0
        self.closed = False
        self._num_arrivals = 0
        self._passed_over: tuple[SequenceState | None, int] = None, 0  # the oldest unstored sequence, and how often
        self.num_preemptions = 0
        self._blocked_sequence: SequenceState | None = None
        self._awaited_hash: bytes | None = None

    # -- requests -----------------------------------------------------------------------------------------------

    def add(
        self,
        request: Request,
        adapter: ResidentAdapter | None = None,
        draft_adapter: ResidentAdapter | None = None,
    ) -> SequenceState:
        """Queue a request that fits the pool; it is the youngest."""
        assert request.request_id not in self._by_id, f"request_id '{request.request_id}' is already being served"
        sequence = SequenceState(request, self.block_size, adapter, draft_adapter, arrival=self._num_arrivals)
        self._num_arrivals += 1
        self._by_id[request.request_id] = sequence
        self.waiting.append(sequence)
        return sequence

    def find(self, request_id: str) -> SequenceState | None:
        """The waiting or running sequence of a request."""
        return self._by_id.get(request_id)

    def is_running(self, sequence: SequenceState) -> bool:
        return self.running.get(sequence.row) is sequence

    def release(self, sequence: SequenceState) -> None:
        """Removes a sequence, ended or not, running or waiting; its published pages can still be found."""
        del self._by_id[sequence.request.request_id]
        if self.is_running(sequence):
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
            self._blocked_sequence = None

    # -- before a forward ---------------------------------------------------------------------------------------

    def grow(
        self, upto: Callable[[SequenceState], int], among: Sequence[SequenceState] | None = None
    ) -> list[SequenceState]:
        """Give every running sequence, oldest first, pages for its tokens [0, upto(sequence)).

        `among` limits this to the sequences that may lack pages, oldest first.

        When pages run out the youngest running sequence is preempted, even if it needs the pages itself. Returns the
        preempted sequences, youngest first: they have no pages and wait again; `row` is still the buffer row to be
        saved.
        """
        victims: list[SequenceState] = []
        for sequence in list(self.running.values()) if among is None else among:
            if not self.is_running(sequence):
                continue  # preempted in this very loop
            num_missing = sequence.num_lanes * -(-upto(sequence) // self.page_size) - len(sequence.pages)
            if num_missing <= 0:
                continue
            while (pages := self.pool.alloc(num_missing)) is None:
                youngest = next(reversed(self.running.values()))
                assert len(self.running) > 1, f"'{youngest.request.request_id}' alone needs more pages than there are"
                self._preempt(youngest)
                victims.append(youngest)
                if youngest is sequence:
                    break
            else:
                sequence.pages += pages
        return victims

    def preempt_youngest(self) -> SequenceState | None:
        """Take the pages of the youngest running sequence; `None` if none runs."""
        if not self.running:
            return None
        youngest = next(reversed(self.running.values()))
        self._preempt(youngest)
        return youngest

    def admit(self) -> list[SequenceState]:
        """Moves waiting sequences, oldest first, to free rows while there are pages for them; returns them."""
        sequences = []
        while self.waiting and self._free_rows:
            sequence = self.waiting[0]
            if sequence is self._blocked_sequence:
                break  # no page was released or published since its last attempt
            if self.closed and not sequence.counted.num_preemptions:
                break
            if not self._take_pages(sequence):
                assert self.running, f"'{sequence.request.request_id}' alone needs more pages than there are"
                self._blocked_sequence = sequence
                break
            self.waiting.popleft()
            sequence.row = heapq.heappop(self._free_rows)
            self.running[sequence.row] = sequence
            sequence.admitted_at = sequence.admitted_at or time.perf_counter()
            sequence.began_under(self._weights_version)
            sequences.append(sequence)
        return sequences

    def prefill(self, pace: Pace | None = None) -> list[PrefillChunk]:
        """Prefix chunks of this step, at most `max_prefill_tokens` together.

        Sequences with the least left to store come first. In every `OLDEST_FIRST`th step that would pass over the
        oldest sequence, the oldest sequences come first. `pace` bounds the chunks, which have at least one block. A
        prompt under full attention cannot be split, nor can a block: beyond the budget it is the step's first chunk.
        """
        size, budget, spent = self.block_size, self.max_prefill_tokens, 0.0
        if pace is not None:
            budget = max(size, min(budget, pace.max_tokens // size * size))
        chunks: list[PrefillChunk] = []
        for sequence in self._to_store():
            if sequence.prefilled < sequence.origin:
                cost = 0.0 if pace is None else pace.cost(0, sequence.origin)
                if chunks and (sequence.origin > budget or (pace is not None and spent + cost > pace.seconds)):
                    continue
                chunks.append(PrefillChunk(sequence, 0, sequence.origin))
                sequence.prefilled_to(sequence.origin)
                budget -= sequence.origin
                spent += cost
            start, unit = sequence.prefilled, sequence.store or 1  # tokens that are stored together
            most = (sequence.prefix_length - start) // unit
            take = min(budget // unit, most)
            if not chunks:  # as above: a block that exceeds the budget is the step's first chunk
                take = max(take, min(1, most))
            if pace is not None and take > 0:
                fitting = pace.fitting_blocks(start, take, block_size=unit, spent=spent)
                take = max(fitting, 0 if chunks else min(take, max(1, size // unit)))
                spent += pace.cost(start, start + take * unit)
            if take > 0:
                chunks.append(PrefillChunk(sequence, start, start + take * unit))
                sequence.prefilled_to(start + take * unit)
                budget -= take * unit
        return chunks

    def _to_store(self) -> list[SequenceState]:
        """The sequences whose prefix is not stored, in the order of this step. The order depends only on them and on
        how often the oldest was passed over, so that an idle engine repeats the same steps for the same requests."""
        sequences = [s for s in self.running.values() if s.prefilled < s.prefix_length]
        if len(sequences) < 2:
            return sequences
        oldest = sequences[0]
        if self._passed_over[0] is not oldest:
            self._passed_over = oldest, 0
        least_left = sorted(sequences, key=lambda s: s.prefix_length - s.prefilled)
        times = self._passed_over[1] + 1
        if least_left[0] is oldest or times == OLDEST_FIRST:
            self._passed_over = oldest, 0
            return sequences if times == OLDEST_FIRST else least_left
        self._passed_over = oldest, times
        return least_left

    # -- after a forward ----------------------------------------------------------------------------------------

    def publish_chunks(self, chunks: Sequence[PrefillChunk]) -> None:
        """The forward has stored `chunks`: publish the pages they completed."""
        for chunk in chunks:
            if self.is_running(chunk.sequence):
                self._publish(chunk.sequence, chunk.stop)

    def commit(self, sequence: SequenceState, tokens: list[int]) -> None:
        """The forward has stored the blocks `tokens`, final hard tokens from `sequence.committed` on.

        The tokens are whole blocks as they leave the buffer: the boundary block repeats the prompt's remainder.
        Publishes the completed pages, except for positions past the token budget, which hold no tokens.
        """
        sequence.commit(tokens)
        self._publish(sequence, min(sequence.committed, sequence.end))

    def extend(self, sequence: SequenceState, tokens: list[int], num_stored: int) -> None:
        """Appends a decoder's final `tokens`; the first `num_stored` positions are stored. Publishes completed
        pages."""
        sequence.extend(tokens, num_stored)
        self._publish(sequence, num_stored)

    # -- pages --------------------------------------------------------------------------------------------------

    def _take_pages(self, sequence: SequenceState) -> bool:
        """Give a waiting sequence its pages; leading pages with known content are shared. Returns false, and gives no
        page, if there are too few.

        One page is left for each running sequence that will still grow; otherwise the new sequence would be preempted
        at once.
        """
        chain: list[bytes] = []
        if self.prefix_caching and sequence.shares_prefix:
            length = sequence.prefix_length
            num_whole = (max(0, length - 1) if self.compute_last_block else length) // self.page_size
            self._extend_chain(sequence, num_whole)
            chain = sequence.chain[:num_whole]
        shared_pages = self.pool.lookup(chain)
        self.pool.share(shared_pages)
        num_missing = sequence.num_lanes * -(-sequence.first_window // self.page_size) - len(shared_pages)
        num_growing = sum(len(s.pages) * self.page_size < s.span for s in self.running.values())
        if self.pool.num_free < num_missing + num_growing or (pages := self.pool.alloc(num_missing)) is None:
            self.pool.release(shared_pages, chain[: len(shared_pages)])
            self._awaited_hash = chain[len(shared_pages)] if len(shared_pages) < len(chain) else None
            return False
        sequence.pages = shared_pages + pages
        sequence.num_shareable = len(shared_pages)
        sequence.prefilled_to(len(shared_pages) * self.page_size)
        if self.prefix_caching and sequence.shares_prefix and not sequence.counted.num_preemptions:
            sequence.counted = replace(sequence.counted, num_cached_tokens=sequence.prefilled)
            self.pool.lookups += sequence.prefix_length
            self.pool.hits += sequence.prefilled
        return True

    def _publish(self, sequence: SequenceState, upto: int) -> None:
        """Publish the pages that are complete now that the tokens [0, upto) are final and stored."""
        if not (self.prefix_caching and sequence.shares_prefix):
            return
        num_whole = upto // self.page_size
        self._extend_chain(sequence, num_whole)
        for index in range(sequence.num_shareable, num_whole):
            self.pool.publish(sequence.pages[index], sequence.chain[index])
            if sequence.chain[index] == self._awaited_hash:
                self._blocked_sequence = None
        sequence.num_shareable = max(sequence.num_shareable, num_whole)

    def _extend_chain(self, sequence: SequenceState, num_pages: int) -> None:
        """Hashes the unhashed pages among its first `num_pages` pages."""
        chain, size = sequence.chain, self.page_size
        for index in range(len(chain), num_pages):
            parent = chain[-1] if chain else self._root(sequence)
            chain.append(page_hash(parent, sequence.tokens[index * size : (index + 1) * size]))

    def _root(self, sequence: SequenceState) -> bytes:
        """The root of its chain: keys depend on the models, their weights, the adapter and the order of rows, not on
        tokens alone."""
        adapter = 0 if sequence.adapter is None else sequence.adapter.serial
        order = "" if sequence.store is not None else " causal drafted" if sequence.is_drafted else " causal"
        return chain_root(f"{self._namespace} weights {self._weights_version} adapter {adapter}{order}")

    def may_swap(self, mode: SwapMode) -> bool:
        """Whether no request keeps other weights from being swapped in."""
        if mode == "wait":
            return not self.running and not any(s.counted.num_preemptions for s in self.waiting)
        return not any(s.is_canvas and s.num_emitted for s in (*self.running.values(), *self.waiting))

    def weights_changed(self, version: int) -> None:
        """Forgets the content of all pages; no sequence may run."""
        assert not self.running, "a running sequence owns pages that the old weights computed"
        self._weights_version = version
        for sequence in self.waiting:
            sequence.chain.clear()
        self._blocked_sequence = self._awaited_hash = None
        self.pool.forget()

    def _vacate(self, sequence: SequenceState) -> None:
        del self.running[sequence.row]
        heapq.heappush(self._free_rows, sequence.row)
        self.pool.release(sequence.pages, sequence.chain[: sequence.num_shareable])
        sequence.pages, sequence.num_pages_in_table = [], 0
        self._blocked_sequence = None

    def _preempt(self, sequence: SequenceState) -> None:
        self._vacate(sequence)
        sequence.rewind()
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def check_integrity(self) -> None:
        """Checks the owners of pages and rows, and the order of age; raises `AssertionError`."""
        self.pool.check_integrity({s.request.request_id: s.pages for s in self.running.values()})
        assert not set(self._free_rows) & self.running.keys(), "a running row is also free"
        ages = [s.arrival for s in (*self.running.values(), *self.waiting)]
        assert ages == sorted(ages), f"not oldest first, running before waiting: {ages}"
        assert not any(s.pages for s in self.waiting), "a waiting sequence owns pages"
        assert sum(s.request.request_id in self._by_id for s in (*self.running.values(), *self.waiting)) == len(
            self._by_id
        ), "a known request neither runs nor waits"
        for s in self.running.values():
            room = len(s.pages) * self.page_size
            assert max(s.prefilled, min(s.committed, s.end)) <= room, f"'{s.request.request_id}' outgrew its pages"
