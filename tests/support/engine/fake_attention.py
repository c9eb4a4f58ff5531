"""Paged rows at random, the equation they must satisfy, and stand-ins for the flash-attention packages."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mbd_core.ops.attention.definition import RowLayout

HEADS, KV_HEADS, CHANNELS = 4, 2, 8


def pages(count: int, size: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, count, size, KV_HEADS, CHANNELS, generator=generator, dtype=dtype)
    return k, v


def by_equation(q: Tensor, k_pages: Tensor, v_pages: Tensor, layout: RowLayout) -> Tensor:
    """Softmax over each row's keys, in plain products; a causal row is as many rows of one query."""
    out = torch.empty_like(q)
    layout = one_query_a_causal_row(layout)
    bounds = layout.cu_seqlens_q.tolist()
    for r, n in enumerate(layout.kv_lens_R.tolist()):
        first = 0 if layout.window is None else max(0, n - (bounds[r + 1] - bounds[r]) - layout.window + 1)
        k = k_pages[layout.page_table_RP[r]].flatten(0, 1)[first:n].repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v_pages[layout.page_table_RP[r]].flatten(0, 1)[first:n].repeat_interleave(HEADS // KV_HEADS, dim=1)
        part = slice(bounds[r], bounds[r + 1])
        scores = torch.einsum("qhc,khc->hqk", q[part], k) / math.sqrt(CHANNELS)
        out[part] = torch.einsum("hqk,khc->qhc", scores.softmax(-1), v)
    return out


def one_query_a_causal_row(layout: RowLayout) -> RowLayout:
    """The same attention without causal rows: each is cut into rows of one query."""
    if layout.causal_R is None:
        return layout
    lengths, keys, rows = [], [], []
    sizes, kv_lens = layout.cu_seqlens_q.diff().tolist(), layout.kv_lens_R.tolist()
    for row, (size, num_keys, causal) in enumerate(zip(sizes, kv_lens, layout.causal_R.tolist(), strict=True)):
        parts = range(num_keys - size + 1, num_keys + 1) if causal else [num_keys]
        keys += parts
        lengths += [1] * size if causal else [size]
        rows += [row] * len(parts)
    return RowLayout(
        cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int(),
        kv_lens_R=torch.tensor(keys),
        page_table_RP=layout.page_table_RP[rows],
        page_size=layout.page_size,
        window=layout.window,
    )


def sequences(
    spec: list[tuple[int, list[int]]],
    *,
    page_size: int,
    seed: int,
    dtype: torch.dtype = torch.float64,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor, RowLayout]:
    """Sequences as (prefix, lengths of the rows after it); a row sees everything up to its own end. With `causal`
    every other row at random is."""
    width = max(-(-(prefix + sum(lengths)) // page_size) for prefix, lengths in spec)
    generator = torch.Generator().manual_seed(seed)
    num_pages = len(spec) * width + 1
    table = torch.randperm(num_pages, generator=generator)[: len(spec) * width].view(len(spec), width)
    rows, kv_lens, lengths = [], [], []
    for i, (prefix, sizes) in enumerate(spec):
        for n, size in enumerate(sizes):
            rows.append(i)
            lengths.append(size)
            kv_lens.append(prefix + sum(sizes[: n + 1]))
    q = torch.randn(sum(lengths), HEADS, CHANNELS, generator=generator, dtype=dtype)
    layout = RowLayout(
        cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int(),
        kv_lens_R=torch.tensor(kv_lens),
        page_table_RP=table[rows],
        page_size=page_size,
        causal_R=torch.rand(len(rows), generator=generator) < 0.5 if causal else None,
    )
    return q, *pages(num_pages, page_size, seed=seed, dtype=dtype), layout


def gather_back(k_pages: Tensor, table: Tensor | None, starts: Tensor | None, lengths: Tensor) -> list[Tensor]:
    """Each row's keys from pages and a table, or from a packed tensor and where each row begins."""
    if table is not None:
        size = k_pages.shape[1]
        return [
            k_pages[row[: -(-n // size)]].flatten(0, 1)[:n]
            for row, n in zip(table.long(), lengths.tolist(), strict=True)
        ]
    assert starts is not None
    return [k_pages[s : s + n] for s, n in zip(starts.tolist(), lengths.tolist(), strict=False)]


class FakePackages:
    """Importable stand-ins that check the arguments they get and compute the equation from them alone."""

    def __init__(self, *missing: str) -> None:
        self.missing, self.calls, self.activated = missing, [], []

    def attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor], bounds: Tensor, *, causal: bool) -> Tensor:
        """With `causal` the last query of a row sees all keys, and the queries before all its keys give zeros."""
        assert bounds.dtype == torch.int32
        out = torch.empty_like(q)
        ends = bounds.tolist()
        for r, (k, v) in enumerate(zip(keys, values, strict=True)):
            part = slice(ends[r], ends[r + 1])
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            scores = torch.einsum("qhc,khc->hqk", q[part], k) / math.sqrt(q.shape[-1])
            if causal:
                seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
                scores = scores.masked_fill(~seen, -math.inf)
            out[part] = torch.einsum("hqk,khc->qhc", scores.softmax(-1).nan_to_num(0.0), v)
        return out

    def varlen_attn(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Any = None,
        block_table: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """torch 2.13's."""
        assert return_aux is None and enable_gqa and seqused_k.dtype == torch.int32
        assert (cu_seq_k is None) != (block_table is None)
        self.calls.append({"max_q": max_q, "max_k": max_k, "exact": num_splits == 1})
        assert window_size in ((-1, -1), (-1, 0))
        keys, values = (gather_back(x, block_table, cu_seq_k, seqused_k) for x in (key, value))
        return self.attend(query, keys, values, cu_seq_q, causal=window_size == (-1, 0))

    def vllm(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: None = None,
        seqused_k: Any = None,
        q_v: None = None,
        dropout_p: float = 0.0,
        softmax_scale: None = None,
        causal: bool = False,
        window_size: None = None,
        softcap: float = 0.0,
        alibi_slopes: None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Any = None,
        return_softmax_lse: bool = False,
        out: None = None,
        scheduler_metadata: None = None,
        q_descale: None = None,
        k_descale: None = None,
        v_descale: None = None,
        num_splits: int = 0,
        output_scale: None = None,
        fa_version: int = 2,
    ) -> Tensor:
        assert not return_softmax_lse and block_table.dtype == seqused_k.dtype == torch.int32
        assert num_splits in (0, 1) and k.shape[1] % 16 == 0 and block_table.is_contiguous()
        self.calls.append({"max_q": max_seqlen_q, "max_k": max_seqlen_k, "exact": num_splits == 1, "fa": fa_version})
        keys, values = (gather_back(x, block_table, None, seqused_k) for x in (k, v))
        return self.attend(q, keys, values, cu_seqlens_q, causal=causal)

    def flash_2(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Any = None,
    ) -> Tensor:
        assert not return_attn_probs and cu_seqlens_k.dtype == block_table.dtype == torch.int32
        self.calls.append({"max_q": max_seqlen_q, "max_k": max_seqlen_k, "exact": True})
        keys, values = (gather_back(x, block_table, None, cu_seqlens_k.diff()) for x in (k, v))
        return self.attend(q, keys, values, cu_seqlens_q, causal=causal)

    def flash_3(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: None = None,
        v: None = None,
        qv: None = None,
        rotary_cos: None = None,
        rotary_sin: None = None,
        cache_seqlens: Any = None,
        cache_batch_idx: None = None,
        cache_leftpad: None = None,
        page_table: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k_new: None = None,
        max_seqlen_q: Any = None,
        rotary_seqlens: None = None,
        q_descale: None = None,
        k_descale: None = None,
        v_descale: None = None,
        softmax_scale: None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: None = None,
        num_splits: int = 0,
        pack_gqa: None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        assert not return_softmax_lse and page_table.dtype == cache_seqlens.dtype == torch.int32
        # it knows the longest row's keys from the table alone
        max_k = page_table.shape[1] * k_cache.shape[1]
        self.calls.append({"max_q": max_seqlen_q, "max_k": max_k, "exact": num_splits == 1})
        keys, values = (gather_back(x, page_table, None, cache_seqlens) for x in (k_cache, v_cache))
        return self.attend(q, keys, values, cu_seqlens_q, causal=causal)

    def get_kernel(
        self, repo_id: str, revision: str | None = None, version: int | str | None = None
    ) -> SimpleNamespace:
        """From 0.15 on a version or a revision must be named."""
        assert repo_id.startswith("kernels-community/") and (revision is None) != (version is None)
        return SimpleNamespace(flash_attn_with_kvcache=self.flash_3)

    def __call__(self, name: str) -> Any:
        modules = {
            "vllm.vllm_flash_attn": {"flash_attn_varlen_func": self.vllm},
            "vllm.vllm_flash_attn.flash_attn_interface": {"is_fa_version_supported": lambda version: version == 3},
            "torch.nn.attention.varlen": {"varlen_attn": self.varlen_attn},
            "torch.nn.attention": {"activate_flash_attention_impl": self.activated.append},
            "flash_attn_interface": {},
            "flash_attn": {"flash_attn_varlen_func": self.flash_2},
            "kernels": {"get_kernel": self.get_kernel},
            "triton": {},
        }
        if name in self.missing or name not in modules:
            raise ImportError(f"no module named {name}")
        return SimpleNamespace(**modules[name])
