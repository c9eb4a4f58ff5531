"""The CPU's attention: rows that share a call give what the equation gives, each with its own length."""

from dataclasses import replace

import pytest
import torch
from fake_attention import CHANNELS, HEADS, by_equation, pages, sequences
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mbd_core.ops.attention.cpu import bind, plan_bundles
from mbd_core.ops.attention.definition import RowLayout

row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
batches = st.lists(st.tuples(st.integers(0, 700), row_lengths), min_size=1, max_size=5)


def attend(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout) -> Tensor:
    return bind(layout)(q, k, v)


@settings(max_examples=40)
@given(
    spec=batches,
    page_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 5, 300]),
)
def test_bundles_and_rows_are_the_equation(
    spec: list[tuple[int, list[int]]], page_size: int, seed: int, causal: bool, window: int | None
) -> None:
    q, k, v, layout = sequences(spec, page_size=page_size, seed=seed, causal=causal)
    layout = replace(layout, window=window)
    expected = by_equation(q, k, v, layout)
    torch.testing.assert_close(attend(q, k, v, layout), expected)
    torch.testing.assert_close(attend(q, k, v, replace(layout, exact=True)), expected)


def test_a_rows_own_length_is_respected_whatever_its_neighbours_see() -> None:
    """Neighbours with the same pages share a call, though their lengths neither grow nor agree."""
    k, v = pages(4, 4)
    q = torch.randn(9, HEADS, CHANNELS, dtype=torch.float64)
    layout = RowLayout(
        cu_seqlens_q=torch.tensor([0, 2, 5, 5, 9]),
        kv_lens_R=torch.tensor([9, 1, 3, 12]),
        page_table_RP=torch.tensor([[3, 1, 2]] * 4),
        page_size=4,
    )
    assert len(plan_bundles(layout)) == 1
    for causal_R in (None, torch.tensor([True, False, True, True]), torch.tensor([False, False, False, True])):
        mixed = replace(layout, causal_R=causal_R)
        torch.testing.assert_close(attend(q, k, v, mixed), by_equation(q, k, v, mixed))


def test_long_chunks_are_cut_and_like_sequences_share_a_call() -> None:
    q, k, v, layout = sequences([(0, [64] * 12), (40, [8, 8]), (72, [8, 8])], page_size=16, seed=1)
    bundles = plan_bundles(layout)
    assert [tuple(b.tokens_GQ.shape) for b in bundles] == [(1, 512), (1, 256), (2, 16)]
    torch.testing.assert_close(attend(q, k, v, layout), by_equation(q, k, v, layout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_rows_have_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    spec = [(70, [16, 16]), (333, [16]), (0, [16, 16, 16]), (1030, [5, 16])]
    q, k, v, layout = sequences(spec, page_size=16, seed=3, dtype=dtype)
    together = attend(q, k, v, replace(layout, exact=True))
    bounds = layout.cu_seqlens_q.tolist()
    for row in range(len(bounds) - 1):
        part = slice(bounds[row], bounds[row + 1])
        alone = RowLayout(
            cu_seqlens_q=torch.tensor([0, bounds[row + 1] - bounds[row]]),
            kv_lens_R=layout.kv_lens_R[row : row + 1],
            page_table_RP=layout.page_table_RP[row : row + 1],
            page_size=16,
            exact=True,
        )
        assert torch.equal(attend(q[part], k, v, alone), together[part])
