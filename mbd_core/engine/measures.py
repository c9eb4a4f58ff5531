"""An engine's counts and its load, for its observers.

Steps update the counts with numbers that they read anyway; queues, pages and slots are read on demand.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mbd_core.decoding.answers.slots import SlotState
from mbd_core.engine.schedule.pacing import Pacer
from mbd_core.engine.schedule.scheduler import Scheduler
from mbd_core.engine.sequences.sequence import SequenceState
from mbd_core.engine.step.report import StepReport

ForwardPart = Literal["decode", "store", "prefill"]
SAMPLE_LIMIT = 10_000


class RecentValues:
    """Values since the last `take`. The newest `limit` values are kept, and `num_dropped` counts the rest.

    One thread adds while another takes.
    """

    def __init__(self, limit: int = SAMPLE_LIMIT) -> None:
        self._values: deque[float] = deque(maxlen=limit)
        self._limit = limit
        self.num_dropped = 0

    def add(self, value: float) -> None:
        self.num_dropped += len(self._values) == self._limit
        self._values.append(value)

    def extend(self, values: Iterable[float]) -> None:
        for value in values:
            self.add(value)

    def take(self) -> list[float]:
        """Removes the values and returns them, oldest first."""
        return [self._values.popleft() for _ in range(len(self._values))]


@dataclass
class EngineCounts:
    """The counts of an engine's steps since it was built.

    forwards            number of forwards by kind: "decode" fills positions, "store" stores the blocks of all its
                        sequences and fills no position, "prefill" carries only prompts
    sequence_forwards   NFE: forwards in which a sequence took part with blocks or a canvas, summed over sequences
    committed_tokens    useful tokens that were handed out
    verifications       forwards in which a sequence's drafts were judged, summed over sequences
    drafted_tokens      drafted tokens that verifications judged; they confirmed `confirmed_tokens` of them
    accepted_lengths    of each verification: the number of drafted tokens that it confirmed
    edited_tokens       filled tokens that were overwritten (T2T, DMax)
    tokens_per_forward  of each request that ended by itself
    block_lifetimes     of each stored block: forwards from its activation to its store, both included
    queue_seconds       of each request that ended by itself: from arrival to first admission
    prefill_seconds     of the same requests: from first admission to the end of the forward that completed the
                        prompt; 0 if the prefix cache held the whole prompt
    """

    forwards: dict[ForwardPart, int] = field(default_factory=lambda: {"decode": 0, "store": 0, "prefill": 0})
    sequence_forwards: int = 0
    committed_tokens: int = 0
    verifications: int = 0
    drafted_tokens: int = 0
    confirmed_tokens: int = 0
    edited_tokens: int = 0
    tokens_per_forward: RecentValues = field(default_factory=RecentValues)
    accepted_lengths: RecentValues = field(default_factory=RecentValues)
    block_lifetimes: RecentValues = field(default_factory=RecentValues)
    queue_seconds: RecentValues = field(default_factory=RecentValues)
    prefill_seconds: RecentValues = field(default_factory=RecentValues)

    def end(self, sequence: SequenceState) -> None:
        """Counts a request that ended by itself and left its row; only tokens of this engine count."""
        if num_forwards := sequence.counted.num_forwards:
            self.tokens_per_forward.add(len(sequence.answer) / num_forwards)
        self.queue_seconds.add(sequence.queue_seconds)
        self.prefill_seconds.add(max(0.0, sequence.stored_at - sequence.admitted_at))


@dataclass(frozen=True, kw_only=True)
class EngineMeasures:
    """An engine at one moment, with the counts since it was built.

    kv_usage         share of the KV pages that running sequences own
    active_slots     slots whose block was decoded in the last forward, over all running sequences
    dummy_slots      slots without a block, over the same sequences
    prefix_queries   prompt tokens that were looked up in the prefix cache; `prefix_hits` counts the tokens it held
    pages_to_host    pages copied to the host's memory so far; `pages_from_host` counts the pages copied back, and
                     `host_pages` the pages on the host now
    step_limit       seconds that a step may take with its prompts if a sequence decodes in it
    token_seconds    seconds of a prompt token at the beginning of its prompt; 0 before chunks were measured
    replayed_steps   steps that ran as CUDA graphs; `eager_steps` counts those without a graph (`StepGraphs`)
    counts           counts of the steps; its `RecentValues` are the engine's own, for one reader to take
    """

    running: int
    waiting: int
    kv_usage: float
    active_slots: int
    dummy_slots: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    host_pages: int
    pages_to_host: int
    pages_from_host: int
    step_limit: float
    token_seconds: float
    replayed_steps: int
    eager_steps: int
    counts: EngineCounts


def measure(
    scheduler: Scheduler,
    pacer: Pacer,
    *,
    counts: EngineCounts,
    graph_report: Mapping[str, Any],
    report: StepReport,
    rows: Iterable[int],
) -> EngineMeasures:
    """The measures of an engine. `report` is the last step that was read; `rows` are the sequences that decode in
    blocks. A row that is younger than the report is not in it."""
    pool, states_RN = scheduler.pool, report.states_RN
    states = states_RN[[row for row in rows if row < len(states_RN)]]
    return EngineMeasures(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        kv_usage=1.0 - pool.num_free / pool.capacity,
        active_slots=int((states == SlotState.ACTIVE).sum()),
        dummy_slots=int((states == SlotState.DUMMY).sum()),
        prefix_queries=pool.lookups,
        prefix_hits=pool.hits,
        preemptions=scheduler.num_preemptions,
        host_pages=0 if pool.host is None else len(pool.host),
        pages_to_host=0 if pool.host is None else pool.host.num_kept,
        pages_from_host=0 if pool.host is None else pool.host.num_restored,
        step_limit=pacer.limit,
        token_seconds=pacer.token_seconds,
        replayed_steps=graph_report["steps_replayed"],
        eager_steps=graph_report["steps_eager"],
        counts=counts,
    )
