"""What an engine has done and how full it is, for its observers.

The steps count with numbers that they read anyway; queues, pages and slots are read on
demand.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mbd_core.decoding.answers.slots import SlotState
from mbd_core.engine.pacing import Pacer
from mbd_core.engine.report import StepReport
from mbd_core.engine.scheduler import Scheduler
from mbd_core.engine.sequence import SequenceState

ForwardPart = Literal["decode", "store", "prefill"]
SAMPLE_LIMIT = 10_000


class RecentValues:
    """Values since they were last taken. Of more than `limit` the newest are kept, and `num_dropped` counts the rest.

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
        """The values, oldest first; they are gone from here."""
        return [self._values.popleft() for _ in range(len(self._values))]


@dataclass
class EngineCounts:
    """What the steps of an engine have counted since it was built.

    forwards            by kind: "decode" fills positions, "store" stores the blocks of all its sequences and fills
                        none, "prefill" carries prompts alone
    sequence_forwards   forwards that a sequence took part in with blocks or a canvas, added up over sequences: NFE
    committed_tokens    useful tokens that were handed out
    edited_tokens       tokens that were overwritten after they had been filled (T2T, DMax)
    tokens_per_forward  of each request that ended by itself
    block_lifetimes     of each block that was stored: forwards from its activation to the one that stored it, both
                        included
    queue_seconds       of each request that ended by itself: from its arrival to its first admission
    prefill_seconds     of the same: from there to the end of the forward that stored the last of its prompt; 0 where
                        the prefix cache held all of it
    """

    forwards: dict[ForwardPart, int] = field(default_factory=lambda: {"decode": 0, "store": 0, "prefill": 0})
    sequence_forwards: int = 0
    committed_tokens: int = 0
    edited_tokens: int = 0
    tokens_per_forward: RecentValues = field(default_factory=RecentValues)
    block_lifetimes: RecentValues = field(default_factory=RecentValues)
    queue_seconds: RecentValues = field(default_factory=RecentValues)
    prefill_seconds: RecentValues = field(default_factory=RecentValues)

    def end(self, sequence: SequenceState) -> None:
        """A request has ended by itself and left its row. Its tokens are those of this engine alone."""
        if num_forwards := sequence.counted.num_forwards:
            self.tokens_per_forward.add(len(sequence.answer) / num_forwards)
        self.queue_seconds.add(sequence.queue_seconds)
        self.prefill_seconds.add(max(0.0, sequence.stored_at - sequence.admitted_at))


@dataclass(frozen=True, kw_only=True)
class EngineMeasures:
    """An engine at one moment; the counts are since it was built.

    kv_usage         share of the KV pages that running sequences own
    active_slots     slots whose block was decoded in the last forward, over all running sequences
    dummy_slots      their slots without a block
    prefix_queries   prompt tokens that were looked up in the prefix cache, `prefix_hits` those that it held
    pages_to_host    pages that were copied to the host's memory so far; `pages_from_host` those that came back, and
                     `host_pages` those that lie there now
    step_limit       seconds that a step in which somebody decodes may take with its part of prompts
    token_seconds    what a prompt token has cost at the beginning of its prompt; 0 before chunks were measured
    replayed_steps   static steps that ran as CUDA graphs; `eager_steps` static steps without one
    counts           what the steps counted; its `RecentValues` are the engine's own, for one reader to take
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
    """The measures of an engine whose last step that was read said `report`, and whose sequences in `rows` decode in
    blocks. A row that is younger than the report has no part in it yet."""
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
