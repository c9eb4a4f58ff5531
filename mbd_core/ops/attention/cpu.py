"""The CPU engine's attention: a sequence's keys are read once for all its rows; similar sequences share one call.

It computes `definition.paged_attention`. Neighbouring rows of one sequence (the slots of a buffer, the blocks of a
prompt chunk) become one call with a mask. Sequences with similar numbers of keys are bundled into one call. A long
sequence is attended in tiles: a tile of keys is read once, for all heads and queries. torch's kernel would read all of
its keys again for each query head and every 32 queries.

Shape legend: T packed query tokens, R rows (one block of one sequence each), P pages a row, S page size, H query
heads, K key/value heads, C head channels; in a bundle G sequences, Q query tokens of each, L keys of each; M query
tokens times query heads of one key head.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mbd_core.ops.attention.definition import BoundAttention, RowLayout, attend, bind_rows, gather_keys, wide_dtype

# The blocks of a prompt chunk see more and more keys; a call with more queries than this would mostly compute masked
# pairs.
_MOST_QUERIES = 512
# Sequences whose key counts differ by less than this factor share a call; shorter sequences are padded.
_PADDING = 1.25
# Sequences with at most this many keys count as equally long.
_SHORT = 256
# Keys gathered for one call. A larger number exceeds the processor's cache, which costs more than another call.
_MOST_KEYS = 2048
# A call may compute this many padded query-key pairs: they cost less than another call.
_PADDED_PAIRS = 4096
# Masks of up to this number of elements are made once a step, larger masks once a layer.
_KEPT_MASK = 2**22
# A sequence with more keys than this is attended in tiles.
LONG = 1000
# Rows (query tokens times the query heads of a key head) and scores of one tile: both products run at full speed, and
# the scores stay in the processor's cache.
_TILE_ROWS = 128
_TILE_SCORES = 2**17
# In tiles, exponentials are not taken relative to the largest score. Their sum tells whether that was safe: between
# these bounds no exponential overflowed, and each underflowed exponential is below 1e-13 of the sum.
_SAFE_SUM = (1e-20, 1e30)


@dataclass(frozen=True)
class Bundle:
    """Sequences attended in one call. A sequence with fewer queries than other sequences repeats its last query.

    kv_lens_GQ  the end of each query's visible keys, at most `num_keys`; with a window they begin at `first_keys_GQ`
    hidden_GQ2  the first key that a gap hides from each query, and the first key after the gap; `None`: no key is
                hidden
    whole       whether the bundle holds all tokens of the batch in their order, so that no queries are gathered
    first_page  set if the bundle is one sequence whose pages are consecutive: its keys are a view that begins here
    """

    tokens_GQ: Tensor
    pages_GP: Tensor
    kv_lens_GQ: np.ndarray
    num_keys: int
    first_keys_GQ: np.ndarray | None = None
    hidden_GQ2: np.ndarray | None = None
    whole: bool = False
    first_page: int | None = None
    _masks: dict[torch.dtype, Tensor] = field(default_factory=dict, compare=False)

    @cached_property
    def visible_GQL(self) -> Tensor | None:
        """The visible keys of each query; `None` if every query sees all keys."""
        has_window = self.first_keys_GQ is not None and bool(self.first_keys_GQ.any())
        if self.kv_lens_GQ.min() == self.num_keys and not has_window and self.hidden_GQ2 is None:
            return None
        visible_GQL = np.arange(self.num_keys) < self.kv_lens_GQ[..., None]
        if self.first_keys_GQ is not None:
            visible_GQL &= np.arange(self.num_keys) >= self.first_keys_GQ[..., None]
        if self.hidden_GQ2 is not None:
            first_GQ1, stop_GQ1 = np.split(self.hidden_GQ2, 2, axis=-1)
            visible_GQL &= (np.arange(self.num_keys) < first_GQ1) | (np.arange(self.num_keys) >= stop_GQ1)
        return torch.from_numpy(visible_GQL).to(self.tokens_GQ.device)

    @cached_property
    def is_long(self) -> bool:
        """Whether the bundle is one sequence that is attended in tiles on a CPU. A sequence with a window or a gap is
        not."""
        is_one = len(self.kv_lens_GQ) == 1 and self.first_keys_GQ is None and self.hidden_GQ2 is None
        return is_one and self.num_keys > LONG and self.tokens_GQ.device.type == "cpu"

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """`visible_GQL` as numbers of `dtype` to add to the scores, made once for all layers."""
        if self.visible_GQL is None or self.visible_GQL.numel() > _KEPT_MASK:
            return self.visible_GQL
        if dtype not in self._masks:
            scores = torch.zeros(self.visible_GQL.shape, dtype=dtype, device=self.visible_GQL.device)
            self._masks[dtype] = scores.masked_fill_(~self.visible_GQL, -math.inf)
        return self._masks[dtype]

    def keys(self, k_pages: Tensor, v_pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (G, K, L, C) of a layer: a view if the sequence's pages are consecutive."""
        if self.first_page is None:
            return gather_keys(k_pages, v_pages, self.pages_GP, self.num_keys)
        k_KLC, v_KLC = _viewed_keys(self, k_pages, v_pages, 0, self.num_keys)
        return k_KLC[None], v_KLC[None]


def bind(layout: RowLayout) -> BoundAttention:
    """`paged_attention` of one layout, planned once for all layers; with `layout.exact`, one call a row."""
    if layout.exact:
        return bind_rows(layout)
    bundles = plan_bundles(layout)
    return lambda q, k, v: attend_bundles(q, k, v, bundles)


def plan_bundles(layout: RowLayout) -> tuple[Bundle, ...]:
    """The bundles of a batch. They depend only on its layout, so one plan serves all layers of a step.

    Neighbouring rows with the same pages are one sequence. Sequences with similar numbers of keys share a bundle, if
    padding their queries costs little. The row lengths are read once on the host. The Python work grows with the rows,
    not with the tokens.
    """
    bounds, kv_lens = layout.cu_seqlens_q.tolist(), layout.kv_lens_R.tolist()
    if layout.causal_R is None:
        kv_lens_T = np.repeat(kv_lens, np.diff(bounds))
    else:
        kv_lens_T = layout.kv_lens_T(bounds[-1]).numpy(force=True)
    first_keys_T = None if layout.window is None else layout.first_keys_T(bounds[-1]).numpy(force=True)
    hidden_T2 = None if layout.gap_R is None else layout.hidden_2T(bounds[-1]).T.numpy(force=True)
    members = _members(layout, bounds, kv_lens)
    return tuple(_bundle(layout, part, kv_lens_T, first_keys_T, hidden_T2) for part in _parts(members))


@dataclass(frozen=True)
class _Member:
    """A sequence to attend: its first row, tokens [start, stop), the most keys of its queries."""

    row: int
    start: int
    stop: int
    most_keys: int

    @property
    def queries(self) -> int:
        return self.stop - self.start


def _members(layout: RowLayout, bounds: Sequence[int], kv_lens: Sequence[int]) -> Iterator[_Member]:
    """Joins neighbouring rows with the same pages, up to `_MOST_QUERIES` queries; a longer row stays whole."""
    table = layout.page_table_RP.cpu().numpy()
    same_pages = (table[1:] == table[:-1]).all(-1).tolist() if len(kv_lens) > 1 else []
    row, num_rows = 0, len(kv_lens)
    while row < num_rows:
        start, end = bounds[row], row + 1
        while end < num_rows and same_pages[end - 1] and bounds[end + 1] - start <= _MOST_QUERIES:
            end += 1
        if bounds[end] > start:
            yield _Member(row, start, bounds[end], max(kv_lens[row:end]))
        row = end


def _parts(members: Iterator[_Member]) -> Iterator[list[_Member]]:
    """Groups the sequences into bundles: similar key counts, and few enough keys for the processor's cache.

    Sequences with different numbers of queries share a bundle if the padding costs little.
    """
    levels: dict[int, list[_Member]] = {}
    first, *others = members
    if not others:
        yield [first]
        return
    for member in (first, *others):
        level = math.ceil(math.log(max(member.most_keys, _SHORT) / _SHORT, _PADDING))
        levels.setdefault(level, []).append(member)
    for similar in levels.values():
        num_keys = max(m.most_keys for m in similar)
        most = max(1, _MOST_KEYS // num_keys)
        part: list[_Member] = []
        for member in sorted(similar, key=lambda m: m.queries):
            # this member has the most queries so far; the other members are padded to its number
            padded = sum(member.queries - m.queries for m in part) * num_keys
            if part and (len(part) == most or padded > _PADDED_PAIRS):
                yield sorted(part, key=lambda m: m.row)
                part = []
            part.append(member)
        yield sorted(part, key=lambda m: m.row)


def _bundle(
    layout: RowLayout,
    members: Sequence[_Member],
    kv_lens_T: np.ndarray,
    first_keys_T: np.ndarray | None,
    hidden_T2: np.ndarray | None,
) -> Bundle:
    table, device = layout.page_table_RP, layout.page_table_RP.device
    num_keys = max(m.most_keys for m in members)
    num_pages = -(-num_keys // layout.page_size)
    if len(members) == 1:
        (only,) = members
        tokens_GQ = np.arange(only.start, only.stop)[None]
        pages_GP = table[only.row : only.row + 1, :num_pages]
    else:
        starts, stops = np.array([(m.start, m.stop) for m in members]).T[..., None]
        tokens_GQ = np.minimum(starts + np.arange(max(m.queries for m in members)), stops - 1)
        pages_GP = table[torch.tensor([m.row for m in members], device=device), :num_pages]
    return Bundle(
        tokens_GQ=torch.from_numpy(tokens_GQ).to(device),
        pages_GP=pages_GP,
        kv_lens_GQ=kv_lens_T[tokens_GQ],
        first_keys_GQ=None if first_keys_T is None else first_keys_T[tokens_GQ],
        hidden_GQ2=None if hidden_T2 is None or not _hides(hidden_T2[tokens_GQ]) else hidden_T2[tokens_GQ],
        num_keys=num_keys,
        # the sequences of a bundle keep their order
        whole=sum(m.queries for m in members) == len(kv_lens_T) == tokens_GQ.size,
        first_page=_first_adjacent(pages_GP[0].numpy()) if device.type == "cpu" and len(members) == 1 else None,
    )


def _hides(hidden_GQ2: np.ndarray) -> bool:
    return bool((hidden_GQ2[..., 0] < hidden_GQ2[..., 1]).any())


def _first_adjacent(pages_P: np.ndarray) -> int | None:
    """The first page number if the pages are consecutive, else `None`."""
    return int(pages_P[0]) if (pages_P[1:] - pages_P[:-1] == 1).all() else None


def attend_bundles(q_THC: Tensor, k_pages: Tensor, v_pages: Tensor, bundles: tuple[Bundle, ...]) -> Tensor:
    """Attention (T, H, C) of a planned batch, the keys of each sequence gathered once."""
    if len(bundles) == 1 and bundles[0].whole:
        q_GQHC = q_THC.view(*bundles[0].tokens_GQ.shape, *q_THC.shape[1:])
        return _attend_bundle(q_GQHC, k_pages, v_pages, bundles[0]).flatten(0, 1)
    out_THC = torch.empty_like(q_THC)
    for bundle in bundles:
        out_THC[bundle.tokens_GQ] = _attend_bundle(q_THC[bundle.tokens_GQ], k_pages, v_pages, bundle)
    return out_THC


def _attend_bundle(q_GQHC: Tensor, k_pages: Tensor, v_pages: Tensor, bundle: Bundle) -> Tensor:
    """Attention (G, Q, H, C) of one bundle."""
    if bundle.is_long and q_GQHC.dtype in (torch.float32, torch.float64):
        out_QHC = attend_tiles(q_GQHC[0], k_pages, v_pages, bundle)
        if out_QHC is not None:
            return out_QHC[None]
    k_GKLC, v_GKLC = bundle.keys(k_pages, v_pages)
    return attend(q_GQHC, k_GKLC, v_GKLC, bundle.mask(wide_dtype(q_GQHC)))


def _viewed_keys(bundle: Bundle, k_pages: Tensor, v_pages: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Keys and values [start, stop) of one sequence with consecutive pages, (K, stop - start, C), not copied."""
    assert bundle.first_page is not None
    _, size, heads, channels = k_pages.shape
    shape, first = (heads, stop - start, channels), bundle.first_page * size + start

    def view(pages: Tensor) -> Tensor:
        _, position, head, channel = pages.stride()
        return pages.as_strided(shape, (head, position, channel), pages.storage_offset() + first * position)

    return view(k_pages), view(v_pages)


@dataclass
class _QueryTile:
    """Queries of one sequence, stacked over the query heads of a key head, with their sums over keys so far.

    q_KMC      scaled queries: powers of two of their scores are the exponentials of the scores
    kv_lens_M  the number of visible keys of each row; `least` and `most` are its bounds
    """

    q_KMC: Tensor
    kv_lens_M: Tensor
    least: int
    most: int
    sum_KM1: Tensor
    out_KMC: Tensor

    def add(self, k_KLC: Tensor, v_KLC: Tensor, start: int, scores: Tensor) -> None:
        """Attends to the keys from place `start` on, as far as a row sees them; `scores` is memory for their
        scores."""
        num_keys = min(k_KLC.shape[1], self.most - start)
        if num_keys <= 0:
            return
        k_KLC, v_KLC = k_KLC[:, :num_keys], v_KLC[:, :num_keys]
        heads, rows = self.q_KMC.shape[:2]
        weights_KML = scores[: heads * rows * num_keys].view(heads, rows, num_keys)
        torch.bmm(self.q_KMC, k_KLC.transpose(1, 2), out=weights_KML).exp2_()
        if self.least < start + num_keys:
            hidden_ML = torch.arange(start, start + num_keys) >= self.kv_lens_M[:, None]
            weights_KML.masked_fill_(hidden_ML, 0.0)
        self.sum_KM1 += weights_KML.sum(-1, keepdim=True)
        self.out_KMC.baddbmm_(weights_KML, v_KLC)


def attend_tiles(q_QHC: Tensor, k_pages: Tensor, v_pages: Tensor, bundle: Bundle) -> Tensor | None:
    """Attention (Q, H, C) of one sequence, tile by tile of its keys; `None` if scores are too far from 0.

    softmax(s) v = sum(exp(s) v) / sum(exp(s)), without the largest score subtracted from each: `_SAFE_SUM`. Powers of
    two, of scores times log2(e), take torch less time than powers of e.
    """
    tiles = list(_query_tiles(q_QHC, k_pages.shape[2], bundle.kv_lens_GQ[0]))
    page_size = k_pages.shape[1]
    heads, rows = tiles[0].q_KMC.shape[:2]
    pages_each = max(1, _TILE_SCORES // (heads * rows * page_size))
    scores = q_QHC.new_empty(heads * rows * pages_each * page_size)
    for start in range(0, bundle.num_keys, pages_each * page_size):
        stop = min(start + pages_each * page_size, bundle.num_keys)
        if bundle.first_page is None:
            pages_GP = bundle.pages_GP[:, start // page_size : -(-stop // page_size)]
            k_GKLC, v_GKLC = gather_keys(k_pages, v_pages, pages_GP, stop - start)
            k_KLC, v_KLC = k_GKLC[0], v_GKLC[0]
        else:
            k_KLC, v_KLC = _viewed_keys(bundle, k_pages, v_pages, start, stop)
        for tile in tiles:
            tile.add(k_KLC, v_KLC, start, scores)
    sums = torch.cat([tile.sum_KM1.flatten() for tile in tiles])
    least, most = sums.aminmax()
    if not (_SAFE_SUM[0] < float(least) and float(most) < _SAFE_SUM[1]):
        return None
    parts = [(tile.out_KMC / tile.sum_KM1).unflatten(1, (-1, q_QHC.shape[1] // heads)) for tile in tiles]
    return torch.cat([part.transpose(0, 1).flatten(1, 2) for part in parts])


def _query_tiles(q_QHC: Tensor, kv_heads: int, kv_lens_Q: np.ndarray) -> Iterator[_QueryTile]:
    """The queries in tiles of about `_TILE_ROWS` rows; the first tile is the largest."""
    share, scale = q_QHC.shape[1] // kv_heads, q_QHC.shape[2] ** -0.5 * math.log2(math.e)
    size = max(1, _TILE_ROWS // share)
    for start in range(0, len(q_QHC), size):
        part_QHC, lens_Q = q_QHC[start : start + size], kv_lens_Q[start : start + size]
        q_KMC = (part_QHC.unflatten(1, (kv_heads, share)) * scale).permute(1, 0, 2, 3).flatten(1, 2)
        yield _QueryTile(
            q_KMC=q_KMC,
            kv_lens_M=torch.from_numpy(lens_Q.repeat(share)),
            least=int(lens_Q.min()),
            most=int(lens_Q.max()),
            sum_KM1=q_KMC.new_zeros((*q_KMC.shape[:2], 1)),
            out_KMC=torch.zeros_like(q_KMC),
        )
