"""The definition of paged attention is the equation, row by row."""

from dataclasses import replace

import torch
from fake_attention import by_equation, sequences
from hypothesis import given, settings
from hypothesis import strategies as st

from mbd_core.ops.attention.definition import paged_attention

row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
batches = st.lists(st.tuples(st.integers(0, 700), row_lengths), min_size=1, max_size=5)


@settings(max_examples=40)
@given(spec=batches, page_size=st.sampled_from([1, 4, 16]), seed=st.integers(0, 99))
def test_the_definition_is_the_equation(spec: list[tuple[int, list[int]]], page_size: int, seed: int) -> None:
    q, k, v, layout = sequences(spec, page_size=page_size, seed=seed)
    expected = by_equation(q, k, v, layout)
    torch.testing.assert_close(paged_attention(q, k, v, layout), expected)
    torch.testing.assert_close(paged_attention(q, k, v, replace(layout, exact=True)), expected)
