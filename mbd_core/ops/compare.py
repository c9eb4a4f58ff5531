"""Rows against prefix-once attention, timed side by side, and the rule that follows from the times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mbd_core.ops.attention import Choice, resolve
from mbd_core.ops.merged import prefix_merged_attention
from mbd_core.ops.timing import best_seconds


@dataclass(frozen=True, kw_only=True)
class AttentionTiming:
    """Seconds of one layer's attention both ways: the slots as rows, and the prefix once with a merge."""

    backend: str
    rows: int
    buffer_size: int
    block_size: int
    prefix: int
    rows_seconds: float
    merged_seconds: float

    @property
    def faster(self) -> str:
        """`"rows"` or `"merged"`."""
        return "merged" if self.merged_seconds < self.rows_seconds else "rows"


@dataclass(frozen=True, kw_only=True)
class MergeRule:
    """From which prefix on (tokens) merging wins, by buffer size; a size that is not named is attended as rows."""

    merge_from: dict[int, int]

    def merges(self, *, prefix: int, buffer_size: int) -> bool:
        """Whether to merge at this prefix. One slot has nothing to merge."""
        threshold = self.merge_from.get(buffer_size)
        return buffer_size > 1 and threshold is not None and prefix >= threshold


def merge_rule(timings: Sequence[AttentionTiming]) -> MergeRule:
    """For every buffer size the smallest measured prefix from which merging won there and at all longer ones."""
    merge_from: dict[int, int] = {}
    for size in {t.buffer_size for t in timings if t.buffer_size > 1}:
        for timing in sorted((t for t in timings if t.buffer_size == size), key=lambda t: -t.prefix):
            if timing.faster == "rows":
                break
            merge_from[size] = timing.prefix
    return MergeRule(merge_from=merge_from)


def compare_attention(
    *,
    prefixes: Sequence[int] = (512, 2048, 8192, 16384),
    buffer_sizes: Sequence[int] = (1, 2, 4),
    rows: int = 1,
    block_size: int = 32,
    num_heads: int = 16,
    num_kv_heads: int = 4,
    head_dim: int = 128,
    page_size: int = 32,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    choice: Choice | None = None,
    repeats: int = 5,
) -> list[AttentionTiming]:
    """Time one layer at every prefix and buffer size on random keys; the best of `repeats`, after one to warm up.

    The default shape is LLaDA2-mini's. `choice` defaults to what `resolve` gives for it; on CUDA the longest row is
    given to the kernels, as a graph would. Raises `ValueError` for a prefix that is no multiple of the block.
    """
    device = device or torch.device("cpu")
    if choice is None:
        choice = resolve(device, dtype, head_dim, page_size, num_heads=num_heads, num_kv_heads=num_kv_heads)
    timings = []
    for prefix in prefixes:
        if prefix % block_size:
            raise ValueError(f"prefix={prefix} is not a multiple of block_size={block_size}")
        for buffer_size in buffer_sizes:
            width = -(-(prefix + buffer_size * block_size) // page_size)
            shape = (rows * width, page_size, num_kv_heads, head_dim)
            generator = torch.Generator(device).manual_seed(prefix + buffer_size)
            k, v = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(2))
            slots = rows * buffer_size
            q = torch.randn(slots * block_size, num_heads, head_dim, generator=generator, device=device, dtype=dtype)
            ends = prefix + block_size * torch.arange(1, buffer_size + 1, device=device)
            table = torch.arange(rows * width, device=device, dtype=torch.int32).view(rows, width)
            layout = {
                "cu_seqlens_q": torch.arange(slots + 1, device=device, dtype=torch.int32) * block_size,
                "kv_lens_R": ends.repeat(rows).int(),
                "page_table_RP": table.repeat_interleave(buffer_size, 0),
            }
            timings.append(
                AttentionTiming(
                    backend=choice.name,
                    rows=rows,
                    buffer_size=buffer_size,
                    block_size=block_size,
                    prefix=prefix,
                    rows_seconds=best_seconds(_rows(choice, q, k, v, layout, block_size), device, repeats),
                    merged_seconds=best_seconds(
                        _merged(choice, q, k, v, layout, block_size, buffer_size), device, repeats
                    ),
                )
            )
    return timings


def _rows(
    choice: Choice, q: Tensor, k: Tensor, v: Tensor, layout: dict[str, Tensor], block_size: int
) -> Callable[[], Tensor]:
    bound = choice.bind(
        cu_seqlens_q=layout["cu_seqlens_q"],
        kv_lens_R=layout["kv_lens_R"],
        page_table_RP=layout["page_table_RP"],
        page_size=k.shape[1],
        max_q=block_size,
    )
    return lambda: bound(q, k, v)


def _merged(
    choice: Choice, q: Tensor, k: Tensor, v: Tensor, layout: dict[str, Tensor], block_size: int, buffer_size: int
) -> Callable[[], Tensor]:
    return lambda: prefix_merged_attention(
        q,
        k,
        v,
        cu_seqlens_q=layout["cu_seqlens_q"],
        kv_lens_R=layout["kv_lens_R"],
        page_table_RP=layout["page_table_RP"],
        rows_per_sequence=buffer_size,
        attend_lse=choice.call_lse,
        max_q=block_size,
    )
