"""A row that is causal inside is as many rows of one token: in the layout of a forward, and in the model's numbers."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mbd_core.engine.memory.pages import PagedKVCache
from mbd_core.engine.step.batch import BatchRows, pack
from mbd_core.engine.step.runner import ModelRunner
from mbd_core.models.shapes import SHAPES, random_model
from mbd_core.ops.attention.choice import resolve
from mbd_core.ops.attention.whole import DenseAttention

PAGE, LENGTH = 16, 37
CONFIG = SHAPES["tiny-sdar"]


def runner() -> ModelRunner:
    model = random_model(CONFIG, device=torch.device("cpu"), dtype=torch.float32, std=0.2)
    cache = PagedKVCache(CONFIG, num_pages=9, page_size=PAGE, dtype=torch.float32, device=torch.device("cpu"))
    attention = resolve(torch.device("cpu"), torch.float32, CONFIG.head_dim, PAGE)
    return ModelRunner(model, cache, attention, num_rows=1, num_positions=128)


def rows(ids: Tensor, start: int, stop: int, *, causal: bool = True, pages: tuple[int, ...] = (5, 2, 7)) -> BatchRows:
    """Tokens [start, stop) of a text as one row."""
    return BatchRows(
        tokens_T=ids[start:stop],
        positions_T=torch.arange(start, stop),
        lengths_K=[stop - start],
        kv_lens_K=torch.tensor([stop]),
        causal_K=torch.tensor([causal]),
        pages_KP=torch.tensor([pages]),
        stored_K=torch.ones(1, dtype=torch.bool),
        logits_at_A=torch.arange(stop - start),
    )


def hidden(served: ModelRunner, ids: Tensor, cuts: list[int], *, exact: bool = False) -> Tensor:
    """The final hidden states of a text that is stored row by row."""
    ends = [0, *cuts, len(ids)]
    return torch.cat(
        [
            served.forward(pack([rows(ids, a, b)], page_size=PAGE, batch_invariant=exact))
            for a, b in itertools.pairwise(ends)
        ]
    )


@pytest.mark.parametrize("cuts", [[], [1], [16], [5, 6, 30], list(range(1, LENGTH))])
def test_a_causal_row_is_as_many_rows_of_one_token(cuts: list[int]) -> None:
    served, ids = runner(), torch.randint(250, (LENGTH,), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    with torch.no_grad():
        expected = served.model(ids[None], torch.arange(LENGTH)[None], DenseAttention(mask))[0]
    torch.testing.assert_close(hidden(served, ids, cuts), expected, rtol=1e-4, atol=1e-4)
    one_by_one = hidden(served, ids, list(range(1, LENGTH)), exact=True)
    assert torch.equal(hidden(served, ids, cuts, exact=True), one_by_one)


def test_causal_rows_and_others_share_a_forward() -> None:
    """A causal row and one without order, each behind its own prefix, beside one another and alone."""
    served, ids = runner(), torch.randint(250, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    tables = ((5, 2, 7), (3, 8, 1))
    for row, pages in enumerate(tables):
        served.forward(pack([rows(ids[row], 0, 20, pages=pages)], page_size=PAGE))
    groups = [rows(ids[0], 20, 33, pages=tables[0]), rows(ids[1], 20, 29, causal=False, pages=tables[1])]
    alone = [served.forward(pack([group], page_size=PAGE)) for group in groups]
    plain = replace(groups[1], causal_K=None, logits_at_A=groups[1].logits_at_A + 13)
    together = served.forward(pack([groups[0], plain], page_size=PAGE))
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
    ordered = served.forward(pack([rows(ids[1], 20, 29, pages=tables[1])], page_size=PAGE))
    assert not torch.allclose(ordered[:-1], alone[1][:-1], atol=1e-2)
