"""Our paged attention in Triton is the definition, the kernels being interpreted; how a batch is cut for them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton_interpreter import run_interpreted

from mbd_core.ops.attention.definition import RowLayout
from mbd_core.ops.attention.paged_attention import plan, split_attention


def slots(
    prefixes: list[int],
    *,
    num_slots: int,
    size: int,
    page_size: int,
    heads: tuple[int, int],
    channels: int,
    dtype: torch.dtype,
    resident: int | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, RowLayout]:
    """Sequences as a static step lays them out, `resident` slots of each; the values that no row may read are NaN.

    A slot that is not resident sees one key, and a sequence with prefix 0 and no resident slot the null page's first.
    """
    generator = torch.Generator().manual_seed(seed)
    resident = num_slots if resident is None else resident
    width = max(-(-(prefix + num_slots * size) // page_size) for prefix in prefixes) + 1
    num_pages = len(prefixes) * width + 1
    table = (torch.randperm(num_pages - 1, generator=generator) + 1).view(len(prefixes), width)
    k, v = torch.full((2, num_pages, page_size, heads[1], channels), torch.nan, dtype=dtype)
    lens: list[int] = []
    for row, prefix in enumerate(prefixes):
        own = [prefix + size * (slot + 1) if slot < resident else 1 for slot in range(num_slots)]
        lens += own
        at = torch.arange(max(own))
        for pages in (k, v):
            values = torch.randn(len(at), heads[1], channels, generator=generator)
            pages[table[row, at // page_size], at % page_size] = values.to(dtype)
    q = torch.randn(len(lens) * size, heads[0], channels, generator=generator).to(dtype)
    layout = RowLayout(
        cu_seqlens_q=torch.arange(0, len(q) + 1, size, dtype=torch.int32),
        kv_lens_R=torch.tensor(lens),
        page_table_RP=table.repeat_interleave(num_slots, 0),
        page_size=page_size,
        max_q=size,
        rows_each=num_slots,
    )
    return q, k, v, layout


INTERPRETED = """
from dataclasses import replace
import torch
import triton_interpreter
from fake_attention import sequences
from mbd_core.ops.attention import paged_attention as kernels
from mbd_core.ops.attention.definition import paged_attention
from test_attention_triton import slots
triton_interpreter.allow_bfloat16_dots()
kernels._PROGRAMS = 32

def check(q, k, v, layout):
    wanted = paged_attention(q.float(), k.float(), v.float(), layout)
    loose = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[q.dtype]
    out = kernels.split_attention(q, k, v, layout.for_kernels())
    assert out.dtype == q.dtype and out.isfinite().all()
    torch.testing.assert_close(out.float(), wanted, rtol=loose, atol=loose)

SIZES = {"size": 4, "page_size": 8, "heads": (4, 2), "channels": 64, "dtype": torch.float32}
check(*slots([70, 0, 131], num_slots=2, **SIZES))                           # 5 splits, most of them dead for one row
q, k, v, layout = slots([70, 0, 131], num_slots=2, **SIZES)
check(q, k, v, replace(layout, causal_R=torch.tensor([True, False, False, True, True, True])))
q, k, v, layout = slots([40, 7], num_slots=1, **{**SIZES, "size": 3, "heads": (6, 2)})
check(q, k, v, replace(layout, causal_R=torch.tensor([False, True])))
for prefixes in ([70, 9], [3, 131]):                                        # copies behind their positions
    q, k, v, layout = slots(prefixes, num_slots=2, **SIZES)
    layout = replace(layout, causal_R=torch.tensor([True] * 4), gap_R=torch.tensor([0, 4, 0, 4]))
    check(q, k, v, layout)
    check(q, k, v, replace(layout, exact=True))
    check(q, k, v, replace(layout, causal_R=torch.tensor([True, False, True, False])))
    check(q, k, v, replace(layout, causal_R=None))
for window in (1, 9, 40, 500):                                              # few keys, a part of the splits, all
    q, k, v, layout = slots([70, 0, 131], num_slots=1, **{**SIZES, "size": 5})
    check(q, k, v, replace(layout, window=window))
    check(q, k, v, replace(layout, window=window, causal_R=torch.tensor([True, False, True])))
    q, k, v, layout = slots([70, 131], num_slots=2, **SIZES)                # rows of one sequence, each its window
    check(q, k, v, replace(layout, window=window))
    q, k, v, layout = sequences([(50, [7, 7]), (3, [1]), (120, [9, 2, 70])], page_size=16, seed=5, dtype=torch.float32)
    check(q, k, v, replace(layout, window=window))
    check(q, k, v, replace(layout, window=window, exact=True))
check(*slots([40, 3], num_slots=1, **{**SIZES, "channels": 512, "heads": (4, 2)}))
check(*slots([70, 0], num_slots=3, resident=1, **SIZES))                    # slots that see one key
check(*slots([5], num_slots=1, resident=0, **SIZES))                        # a row that sees one key, alone
check(*slots([40], num_slots=2, **{**SIZES, "page_size": 5, "heads": (14, 2), "channels": 80, "size": 3}))
check(*slots([40], num_slots=2, **{**SIZES, "page_size": 1, "heads": (2, 2), "channels": 256}))
kernels._PROGRAMS = 8
check(*slots([3, 9, 1, 66, 2], num_slots=1, **{**SIZES, "size": 1}))        # so many programs that none is split
kernels._PROGRAMS = 32
for dtype in (torch.float16, torch.bfloat16):
    sizes = {**SIZES, "page_size": 32, "heads": (4, 1), "channels": 128, "dtype": dtype}
    check(*slots([100, 9], num_slots=2, **sizes))
kernels._PROGRAMS = 1                                                       # a join is a program a query and head
q, k, v, layout = slots([90], num_slots=4, **{**SIZES, "size": 16, "heads": (16, 4)})
check(q, k, v, layout)                                                      # two tiles of 128 rows
wide = torch.cat((q, q), 1)[:, :16]                                         # a part of a joint projection
torch.testing.assert_close(
    kernels.split_attention(wide, k, v, layout.for_kernels()), kernels.split_attention(q, k, v, layout.for_kernels())
)
q, k, v, layout = sequences([(50, [7, 7]), (3, [1]), (120, [9, 2, 70])], page_size=16, seed=5, dtype=torch.float32)
check(q, k, v, layout)                                                      # rows of all lengths, as prompts have
together = kernels.split_attention(q, k, v, replace(layout, exact=True).for_kernels())
bounds = layout.cu_seqlens_q.tolist()
for row in range(len(bounds) - 1):
    part = slice(bounds[row], bounds[row + 1])
    alone = replace(layout, cu_seqlens_q=torch.tensor([0, part.stop - part.start]), exact=True,
                    kv_lens_R=layout.kv_lens_R[row : row + 1], page_table_RP=layout.page_table_RP[row : row + 1])
    assert torch.equal(kernels.split_attention(q[part], k, v, alone.for_kernels()), together[part])
print("all held")
"""


def test_the_kernels_are_the_definition_under_tritons_interpreter() -> None:
    run_interpreted(INTERPRETED, Path(__file__).parent)


def test_a_cut_depends_on_the_batchs_shape_alone() -> None:
    """LLaDA2-mini: 16 query heads, 4 key heads, blocks of 32. One sequence's four slots are four tiles of 128 rows."""
    mini = {"share": 4, "kv_heads": 4, "head_dim": 128, "exact": False}
    assert plan(sequences=1, queries=32, **mini)[:3] == (1, 16, 128)
    assert plan(sequences=1, queries=128, **mini)[:3] == (4, 8, 128)
    assert plan(sequences=8, queries=64, **mini)[:3] == (2, 2, 128)
    assert plan(sequences=64, queries=32, **mini).splits == 1
    assert {plan(sequences=n, queries=32, **mini).splits for n in range(1, 99)} == {1, 2, 4, 8, 16}
    assert plan(sequences=1, queries=3, **mini).block_m == 16
    assert plan(sequences=1, queries=32, **{**mini, "head_dim": 256})[:3] == (2, 16, 64)
    assert plan(sequences=1, queries=32, **{**mini, "head_dim": 512})[:3] == (4, 8, 32)
    exact = [plan(sequences=n, queries=q, **{**mini, "exact": True}) for n, q in ((1, 3), (64, 32))]
    assert {(cut.splits, cut.block_m, cut.block_n) for cut in exact} == {(1, 64, 64)}


def test_strided_channels_are_refused() -> None:
    sizes = {"num_slots": 1, "size": 4, "page_size": 8, "heads": (4, 2), "channels": 64, "dtype": torch.float32}
    q, k, v, layout = slots([9], **sizes)
    with pytest.raises(ValueError, match="strides"):
        split_attention(q, k.transpose(-1, -2), v, layout.for_kernels())
