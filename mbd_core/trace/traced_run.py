"""A step trace split into requests."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mbd_core.decoding.answers.slots import CANVAS_STATE, SlotState
from mbd_core.trace.recorder import STATES, read_trace_table, trace_block_size

NUMBERS = ("step", "slot", "block", "mask_ratio", "accepted", "edited", "judged", "confirmed")
DUMMY, ACTIVE, TO_CACHE = (int(s) for s in (SlotState.DUMMY, SlotState.ACTIVE, SlotState.TO_CACHE))


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestTrace:
    """One request's forwards. `state` and `mask_ratio` are the values before a forward; the other fields are its
    results.

    judged_TN, confirmed_TN      numbers of drafted tokens that the forward judged, and that it accepted
    tokens_TNB, confidences_TNB  `None` unless the trace was recorded in detail; -1 and 0 where masked
    draft_TNB                    drafted tokens that wait for their judgement, -1 elsewhere; `None` if no draft is
                                 verified, or without detail
    """

    request_id: str
    step_T: np.ndarray
    block_TN: np.ndarray
    state_TN: np.ndarray
    mask_ratio_TN: np.ndarray
    accepted_TN: np.ndarray
    edited_TN: np.ndarray
    judged_TN: np.ndarray
    confirmed_TN: np.ndarray
    tokens_TNB: np.ndarray | None
    confidences_TNB: np.ndarray | None
    draft_TNB: np.ndarray | None

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
    num_other   number of requests without a Block Buffer (canvases, causal rows); they are not in `requests`
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
        """The request with that id. Raises `ValueError` naming a few existing ids."""
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
    """A trace file or folder, split into requests; `block_size` is for traces that do not record the size.

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
        if field.name not in ("tokens", "confidences", "draft") and table[field.name].null_count:
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
    leading blocks that are TO_CACHE. Under T2T it also stores leading blocks that are complete and that it does not
    change.
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
    column = {n: table[n].to_numpy() for n in NUMBERS}
    state = pc.index_in(table["state"], value_set=pa.array(STATES[:3]))
    if state.null_count:
        wrong = table["state"].filter(pc.is_null(state))[0].as_py()
        raise ValueError(f"state '{wrong}' is none of {', '.join(STATES[:3])}")
    column["state"] = state.to_numpy()
    tokens, confidences, draft = (_matrix(table[name]) for name in ("tokens", "confidences", "draft"))
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
                judged_TN=column["judged"][at],
                confirmed_TN=column["confirmed"][at],
                tokens_TNB=_take(tokens, at),
                confidences_TNB=_take(confidences, at),
                draft_TNB=_take(draft, at),
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
