"""The decoder stack of every family: rows that do not notice each other, and soft embeddings."""

from dataclasses import replace

import pytest
import torch
from family_models import FAMILIES, SDAR, random_model
from torch.nn import functional as F

from mbd_core.models.model_config import ModelConfig
from mbd_core.ops.attention.whole import DenseAttention


class RowAttention:
    """Packed rows of `lengths` tokens, each attending to itself alone."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __call__(self, layer, q, k, v):
        rows = zip(*(x.split(self.lengths) for x in (q, k, v)), strict=True)
        return torch.cat([self.attend(*(x.clone().transpose(0, 1)[None] for x in row)) for row in rows])

    @staticmethod
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_split_rows_do_not_notice_each_other(config: ModelConfig) -> None:
    wider = replace(config, hidden_size=136, head_dim=34, num_heads=4, intermediate_size=200)
    model = random_model(wider)
    generator = torch.Generator().manual_seed(2)
    lengths = [1, 8, 3, 16, 8, 1]
    ids = torch.randint(300, (sum(lengths),), generator=generator)
    soft = torch.rand(sum(lengths), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        hidden = model(ids, positions, RowAttention(lengths), soft_weight=soft, split=lengths)
        logits = model.logits(hidden, split=lengths)
        together = model.logits(model(ids, positions, RowAttention(lengths), soft_weight=soft))
        torch.testing.assert_close(logits, together, atol=1e-4, rtol=1e-4)
        for n, i, p, w, row in zip(lengths, *(x.split(lengths) for x in (ids, positions, soft, logits)), strict=True):
            alone = model(i.clone(), p.clone(), RowAttention([n]), soft_weight=w.clone(), split=[n])
            assert torch.equal(model.logits(alone, split=[n]), row)


def test_soft_embeddings_lie_between_token_and_mask() -> None:
    model = random_model(SDAR)
    ids, table = torch.tensor([5, 6, 7, 8]), model.model.embed_tokens.weight
    weight = torch.tensor([1.0, 0.0, 0.25, 0.9])
    with torch.no_grad():
        soft = model.embed(ids, weight)
        assert torch.equal(soft[0], table[5])
        torch.testing.assert_close(soft[1], table[0], rtol=1e-4, atol=1e-6)
        for row in (2, 3):
            w, token, mask = weight[row], table[ids[row]], table[0]
            torch.testing.assert_close(soft[row].norm(), w * token.norm() + (1 - w) * mask.norm(), rtol=1e-4, atol=0)
            cosine = F.cosine_similarity(soft[row], w * token + (1 - w) * mask, dim=0)
            assert float(cosine) == pytest.approx(1)
        assert torch.equal(model.embed(ids, torch.ones(4)), model.embed(ids))
        ones = {"soft_weight": torch.ones(4)}
        mask = DenseAttention(torch.ones(1, 1, 4, 4).bool())
        args = (ids[None], torch.arange(4)[None], mask)
        assert torch.equal(model(*args, **ones), model(*args))
