"""Paged attention in plain torch: the definition of correct, and the CPU engine's kernel.

Block-causality needs no mask. A block attends, without order inside itself, to all keys up to its own end; so each
block is one non-causal row with its own key length, the shape that `flash_attn_varlen_func(..., causal=False)` takes.

Two computations of the same thing. `attend_by_rows` takes each row by itself over exactly its keys: the definition,
and bitwise independent of what else is in the batch. `attend_shared` reads the keys of a sequence once for all its
neighbouring rows (the slots of a buffer, the blocks of a prompt chunk) and batches sequences of like length.

Shape legend: T packed query tokens, R rows (one block of one sequence each), P pages a row, S page size, H query
heads, K key/value heads, C head channels; in a bundle G sequences, Q query tokens of each, L keys of each.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.ops.row_layout import RowLayout

# A chunk's blocks see keys of growing number; more queries than this in one call would mostly mask.
_MOST_QUERIES = 512
# Sequences whose key counts differ by less than this share a call; the shorter ones are padded.
_PADDING = 1.25
_SHORT = 256
# Keys gathered for one call: beyond this they leave the cache, which costs more than a call.
_MOST_KEYS = 2048
# Query-key pairs that may be computed for nothing if it saves a call.
_IDLE_PAIRS = 4096
# Masks up to this many numbers are made once a step, larger ones (long prompts) in every layer.
_KEPT_MASK = 2**22


@dataclass(frozen=True)
class Bundle:
    """Sequences attended in one call. `seen_GQL` is None where every query sees all `num_keys` keys.

    A sequence with fewer queries than the others repeats its last.

    whole       `tokens_GQ` are all tokens in their order, so that nothing needs to be picked out
    first_page  where one sequence's pages follow one another, the first: its keys are a view then
    """

    tokens_GQ: Tensor
    pages_GP: Tensor
    seen_GQL: Tensor | None
    num_keys: int
    whole: bool = False
    first_page: int | None = None
    _masks: dict[torch.dtype, Tensor] = field(default_factory=dict, compare=False)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """`seen_GQL` as scores of `dtype` to be added, made once for all layers."""
        if self.seen_GQL is None or self.seen_GQL.numel() > _KEPT_MASK:
            return self.seen_GQL
        if dtype not in self._masks:
            unseen = torch.zeros(self.seen_GQL.shape, dtype=dtype, device=self.seen_GQL.device)
            self._masks[dtype] = unseen.masked_fill_(~self.seen_GQL, -math.inf)
        return self._masks[dtype]


def paged_attention(q_THC: Tensor, k_pages: Tensor, v_pages: Tensor, layout: RowLayout) -> Tensor:
    """Row r's queries attend to the first `kv_lens_R[r]` keys of its pages, all of them, scaled by C^-1/2.

    `q_THC` holds the rows one after another; `k_pages`, `v_pages` are one layer's (pages, S, K, C). Returns (T, H, C).
    """
    return bind(layout)(q_THC, k_pages, v_pages)


def bind(layout: RowLayout) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`paged_attention` of one layout, planned once for all layers."""
    if layout.exact:
        bounds, kv_lens = layout.cu_seqlens_q.tolist(), layout.kv_lens_R.tolist()
        table_RP = layout.page_table_RP
        return lambda q, k, v: attend_by_rows(q, k, v, bounds=bounds, kv_lens=kv_lens, page_table_RP=table_RP)
    bundles = plan_bundles(layout)
    return lambda q, k, v: attend_shared(q, k, v, bundles)


def bind_lse(layout: RowLayout) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The same, and the log-sum-exp of every query's scaled scores, float32 (T, H)."""
    bundles = plan_bundles(layout)
    return lambda q, k, v: attend_shared_lse(q, k, v, bundles)


def attend_by_rows(
    q_THC: Tensor, k_pages: Tensor, v_pages: Tensor, *, bounds: list[int], kv_lens: list[int], page_table_RP: Tensor
) -> Tensor:
    """Each row in a call of its own, its operands freshly laid out: same row, same shapes, same bits."""
    out_THC = torch.empty_like(q_THC)
    size = k_pages.shape[1]
    for row, num_keys in enumerate(kv_lens):
        start, stop = bounds[row], bounds[row + 1]
        if start == stop:
            continue
        pages = page_table_RP[row : row + 1, : -(-num_keys // size)]
        q_GQHC = q_THC[None, start:stop].clone()
        out_THC[start:stop] = _attend(q_GQHC, *_gather(k_pages, v_pages, pages, num_keys), None)[0][0]
    return out_THC


def plan_bundles(layout: RowLayout) -> tuple[Bundle, ...]:
    """Which rows are attended together: a function of the batch's layout, so one plan serves all layers of a step.

    Neighbouring rows with the same pages are one sequence; sequences with as many queries and about as many keys share
    a bundle. Costs one look at the row lengths on the host and Python proportional to rows, not to tokens.
    """
    page_table_RP, page_size = layout.page_table_RP, layout.page_size
    device = page_table_RP.device
    bounds, kv_lens = layout.cu_seqlens_q.tolist(), layout.kv_lens_R.tolist()
    same = (page_table_RP[1:] == page_table_RP[:-1]).all(-1).tolist()
    levels: dict[int, list[_Member]] = {}
    row, num_rows = 0, len(kv_lens)
    while row < num_rows:
        start, stop, least, most = bounds[row], bounds[row + 1], kv_lens[row], kv_lens[row]
        last = row + 1
        while last < num_rows and same[last - 1] and bounds[last + 1] - start <= _MOST_QUERIES:
            stop, least, most = bounds[last + 1], min(least, kv_lens[last]), max(most, kv_lens[last])
            last += 1
        if stop > start:
            level = math.ceil(math.log(max(most, _SHORT) / _SHORT, _PADDING))
            levels.setdefault(level, []).append(_Member(row, start, stop, least, most))
        row = last

    kv_lens_T = np.repeat(kv_lens, np.diff(bounds))
    on_cpu = device.type == "cpu"
    bundles = []
    for members in _in_parts(levels):
        num_keys = max(m.most_keys for m in members)
        queries = max(m.queries for m in members)
        offsets = np.arange(queries)
        at_GQ = np.stack([np.minimum(m.start + offsets, m.stop - 1) for m in members])
        seen_GQL = None
        if min(m.least_keys for m in members) < num_keys:
            seen_GQL = torch.from_numpy(np.arange(num_keys) < kv_lens_T[at_GQ][..., None]).to(device)
        num_pages = -(-num_keys // page_size)
        if len(members) == 1:
            pages_GP = page_table_RP[members[0].row, :num_pages][None]
        else:
            pages_GP = page_table_RP[torch.tensor([m.row for m in members], device=device), :num_pages]
        bundles.append(
            Bundle(
                tokens_GQ=torch.from_numpy(at_GQ).to(device),
                pages_GP=pages_GP,
                seen_GQL=seen_GQL,
                num_keys=num_keys,
                # sequences of one bundle keep their order
                whole=sum(m.queries for m in members) == bounds[-1] == at_GQ.size,
                first_page=_first_of_run(pages_GP[0].tolist()) if on_cpu and len(members) == 1 else None,
            )
        )
    return tuple(bundles)


@dataclass(frozen=True)
class _Member:
    """A sequence to attend: its first row, its tokens, the fewest and the most keys one of its rows sees."""

    row: int
    start: int
    stop: int
    least_keys: int
    most_keys: int

    @property
    def queries(self) -> int:
        return self.stop - self.start


def _in_parts(levels: dict[int, list[_Member]]) -> Iterator[list[_Member]]:
    """The sequences of every bundle: like ones, as many as keep their keys in the cache.

    Those with fewer queries join others if what is computed for nothing is little.
    """
    for members in levels.values():
        num_keys = max(m.most_keys for m in members)
        step = max(1, _MOST_KEYS // num_keys)
        part: list[_Member] = []
        for member in sorted(members, key=lambda m: m.queries):
            # the latest has the most queries
            idle = sum(member.queries - m.queries for m in part) * num_keys
            if part and (len(part) == step or idle > _IDLE_PAIRS):
                yield sorted(part, key=lambda m: m.row)
                part = []
            part.append(member)
        yield sorted(part, key=lambda m: m.row)


def _first_of_run(pages: list[int]) -> int | None:
    """The first of page numbers that follow one another."""
    return pages[0] if pages == list(range(pages[0], pages[0] + len(pages))) else None


def attend_shared(q_THC: Tensor, k_pages: Tensor, v_pages: Tensor, bundles: tuple[Bundle, ...]) -> Tensor:
    """Attention of a planned batch (T, H, C): keys gathered once a sequence."""
    if len(bundles) == 1 and bundles[0].whole:
        bundle = bundles[0]
        k, v = _keys_of(bundle, k_pages, v_pages)
        q_GQHC = q_THC.unflatten(0, tuple(bundle.tokens_GQ.shape))
        return _attend(q_GQHC, k, v, bundle.mask(q_THC.dtype))[0].flatten(0, 1)
    out_THC = torch.empty_like(q_THC)
    for bundle in bundles:
        k, v = _keys_of(bundle, k_pages, v_pages)
        out_THC[bundle.tokens_GQ] = _attend(q_THC[bundle.tokens_GQ], k, v, bundle.mask(q_THC.dtype))[0]
    return out_THC


def attend_shared_lse(
    q_THC: Tensor, k_pages: Tensor, v_pages: Tensor, bundles: tuple[Bundle, ...]
) -> tuple[Tensor, Tensor]:
    """As `attend_shared`, and the log-sum-exp of every query's scaled scores, float32 (T, H)."""
    out_THC = torch.empty_like(q_THC)
    lse_TH = q_THC.new_empty(q_THC.shape[:2], dtype=torch.float32)
    for bundle in bundles:
        k, v = _gather(k_pages, v_pages, bundle.pages_GP, bundle.num_keys)
        out, lse = _attend(q_THC[bundle.tokens_GQ], k, v, bundle.seen_GQL, with_lse=True)
        assert lse is not None
        out_THC[bundle.tokens_GQ], lse_TH[bundle.tokens_GQ] = out, lse
    return out_THC, lse_TH


def _keys_of(bundle: Bundle, k_pages: Tensor, v_pages: Tensor) -> tuple[Tensor, Tensor]:
    """A bundle's keys and values (G, K, L, C)."""
    if bundle.first_page is None:
        return _gather(k_pages, v_pages, bundle.pages_GP, bundle.num_keys)
    start = bundle.first_page * k_pages.shape[1]
    k, v = (pages.flatten(0, 1).narrow(0, start, bundle.num_keys).transpose(0, 1) for pages in (k_pages, v_pages))
    return k[None], v[None]


def _gather(k_pages: Tensor, v_pages: Tensor, pages_GP: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """The first `num_keys` keys and values of each sequence, (G, K, L, C)."""
    k = k_pages[pages_GP].flatten(1, 2)[:, :num_keys]
    v = v_pages[pages_GP].flatten(1, 2)[:, :num_keys]
    return k.transpose(1, 2), v.transpose(1, 2)


def _attend(
    q_GQHC: Tensor, k_GKLC: Tensor, v_GKLC: Tensor, mask_GQL: Tensor | None, *, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention (G, Q, H, C) and, on request, its log-sum-exp (G, Q, H). Keys are never repeated.

    The CPU's kernel finds a query head's key head itself. For others the query heads of one key head are stacked along
    the queries, which have no order.
    """
    groups, queries, heads, channels = q_GQHC.shape
    if q_GQHC.device.type == "cpu" and not with_lse:
        mask = None if mask_GQL is None else mask_GQL[:, None]
        q = q_GQHC.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k_GKLC, v_GKLC, attn_mask=mask, enable_gqa=True).transpose(1, 2), None
    kv_heads = k_GKLC.shape[1]
    share = heads // kv_heads
    q = q_GQHC.unflatten(2, (kv_heads, share)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = None if mask_GQL is None else torch.cat([mask_GQL] * share, dim=1)[:, None]
    lse = None
    if with_lse:
        out, lse = _attend_lse(q, k_GKLC, v_GKLC, mask)
        lse = lse.unflatten(2, (share, queries)).permute(0, 3, 1, 2).flatten(2)
    else:
        out = F.scaled_dot_product_attention(q, k_GKLC, v_GKLC, attn_mask=mask)
    out = out.unflatten(2, (share, queries)).permute(0, 3, 1, 2, 4).reshape(groups, queries, heads, channels)
    return out, lse


def _attend_lse(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp where `seen` (None: everywhere); the CPU's flash kernel gives both."""
    if q.device.type == "cpu":
        bias = None if seen is None else torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -math.inf)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)
        return out, lse.float()
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse
