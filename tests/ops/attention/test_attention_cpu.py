"""The CPU's attention: rows that share a call give what the equation gives, each with its own length."""

from dataclasses import replace

import pytest
import torch
from fake_attention import CHANNELS, HEADS, by_equation, pages, sequences
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mbd_core.ops.attention import cpu
from mbd_core.ops.attention.cpu import attend_tiles, bind, plan_bundles
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


@settings(max_examples=20)
@given(
    prefix=st.integers(0, 60),
    size=st.integers(1, 7),
    gap=st.integers(7, 12),
    seed=st.integers(0, 99),
    causal=st.booleans(),
)
def test_a_copy_behind_its_positions_sees_what_stands_before_them_and_itself(
    prefix: int, size: int, gap: int, seed: int, causal: bool
) -> None:
    """Beside the row that it copies, and another sequence: each of its tokens is a softmax over chosen keys. Without
    order its tokens also see each other, and stand at one position and those behind it."""
    first, last = prefix + size, prefix + gap + size
    k, v = pages(24, 4, seed=seed)
    q = torch.randn(2 * size + 3, HEADS, CHANNELS, dtype=torch.float64)
    layout = RowLayout(
        cu_seqlens_q=torch.tensor([0, size, 2 * size, 2 * size + 3]),
        kv_lens_R=torch.tensor([first, last, 9]),
        page_table_RP=torch.stack([torch.arange(20), torch.arange(20), torch.arange(20).flip(0)]),
        page_size=4,
        causal_R=torch.tensor([True, causal, False]),
        gap_R=torch.tensor([0, gap, 0]),
    )
    expected = by_equation(q, k, v, replace(layout, gap_R=None))
    keys, values = (x.flatten(0, 1).repeat_interleave(2, dim=1) for x in (k, v))
    for i in range(size):
        alone = [*range(prefix + i), prefix + gap + i]
        at = torch.tensor(alone if causal else [*range(prefix), *range(prefix + gap, last)])
        scores = torch.einsum("hc,khc->hk", q[size + i], keys[at]) / CHANNELS**0.5
        expected[size + i] = torch.einsum("hk,khc->hc", scores.softmax(-1), values[at])
    torch.testing.assert_close(attend(q, k, v, layout), expected)
    torch.testing.assert_close(attend(q, k, v, replace(layout, exact=True)), expected)


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


def test_bfloat16_is_attended_in_float32_and_rounded_once() -> None:
    spec = [(70, [1]), (333, [16, 16]), (700, [5, 16])]
    q, k, v, layout = sequences(spec, page_size=16, seed=5, dtype=torch.bfloat16)
    for exact in (False, True):
        wide = attend(q.float(), k.float(), v.float(), replace(layout, exact=exact))
        assert torch.equal(attend(q, k, v, replace(layout, exact=exact)), wide.bfloat16())


def in_place(layout: RowLayout) -> RowLayout:
    """The same layout of one sequence whose pages are consecutive."""
    width = layout.page_table_RP.shape[1]
    return replace(layout, page_table_RP=torch.arange(width).expand(len(layout.kv_lens_R), width))


@settings(max_examples=12, deadline=None)
@given(
    prefix=st.integers(1600, 2000),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    causal=st.booleans(),
    adjacent=st.booleans(),
)
def test_long_sequences_in_tiles_are_the_equation(
    prefix: int, lengths: list[int], seed: int, causal: bool, adjacent: bool
) -> None:
    q, k, v, layout = sequences([(prefix, lengths)], page_size=16, seed=seed, causal=causal)
    layout = in_place(layout) if adjacent else layout
    (bundle,) = plan_bundles(layout)
    assert bundle.is_long and (bundle.first_page is not None) == adjacent
    expected = by_equation(q, k, v, layout)
    torch.testing.assert_close(attend_tiles(q, k, v, bundle), expected)
    torch.testing.assert_close(attend(q.float(), k.float(), v.float(), layout), expected.float(), rtol=1e-4, atol=1e-5)


def test_a_long_sequences_keys_are_gathered_once_for_all_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, layout = sequences([(2000, [16] * 8), (9, [16])], page_size=16, seed=4)
    gathered: list[int] = []

    def count(k_pages: Tensor, v_pages: Tensor, pages_GP: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
        gathered.append(num_keys)
        return cpu_gather(k_pages, v_pages, pages_GP, num_keys)

    cpu_gather = cpu.gather_keys
    monkeypatch.setattr(cpu, "gather_keys", count)
    torch.testing.assert_close(attend(q, k, v, layout), by_equation(q, k, v, layout))
    assert sum(gathered) == 2000 + 8 * 16 + 9 + 16


@pytest.mark.parametrize("scale", [200.0, -200.0])
def test_scores_far_from_0_are_not_attended_in_tiles(scale: float) -> None:
    """exp of them overflows, or of all of a query's underflows: the sum is out of bounds, and the whole softmax is
    taken."""
    q, k, v, layout = sequences([(1600, [16, 16])], page_size=16, seed=6, dtype=torch.float32)
    q, k = torch.ones_like(q) * scale, k.abs() + 1.0
    (bundle,) = plan_bundles(layout)
    assert attend_tiles(q, k, v, bundle) is None
    torch.testing.assert_close(attend(q, k, v, layout), by_equation(q, k, v, layout), rtol=1e-4, atol=1e-4)
