"""What a step trace tells in numbers: active blocks, slot-wise mask ratios, block lifetimes, token efficiency, bubble.

A trace is first cut into requests, each a rectangle of its own forwards and the buffer's slots. Steps in which a
request took no part (it waited, or was preempted) are not among its forwards.

Shape legend: T forwards of one request, N slots, B block size.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mbd_core.decoding.slot_state import CANVAS_STATE, SlotState
from mbd_core.trace.recorder import STATES, read_trace_table, trace_block_size

DUMMY, ACTIVE, TO_CACHE = SlotState.DUMMY, SlotState.ACTIVE, SlotState.TO_CACHE
NUM_BINS = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestTrace:
    """One request's forwards. `state` and `mask_ratio` are what a forward saw, the rest is what it did.

    tokens_TNB, confidences_TNB  only if the trace was recorded in detail; -1 and 0 where masked
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
        """Forwards in which nothing was decoded: the bubble."""
        return self.num_active_T == 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A trace under a name; `block_size` is `None` where neither the trace nor the reader says it.

    `num_other` requests were decoded with full attention, so without a buffer, and are left out."""

    name: str
    block_size: int | None
    requests: tuple[RequestTrace, ...]
    num_other: int = 0

    @property
    def num_slots(self) -> int:
        return int(self.requests[0].state_TN.shape[1])


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A distribution in a few numbers; `histogram` holds shares, by value or by bin."""

    n: int
    mean: float
    std: float
    p50: float
    p90: float
    max: float
    histogram: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Measures:
    """The numbers of one run.

    num_other           full-attention requests, which are left out
    num_forwards        NFE summed over requests, store-only ones included
    num_accepted        positions that became tokens; what lies behind an EOS counts here too
    tpf                 num_accepted / num_forwards
    store_only_share    share of forwards in which nothing was decoded (the bubble)
    active_blocks       ACTIVE slots of a request's forward (Fig. 2 D-E); histogram from 0 to N_buf
    mask_ratios         by rank among a forward's ACTIVE slots (Fig. 2 C): the ratio the forward saw, `NUM_BINS` bins
    mask_ratio_gaps     second ACTIVE slot's ratio less the first's, and so on; `NUM_BINS` bins over [-1, 1]
    lifetimes           forwards from a block's activation to its leaving, both counted; histogram from 1
    waiting             those of them in which it was final (TO_CACHE), its store included; histogram from 0
    num_unfinished      blocks that never left: dropped behind an EOS, or the trace ended before
    token_efficiency    eta = TPF_s / Q_s with Q_s = N_buf * B (paper Section 4.5), `None` without a block size
    resident_efficiency the same with the resident blocks alone for Q_s: what dynamic packing would reach
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


def read_run(path: Path, *, name: str, block_size: int | None = None) -> Run:
    """A trace file or folder, cut into requests; `block_size` is for traces that do not say theirs.

    Raises `ValueError`, one sentence that names the file, for what is missing, empty, damaged or no trace.
    """
    table = read_trace_table(path)
    try:
        return make_run(table, name=name, block_size=block_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def make_run(table: pa.Table, *, name: str, block_size: int | None = None) -> Run:
    """The same of a trace in memory."""
    if not len(table):
        raise ValueError("the trace is empty: it holds no step of any whole request")
    for field in table.schema:
        if field.name not in ("tokens", "confidences") and table[field.name].null_count:
            raise ValueError(f"column '{field.name}' has empty cells")
    known = trace_block_size(table)
    if known is not None and block_size is not None and known != block_size:
        raise ValueError(f"the trace's block size is {known}, not the {block_size} that was given")
    requests, num_other = _requests(table)
    if not requests:
        raise ValueError("the trace holds full-attention requests only: they have no Block Buffer to report on")
    if len({r.state_TN.shape[1] for r in requests}) > 1:
        raise ValueError("requests with different numbers of slots: traces of several engines")
    size = known if known is not None else block_size
    return Run(name=name, block_size=size, requests=tuple(requests), num_other=num_other)


def measure(run: Run) -> Measures:
    """All numbers of a run."""
    active = np.concatenate([r.num_active_T for r in run.requests])
    resident = sum(int((r.state_TN != DUMMY).sum()) for r in run.requests)
    num_forwards, num_accepted = len(active), sum(int(r.accepted_TN.sum()) for r in run.requests)
    num_store_only = int((active == 0).sum())
    size = run.block_size
    lives = [life for r in run.requests for life in block_lives(r)]
    gone = [life for life in lives if life.left]
    return Measures(
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
        lifetimes=_counts([life.num_forwards for life in gone], start=1),
        waiting=_counts([life.num_waiting for life in gone], start=0),
        num_unfinished=len(lives) - len(gone),
        token_efficiency=num_accepted / (num_forwards * run.num_slots * size) if size else None,
        resident_efficiency=num_accepted / (resident * size) if size else None,
    )


def active_by_forward(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and standard deviation of the ACTIVE slots at each forward of a request, and of how many (Fig. 2 D)."""
    longest = max(r.num_forwards for r in run.requests)
    table = np.full((len(run.requests), longest), np.nan)
    for row, r in zip(table, run.requests, strict=True):
        row[: r.num_forwards] = r.num_active_T
    return np.nanmean(table, axis=0), np.nanstd(table, axis=0), (~np.isnan(table)).sum(0)


def ratios_by_rank(run: Run) -> list[np.ndarray]:
    """Mask ratios the forwards saw, of the first ACTIVE slot, the second, and so on, as far as any occurs."""
    ratios: list[list[np.ndarray]] = [[] for _ in range(run.num_slots)]
    for r in run.requests:
        active = r.state_TN == ACTIVE
        rank = active.cumsum(1) - 1
        for number, of in enumerate(ratios):
            of.append(r.mask_ratio_TN[active & (rank == number)])
    return [a for of in ratios if len(a := np.concatenate(of))]


def ratio_gaps(run: Run) -> list[np.ndarray]:
    """Differences of mask ratio between the ACTIVE slots of rank k + 1 and k of one forward."""
    gaps: list[list[float]] = [[] for _ in range(run.num_slots)]
    for r in run.requests:
        for active_N, ratio_N in zip(r.state_TN == ACTIVE, r.mask_ratio_TN, strict=True):
            for number, gap in enumerate(np.diff(ratio_N[active_N])):
                gaps[number].append(float(gap))
    return [np.array(of) for of in gaps if of]


@dataclass(frozen=True, kw_only=True)
class BlockLife:
    """A block's stay in the buffer, in the request's forwards; `num_waiting` of them it spent as TO_CACHE."""

    block: int
    first: int
    num_forwards: int
    num_waiting: int
    left: bool


def block_lives(request: RequestTrace) -> list[BlockLife]:
    """Every block that was resident. It has left if the buffer went on behind it, or if the request's last forward
    stored it: TO_CACHE, or, where tokens may be revised, a leading block that came in filled and was not changed."""
    resident = request.state_TN != DUMMY
    verified = (request.mask_ratio_TN[-1] == 0.0) & (request.edited_TN[-1] == 0)
    last = resident[-1] & ((request.state_TN[-1] == TO_CACHE) | verified)
    end = int(request.block_TN[-1, 0]) + int(np.cumprod(last).sum())
    lives = []
    for block in np.unique(request.block_TN[resident]).tolist():
        here = resident & (request.block_TN == block)
        lives.append(
            BlockLife(
                block=block,
                first=int(here.any(1).argmax()),
                num_forwards=int(here.sum()),
                num_waiting=int((here & (request.state_TN == TO_CACHE)).sum()),
                left=block < end,
            )
        )
    return lives


def _requests(table: pa.Table) -> tuple[list[RequestTrace], int]:
    """The requests that a Block Buffer decoded, and how many others there are."""
    canvas = pc.equal(table["state"], CANVAS_STATE)
    num_other = pc.count_distinct(table["request_id"].filter(canvas)).as_py()
    table = table.filter(pc.invert(canvas))
    if not len(table):
        return [], num_other
    encoded = pc.dictionary_encode(table["request_id"]).combine_chunks()
    code, names = encoded.indices.to_numpy(), encoded.dictionary.to_pylist()
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
            raise ValueError(f"request '{name}' lacks slots in some step, or is there twice")
        at = at.reshape(-1, num_slots)
        step_TN = column["step"][at]
        if (step_TN != step_TN[:, :1]).any() or (np.diff(step_TN[:, 0]) == 0).any():
            raise ValueError(f"request '{name}' lacks slots in some step, or is there twice")
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
    """A list column as rows of equal length, zero where it is empty, and where it is not; `None` if it always is."""
    if column.null_count == len(column):
        return None
    given = pc.is_valid(column).to_numpy()
    lengths = pc.unique(pc.list_value_length(column.drop_null()))
    if len(lengths) > 1:
        raise ValueError(f"blocks of different sizes ({', '.join(map(str, lengths.to_pylist()))}) in one trace")
    flat = pc.list_flatten(column).to_numpy()
    whole = np.zeros((len(column), lengths[0].as_py()), dtype=flat.dtype)
    whole[given] = flat.reshape(-1, whole.shape[1])
    return whole, given


def _take(matrix: tuple[np.ndarray, np.ndarray] | None, at_TN: np.ndarray) -> np.ndarray | None:
    return None if matrix is None or not matrix[1][at_TN].all() else matrix[0][at_TN]


def _counts(values: list[int], *, start: int) -> Spread | None:
    """The spread of whole numbers, its histogram one value a bin from `start`; `None` without any."""
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
