"""The CPU engine's attention: a sequence's keys are read once for all its rows; similar sequences share one call.

It computes `definition.paged_attention`. Neighbouring rows of one sequence (the slots of a buffer, the
blocks of a prompt chunk) become one call with a mask; sequences with about as many keys are bundled into one call.

Shape legend: T packed query tokens, R rows (one block of one sequence each), P pages a row, S page size, H query
heads, K key/value heads, C head channels; in a bundle G sequences, Q query tokens of each, L keys of each.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mbd_core.ops.attention.definition import BoundAttention, RowLayout, attend, bind_rows, gather_keys

# The blocks of a prompt chunk see more and more keys; a call with more queries than this would mostly compute masked
# pairs.
_MOST_QUERIES = 512
# Sequences whose key counts differ by less than this factor share a call; the shorter ones are padded.
_PADDING = 1.25
# Sequences with at most this many keys count as equally long.
_SHORT = 256
# Keys gathered for one call. A larger number exceeds the processor's cache, which costs more than another call.
_MOST_KEYS = 2048
# A call may compute this many padded query-key pairs: they cost less than another call.
_PADDED_PAIRS = 4096
# Masks of up to this many numbers are made once a step, larger ones (long prompts) once a layer.
_KEPT_MASK = 2**22


@dataclass(frozen=True)
class Bundle:
    """Sequences attended in one call. `visible_GQL` is None where every query sees all `num_keys` keys.

    A sequence with fewer queries than the others repeats its last query.

    whole       the bundle holds all tokens of the batch in their order, so that no queries are gathered
    first_page  set if the bundle is one sequence whose pages are consecutive: its keys are a view that begins here
    """

    tokens_GQ: Tensor
    pages_GP: Tensor
    visible_GQL: Tensor | None
    num_keys: int
    whole: bool = False
    first_page: int | None = None
    _masks: dict[torch.dtype, Tensor] = field(default_factory=dict, compare=False)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """`visible_GQL` as numbers of `dtype` to be added to the scores, made once for all layers."""
        if self.visible_GQL is None or self.visible_GQL.numel() > _KEPT_MASK:
            return self.visible_GQL
        if dtype not in self._masks:
            scores = torch.zeros(self.visible_GQL.shape, dtype=dtype, device=self.visible_GQL.device)
            self._masks[dtype] = scores.masked_fill_(~self.visible_GQL, -math.inf)
        return self._masks[dtype]


def bind(layout: RowLayout) -> BoundAttention:
    """`paged_attention` of one layout, planned once for all layers; with `layout.exact`, one call a row."""
    if layout.exact:
        return bind_rows(layout)
    bundles = plan_bundles(layout)
    return lambda q, k, v: attend_bundles(q, k, v, bundles)


def plan_bundles(layout: RowLayout) -> tuple[Bundle, ...]:
    """The bundles of a batch. They depend on its layout alone, so one plan serves all layers of a step.

    Neighbouring rows with the same pages are one sequence; sequences with as many queries and about as many keys share
    a bundle. The row lengths are read once on the host; the Python work grows with the rows, not with the tokens.
    """
    bounds, kv_lens = layout.cu_seqlens_q.tolist(), layout.kv_lens_R.tolist()
    if layout.causal_R is None:
        kv_lens_T = np.repeat(kv_lens, np.diff(bounds))
    else:
        kv_lens_T = layout.kv_lens_T(bounds[-1]).numpy(force=True)
    first_keys_T = None if layout.window is None else layout.first_keys_T(bounds[-1]).numpy(force=True)
    members = _members(layout, bounds, kv_lens, kv_lens_T)
    return tuple(_bundle(layout, part, kv_lens_T, first_keys_T) for part in _parts(members))


@dataclass(frozen=True)
class _Member:
    """A sequence to attend: its first row, tokens [start, stop), the least and the most keys of its queries."""

    row: int
    start: int
    stop: int
    least_keys: int
    most_keys: int

    @property
    def queries(self) -> int:
        return self.stop - self.start


def _members(
    layout: RowLayout, bounds: Sequence[int], kv_lens: Sequence[int], kv_lens_T: np.ndarray
) -> Iterator[_Member]:
    """Join neighbouring rows with the same pages, up to `_MOST_QUERIES` queries; a longer row stays whole."""
    table = layout.page_table_RP
    same_pages = (table[1:] == table[:-1]).all(-1).tolist() if len(kv_lens) > 1 else []
    row, num_rows = 0, len(kv_lens)
    while row < num_rows:
        start, end = bounds[row], row + 1
        while end < num_rows and same_pages[end - 1] and bounds[end + 1] - start <= _MOST_QUERIES:
            end += 1
        if bounds[end] > start:
            least = int(kv_lens_T[start : bounds[end]].min())
            yield _Member(row, start, bounds[end], least, max(kv_lens[row:end]))
        row = end


def _parts(members: Iterator[_Member]) -> Iterator[list[_Member]]:
    """Group the sequences into bundles: similar key counts, and few enough keys for the processor's cache.

    Sequences with different numbers of queries share a bundle if little is computed for padding.
    """
    levels: dict[int, list[_Member]] = {}
    for member in members:
        level = math.ceil(math.log(max(member.most_keys, _SHORT) / _SHORT, _PADDING))
        levels.setdefault(level, []).append(member)
    for similar in levels.values():
        num_keys = max(m.most_keys for m in similar)
        most = max(1, _MOST_KEYS // num_keys)
        part: list[_Member] = []
        for member in sorted(similar, key=lambda m: m.queries):
            # this member has the most queries so far; the others are padded to them
            padded = sum(member.queries - m.queries for m in part) * num_keys
            if part and (len(part) == most or padded > _PADDED_PAIRS):
                yield sorted(part, key=lambda m: m.row)
                part = []
            part.append(member)
        yield sorted(part, key=lambda m: m.row)


def _bundle(
    layout: RowLayout, members: Sequence[_Member], kv_lens_T: np.ndarray, first_keys_T: np.ndarray | None
) -> Bundle:
    table, device = layout.page_table_RP, layout.page_table_RP.device
    num_keys = max(m.most_keys for m in members)
    starts, stops = np.array([(m.start, m.stop) for m in members]).T[..., None]
    tokens_GQ = np.minimum(starts + np.arange(max(m.queries for m in members)), stops - 1)
    visible_GQL, keys_L = None, np.arange(num_keys)
    if min(m.least_keys for m in members) < num_keys or first_keys_T is not None:
        visible = keys_L < kv_lens_T[tokens_GQ][..., None]
        if first_keys_T is not None:
            visible &= keys_L >= first_keys_T[tokens_GQ][..., None]
        visible_GQL = None if visible.all() else torch.from_numpy(visible).to(device)
    num_pages = -(-num_keys // layout.page_size)
    if len(members) == 1:
        pages_GP = table[members[0].row, :num_pages][None]
    else:
        pages_GP = table[torch.tensor([m.row for m in members], device=device), :num_pages]
    return Bundle(
        tokens_GQ=torch.from_numpy(tokens_GQ).to(device),
        pages_GP=pages_GP,
        visible_GQL=visible_GQL,
        num_keys=num_keys,
        # the sequences of a bundle keep their order
        whole=sum(m.queries for m in members) == len(kv_lens_T) == tokens_GQ.size,
        first_page=_first_adjacent(pages_GP[0].tolist()) if device.type == "cpu" and len(members) == 1 else None,
    )


def _first_adjacent(pages: list[int]) -> int | None:
    """The first page number if the pages are consecutive, else `None`."""
    return pages[0] if pages == list(range(pages[0], pages[0] + len(pages))) else None


def attend_bundles(q_THC: Tensor, k_pages: Tensor, v_pages: Tensor, bundles: tuple[Bundle, ...]) -> Tensor:
    """Attention (T, H, C) of a planned batch, the keys of each sequence gathered once."""
    if len(bundles) == 1 and bundles[0].whole:
        bundle = bundles[0]
        k_GKLC, v_GKLC = _keys(bundle, k_pages, v_pages)
        q_GQHC = q_THC.unflatten(0, tuple(bundle.tokens_GQ.shape))
        return attend(q_GQHC, k_GKLC, v_GKLC, bundle.mask(q_THC.dtype)).flatten(0, 1)
    out_THC = torch.empty_like(q_THC)
    for bundle in bundles:
        k_GKLC, v_GKLC = _keys(bundle, k_pages, v_pages)
        out_THC[bundle.tokens_GQ] = attend(q_THC[bundle.tokens_GQ], k_GKLC, v_GKLC, bundle.mask(q_THC.dtype))
    return out_THC


def _keys(bundle: Bundle, k_pages: Tensor, v_pages: Tensor) -> tuple[Tensor, Tensor]:
    """A bundle's keys and values (G, K, L, C)."""
    if bundle.first_page is None:
        return gather_keys(k_pages, v_pages, bundle.pages_GP, bundle.num_keys)
    start = bundle.first_page * k_pages.shape[1]
    k, v = (pages.flatten(0, 1).narrow(0, start, bundle.num_keys).transpose(0, 1) for pages in (k_pages, v_pages))
    return k[None], v[None]
