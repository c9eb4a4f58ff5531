"""A step trace split into requests, and its measures: active blocks, mask ratios by slot, lifetimes, token efficiency.

Steps in which a request took no part (it waited, or was preempted) are not among its forwards.

Shape legend: T forwards of one request, N slots, B block size.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mbd_core.decoding.answers.slots import CANVAS_STATE, SlotState
from mbd_core.trace.recorder import STATES, read_trace_table, trace_block_size

DUMMY, ACTIVE, TO_CACHE = (int(s) for s in (SlotState.DUMMY, SlotState.ACTIVE, SlotState.TO_CACHE))


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestTrace:
    """One request's forwards. `state` and `mask_ratio` are the values before a forward, the others its results.

    tokens_TNB, confidences_TNB  `None` unless the trace was recorded in detail; -1 and 0 where masked
    """

    request_id: str
    step_T: np.ndarray
    block_TN: np.ndarray
    state_TN: np.ndarray
    mask_ratio_TN: np.ndarray
    accepted_TN: np.ndarray
    edited_TN: np.ndarray
    tokens_TNB: np.ndarray | None
    confidences_TNB: np.ndarray | None

    @property
    def num_forwards(self) -> int:
        return len(self.step_T)

    @property
    def num_active_T(self) -> np.ndarray:
        return (self.state_TN == ACTIVE).sum(1)

    @property
    def store_only_T(self) -> np.ndarray:
        """Whether a forward decoded nothing: the bubble."""
        return self.num_active_T == 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedRun:
    """A trace with a name.

    block_size  `None` if neither the trace nor the caller of `read_run` gives it
    num_other   canvas requests, which have no Block Buffer and are not in `requests`
    """

    name: str
    block_size: int | None
    requests: tuple[RequestTrace, ...]
    num_other: int = 0

    @property
    def num_slots(self) -> int:
        return int(self.requests[0].state_TN.shape[1])

    @property
    def detailed(self) -> bool:
        """Whether tokens were recorded, as a replay requires."""
        return all(r.tokens_TNB is not None for r in self.requests)

    def request(self, request_id: str) -> RequestTrace:
        """The request with that id; `ValueError` names a few that exist."""
        for request in self.requests:
            if request.request_id == request_id:
                return request
        some = ", ".join(r.request_id for r in self.requests[:5])
        raise ValueError(f"{self.name} has no request '{request_id}'; it has {some} ...")


@dataclass(frozen=True, kw_only=True)
class BlockLife:
    """A block's forwards in the buffer, from number `first` on; in `num_waiting` of them it was TO_CACHE.

    has_left  whether it was stored and left the buffer
    """

    block: int
    first: int
    num_forwards: int
    num_waiting: int
    has_left: bool


def read_run(path: Path, *, name: str, block_size: int | None = None) -> TracedRun:
    """A trace file or folder, split into requests; give `block_size` for traces that do not record it.

    Raises `ValueError`, one sentence that names the file, if it is missing, empty, damaged or no trace.
    """
    table = read_trace_table(path)
    try:
        return traced_run(table, name=name, block_size=block_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def traced_run(table: pa.Table, *, name: str, block_size: int | None = None) -> TracedRun:
    """A trace in memory, split into requests; raises the errors of `read_run`."""
    if not len(table):
        raise ValueError("the trace is empty: it holds no step of any whole request")
    for field in table.schema:
        if field.name not in ("tokens", "confidences") and table[field.name].null_count:
            raise ValueError(f"column '{field.name}' has empty cells")
    own_size = trace_block_size(table)
    if own_size is not None and block_size is not None and own_size != block_size:
        raise ValueError(f"the trace's block size is {own_size}, not the {block_size} that was given")
    requests, num_other = _requests(table)
    if not requests:
        raise ValueError("no request of the trace has a Block Buffer to report on: canvases and causal rows have none")
    if len({r.state_TN.shape[1] for r in requests}) > 1:
        raise ValueError("requests with different numbers of slots: traces of several engines")
    size = own_size if own_size is not None else block_size
    return TracedRun(name=name, block_size=size, requests=tuple(requests), num_other=num_other)


def block_lives(request: RequestTrace) -> list[BlockLife]:
    """The `BlockLife` of every block that was resident.

    A block has left if the buffer moved past it, or if the request's last forward stored it. That forward stores the
    leading blocks that are TO_CACHE or, as under T2T, complete and unchanged by it.
    """
    resident = request.state_TN != DUMMY
    is_final = (request.mask_ratio_TN[-1] == 0.0) & (request.edited_TN[-1] == 0)
    stored = resident[-1] & ((request.state_TN[-1] == TO_CACHE) | is_final)
    end = int(request.block_TN[-1, 0]) + int(np.cumprod(stored).sum())
    lives = []
    for block in np.unique(request.block_TN[resident]).tolist():
        is_block = resident & (request.block_TN == block)
        lives.append(
            BlockLife(
                block=block,
                first=int(is_block.any(1).argmax()),
                num_forwards=int(is_block.sum()),
                num_waiting=int((is_block & (request.state_TN == TO_CACHE)).sum()),
                has_left=block < end,
            )
        )
    return lives


def _requests(table: pa.Table) -> tuple[list[RequestTrace], int]:
    """The requests that a Block Buffer decoded, and the number of other requests."""
    canvas = pc.equal(table["state"], CANVAS_STATE)
    num_other = pc.count_distinct(table["request_id"].filter(canvas)).as_py()
    table = table.filter(pc.invert(canvas))
    if not len(table):
        return [], num_other
    dictionary = pc.dictionary_encode(table["request_id"]).combine_chunks()
    code, names = dictionary.indices.to_numpy(), dictionary.dictionary.to_pylist()
    column = {n: table[n].to_numpy() for n in ("step", "slot", "block", "mask_ratio", "accepted", "edited")}
    state = pc.index_in(table["state"], value_set=pa.array(STATES[:3]))
    if state.null_count:
        wrong = table["state"].filter(pc.is_null(state))[0].as_py()
        raise ValueError(f"state '{wrong}' is none of {', '.join(STATES[:3])}")
    column["state"] = state.to_numpy()
    tokens, confidences = _matrix(table["tokens"]), _matrix(table["confidences"])
    order = np.lexsort((column["block"], column["slot"], column["step"], code))
    bounds = np.searchsorted(code[order], np.arange(len(names) + 1))
    requests = []
    for number, name in enumerate(names):
        at = order[bounds[number] : bounds[number + 1]]
        num_slots = int(column["slot"][at].max()) + 1
        if len(at) % num_slots or (column["slot"][at].reshape(-1, num_slots) != np.arange(num_slots)).any():
            raise ValueError(f"request '{name}' lacks slots in some step, or occurs twice")
        at = at.reshape(-1, num_slots)
        step_TN = column["step"][at]
        if (step_TN != step_TN[:, :1]).any() or (np.diff(step_TN[:, 0]) == 0).any():
            raise ValueError(f"request '{name}' lacks slots in some step, or occurs twice")
        requests.append(
            RequestTrace(
                request_id=name,
                step_T=step_TN[:, 0],
                block_TN=column["block"][at],
                state_TN=column["state"][at],
                mask_ratio_TN=column["mask_ratio"][at],
                accepted_TN=column["accepted"][at],
                edited_TN=column["edited"][at],
                tokens_TNB=_take(tokens, at),
                confidences_TNB=_take(confidences, at),
            )
        )
    return requests, num_other


def _matrix(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray] | None:
    """A list column as a matrix, with zeros in null rows, and the mask of valid rows; `None` if all rows are null."""
    if column.null_count == len(column):
        return None
    valid = pc.is_valid(column).to_numpy()
    lengths = pc.unique(pc.list_value_length(column.drop_null()))
    if len(lengths) > 1:
        raise ValueError(f"blocks of different sizes ({', '.join(map(str, lengths.to_pylist()))}) in one trace")
    flat = pc.list_flatten(column).to_numpy()
    matrix = np.zeros((len(column), lengths[0].as_py()), dtype=flat.dtype)
    matrix[valid] = flat.reshape(-1, matrix.shape[1])
    return matrix, valid


def _take(matrix: tuple[np.ndarray, np.ndarray] | None, at_TN: np.ndarray) -> np.ndarray | None:
    return None if matrix is None or not matrix[1][at_TN].all() else matrix[0][at_TN]


# The measures of a step trace: active blocks, mask ratios by slot, block lifetimes, token efficiency, the bubble.

NUM_BINS = 10


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A summary of a distribution; `histogram` has the share of each value or bin."""

    n: int
    mean: float
    std: float
    p50: float
    p90: float
    max: float
    histogram: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RunMeasures:
    """The numbers of one run.

    num_other           requests without a Block Buffer, which the other numbers do not cover
    num_forwards        NFE summed over requests, store-only forwards included
    num_accepted        positions that became tokens, also after an EOS
    tpf                 num_accepted / num_forwards
    store_only_share    share of forwards that decoded nothing (the bubble)
    active_blocks       ACTIVE slots in a request's forward (Fig. 2 D-E); histogram from 0 to N_buf
    mask_ratios         mask ratios before a forward, by rank among its ACTIVE slots (Fig. 2 C); `NUM_BINS` bins
    mask_ratio_gaps     mask ratio of rank k + 1 minus that of rank k; `NUM_BINS` bins over [-1, 1]
    lifetimes           forwards of a block, from its activation to the one that stored it; histogram from 1
    waiting             those of them in which the block was TO_CACHE, its store included; histogram from 0
    num_unfinished      blocks that were never stored: dropped after an EOS, or the trace ended earlier
    token_efficiency    eta = TPF_s / Q_s with Q_s = N_buf * B (paper Section 4.5), `None` without a block size
    resident_efficiency the same with Q_s of the resident blocks alone: the efficiency of dynamic packing
    """

    name: str
    num_requests: int
    num_other: int
    num_slots: int
    block_size: int | None
    num_forwards: int
    num_accepted: int
    num_edited: int
    tpf: float
    num_store_only: int
    store_only_share: float
    active_blocks: Spread
    mask_ratios: tuple[Spread, ...]
    mask_ratio_gaps: tuple[Spread, ...]
    lifetimes: Spread | None
    waiting: Spread | None
    num_unfinished: int
    token_efficiency: float | None
    resident_efficiency: float | None


def measure(run: TracedRun) -> RunMeasures:
    """All numbers of a run."""
    active = np.concatenate([r.num_active_T for r in run.requests])
    resident = sum(int((r.state_TN != DUMMY).sum()) for r in run.requests)
    num_forwards, num_accepted = len(active), sum(int(r.accepted_TN.sum()) for r in run.requests)
    num_store_only = int((active == 0).sum())
    size = run.block_size
    lives = [life for r in run.requests for life in block_lives(r)]
    stored_lives = [life for life in lives if life.has_left]
    return RunMeasures(
        name=run.name,
        num_requests=len(run.requests),
        num_other=run.num_other,
        num_slots=run.num_slots,
        block_size=size,
        num_forwards=num_forwards,
        num_accepted=num_accepted,
        num_edited=sum(int(r.edited_TN.sum()) for r in run.requests),
        tpf=num_accepted / num_forwards,
        num_store_only=num_store_only,
        store_only_share=num_store_only / num_forwards,
        active_blocks=_spread(active, np.bincount(active, minlength=run.num_slots + 1)),
        mask_ratios=_spreads(ratios_by_rank(run)),
        mask_ratio_gaps=_spreads(ratio_gaps(run), low=-1.0),
        lifetimes=_counts([life.num_forwards for life in stored_lives], start=1),
        waiting=_counts([life.num_waiting for life in stored_lives], start=0),
        num_unfinished=len(lives) - len(stored_lives),
        token_efficiency=num_accepted / (num_forwards * run.num_slots * size) if size else None,
        resident_efficiency=num_accepted / (resident * size) if size else None,
    )


def active_by_forward(run: TracedRun) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """At each forward of a request: mean and standard deviation of the ACTIVE slots, number of requests (Fig. 2 D)."""
    longest = max(r.num_forwards for r in run.requests)
    table = np.full((len(run.requests), longest), np.nan)
    for row, r in zip(table, run.requests, strict=True):
        row[: r.num_forwards] = r.num_active_T
    return np.nanmean(table, axis=0), np.nanstd(table, axis=0), (~np.isnan(table)).sum(0)


def ratios_by_rank(run: TracedRun) -> list[np.ndarray]:
    """Mask ratios before the forwards, one array for each rank among the ACTIVE slots that occurs."""
    ratios: list[list[np.ndarray]] = [[] for _ in range(run.num_slots)]
    for r in run.requests:
        active = r.state_TN == ACTIVE
        rank = active.cumsum(1) - 1
        for number, of_rank in enumerate(ratios):
            of_rank.append(r.mask_ratio_TN[active & (rank == number)])
    return [values for of_rank in ratios if len(values := np.concatenate(of_rank))]


def ratio_gaps(run: TracedRun) -> list[np.ndarray]:
    """Differences of mask ratio between the ACTIVE slots of rank k + 1 and k of a forward, one array for each k."""
    gaps: list[list[float]] = [[] for _ in range(run.num_slots)]
    for r in run.requests:
        for active_N, ratio_N in zip(r.state_TN == ACTIVE, r.mask_ratio_TN, strict=True):
            for number, gap in enumerate(np.diff(ratio_N[active_N])):
                gaps[number].append(float(gap))
    return [np.array(of_rank) for of_rank in gaps if of_rank]


def _counts(values: list[int], *, start: int) -> Spread | None:
    """The spread of whole numbers, with a histogram bin for each value from `start`; `None` without values."""
    return _spread(np.array(values), np.bincount(values)[start:]) if values else None


def _spreads(groups: list[np.ndarray], *, low: float = 0.0) -> tuple[Spread, ...]:
    return tuple(_spread(g, np.histogram(g, bins=NUM_BINS, range=(low, 1.0))[0]) for g in groups)


def _spread(values: np.ndarray, counts: np.ndarray) -> Spread:
    return Spread(
        n=len(values),
        mean=float(values.mean()),
        std=float(values.std()),
        p50=float(np.percentile(values, 50)),
        p90=float(np.percentile(values, 90)),
        max=float(values.max()),
        histogram=tuple((counts / counts.sum()).tolist()),
    )
