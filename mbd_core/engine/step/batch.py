"""The inputs of one forward, and how rows from prompts, slots and canvases are packed for it.

A row is a run of neighbouring positions of one sequence. It attends to the sequence's keys up to some length, with or
without causal order inside itself. All methods pack their rows so, and the kernels need nothing else.

Shape legend: K rows, T packed tokens, P pages a row, A positions asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.models.gemma import Denoising


@dataclass(frozen=True, kw_only=True)
class BatchRows:
    """Some rows of a forward.

    lengths_K    tokens of each row; a single number if all rows are equally long
    kv_lens_K    keys each row attends to, its own included
    causal_K     whether each of its tokens sees one key less than the token after it; `None`: no row is causal
    gap_K        how many places past its positions each row's keys lie (`RowLayout.gap_R`); `None`: all lie at their
                 positions
    pages_KP     the pages of its sequence, padded with the null page
    stored_K     whether its keys are stored in its pages; otherwise they go to the null page
    weight_T     DMax's embedding weights; `None`: all tokens are hard
    denoising    which tokens of the rows are being denoised; `None`: no token is
    adapter_K    the slot of each row's LoRA adapter, 0 for none; `None`: no row of the forward has an adapter
    rows_each    number of neighbouring rows of each sequence, the same all through the group
    live_K       whether anything of the row is read afterwards; `None`: all rows are
    logits_at_A  packed tokens of the whole forward whose hidden states give logits; -1 - r stands for the hidden
                 state that the runner remembers for batch row r
    """

    tokens_T: Tensor
    positions_T: Tensor
    lengths_K: list[int] | int
    kv_lens_K: Tensor
    pages_KP: Tensor
    stored_K: Tensor
    logits_at_A: Tensor
    causal_K: Tensor | None = None
    gap_K: Tensor | None = None
    weight_T: Tensor | None = None
    denoising: Denoising | None = None
    adapter_K: Tensor | None = None
    rows_each: int = 1
    live_K: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One forward. `write_loc_T` points into the null page for tokens that are not stored.

    logits_at_A  packed tokens whose hidden states give logits, `None`: all in their order; T + r stands for the hidden
                 state that the runner remembers for row r (models whose logits predict the next position)
    adapter_T    the slot of each token's LoRA adapter; `None`: no token has an adapter
    causal_K     which rows are causal inside; `None`: none is
    gap_K        the gap of each row (`BatchRows`); `None`: none has one
    split        the rows' lengths if each row is to be computed apart (batch-invariant)
    rows_each    number of neighbouring rows of each sequence, the same all through the batch; they are equally long
    live_T       whether anything of the token is read afterwards; `None`: all tokens are
    denoising    which tokens are being denoised; `None`: none is
    """

    input_ids_T: Tensor
    positions_T: Tensor
    cu_seqlens_q: Tensor
    kv_lens_K: Tensor
    pages_KP: Tensor
    write_loc_T: Tensor
    logits_at_A: Tensor | None
    weight_T: Tensor | None
    max_q: int
    causal_K: Tensor | None = None
    gap_K: Tensor | None = None
    adapter_T: Tensor | None = None
    split: list[int] | None = None
    rows_each: int = 1
    live_T: Tensor | None = None
    denoising: Denoising | None = None

    @property
    def num_logits(self) -> int:
        return len(self.input_ids_T if self.logits_at_A is None else self.logits_at_A)


def to_device(values: Sequence[object], device: torch.device) -> Tensor:
    """Integers of the host as an int64 tensor on `device`; the host does not wait for the copy."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def pack(groups: Sequence[BatchRows], *, page_size: int, batch_invariant: bool = False) -> Batch:
    """Puts groups of rows one after another. There must be at least one row.

    A batch-invariant batch computes each row apart, and each token of a causal row apart: the numbers then do not
    depend on where rows end.
    """
    groups = [g for g in groups if len(g.kv_lens_K)]
    if batch_invariant:
        groups = [_token_by_token(g) for g in groups]
    width = max(g.pages_KP.shape[1] for g in groups)
    pages_KP = _concat([F.pad(g.pages_KP, (0, width - g.pages_KP.shape[1])) for g in groups])
    positions_T = _concat([g.positions_T for g in groups])
    num_rows, num_tokens, device = len(pages_KP), len(positions_T), positions_T.device
    lengths = {g.lengths_K if isinstance(g.lengths_K, int) else -1 for g in groups}
    if len(lengths) == 1 and -1 not in lengths:
        max_q = lengths.pop()
        bounds = torch.arange(0, num_rows * max_q + 1, max_q, device=device)
        row_T = torch.arange(num_rows, device=device).repeat_interleave(max_q)
    else:
        row_lengths = _lengths(groups)
        max_q, lengths_K = max(row_lengths), to_device(row_lengths, device)
        bounds = F.pad(lengths_K.cumsum(0), (1, 0))
        row_T = torch.arange(num_rows, device=device).repeat_interleave(lengths_K, output_size=num_tokens)
    gap_K = _gaps(groups)
    places_T = positions_T if gap_K is None else positions_T + gap_K[row_T]
    page_T = pages_KP.flatten()[row_T * width + (places_T // page_size).clamp(max=width - 1)]
    stored_T = _concat([g.stored_K for g in groups])[row_T]
    logits_at_A = _concat([g.logits_at_A for g in groups])
    live_K = None if len(groups) > 1 else groups[0].live_K
    return Batch(
        input_ids_T=_concat([g.tokens_T for g in groups]),
        positions_T=positions_T,
        cu_seqlens_q=bounds.int(),
        kv_lens_K=_concat([g.kv_lens_K for g in groups]),
        pages_KP=pages_KP,
        write_loc_T=torch.where(stored_T, page_T * page_size, 0) + places_T % page_size,
        logits_at_A=torch.where(logits_at_A < 0, num_tokens - 1 - logits_at_A, logits_at_A),
        weight_T=_weights(groups),
        max_q=max_q,
        causal_K=_causal(groups),
        gap_K=gap_K,
        adapter_T=_adapters(groups, row_T),
        split=_lengths(groups) if batch_invariant else None,
        rows_each=groups[0].rows_each if len(groups) == 1 else 1,
        live_T=None if live_K is None else live_K[row_T],
        denoising=_denoising(groups),
    )


def _concat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _lengths(groups: Sequence[BatchRows]) -> list[int]:
    lengths: list[int] = []
    for g in groups:
        lengths += [g.lengths_K] * len(g.kv_lens_K) if isinstance(g.lengths_K, int) else g.lengths_K
    return lengths


def _causal(groups: Sequence[BatchRows]) -> Tensor | None:
    if all(g.causal_K is None for g in groups):
        return None
    return torch.cat([torch.zeros_like(g.stored_K) if g.causal_K is None else g.causal_K for g in groups])


def _gaps(groups: Sequence[BatchRows]) -> Tensor | None:
    if all(g.gap_K is None for g in groups):
        return None
    return torch.cat([torch.zeros_like(g.kv_lens_K) if g.gap_K is None else g.gap_K for g in groups])


def _token_by_token(rows: BatchRows) -> BatchRows:
    """The same forward with one row per token of each causal row."""
    if rows.causal_K is None:
        return rows
    device = rows.tokens_T.device
    lengths, parts, num_later = _lengths([rows]), [], []
    for length, causal in zip(lengths, rows.causal_K.tolist(), strict=True):
        parts.append([1] * length if causal else [length])
        num_later += [length - 1 - i if causal else 0 for i in range(len(parts[-1]))]
    row_K = torch.arange(len(parts), device=device).repeat_interleave(to_device([len(p) for p in parts], device))
    return replace(
        rows,
        lengths_K=[n for part in parts for n in part],
        kv_lens_K=rows.kv_lens_K[row_K] - to_device(num_later, device),
        pages_KP=rows.pages_KP[row_K],
        stored_K=rows.stored_K[row_K],
        causal_K=None,
        gap_K=None if rows.gap_K is None else rows.gap_K[row_K],
        adapter_K=None if rows.adapter_K is None else rows.adapter_K[row_K],
        rows_each=1,
        live_K=None if rows.live_K is None else rows.live_K[row_K],
    )


def _adapters(groups: Sequence[BatchRows], row_T: Tensor) -> Tensor | None:
    slots = [g.adapter_K for g in groups if g.adapter_K is not None]
    assert len(slots) in (0, len(groups)), "adapters are laid out for all rows of a forward, or for none"
    return _concat(slots)[row_T] if slots else None


def _weights(groups: Sequence[BatchRows]) -> Tensor | None:
    if all(g.weight_T is None for g in groups):
        return None
    return _concat(
        [torch.ones_like(g.tokens_T, dtype=torch.float32) if g.weight_T is None else g.weight_T for g in groups]
    )


def _denoising(groups: Sequence[BatchRows]) -> Denoising | None:
    """Which tokens of the forward are being denoised; `None`: none is."""
    given = next((g.denoising for g in groups if g.denoising is not None), None)
    if given is None:
        return None
    at, expected = [], []
    for g in groups:
        part = g.denoising
        at.append(torch.zeros_like(g.tokens_T, dtype=torch.bool) if part is None else part.at)
        zeros = given.expected.new_zeros((len(g.tokens_T), given.expected.shape[1])) if part is None else part.expected
        expected.append(zeros)
    return Denoising(_concat(at), _concat(expected))
