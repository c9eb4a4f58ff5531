"""Ranks that share a vocabulary find what one rank finds in all of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_groups import DENSE, METHODS, SIZES, B
from thread_ranks import ThreadRanks
from torch import Tensor

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.engine import Engine
from mbd_core.engine.step.vocab import PartVocab
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.shard import Shard

P, VOCAB = 64, 46


def tying_logits(dtype: torch.dtype) -> Tensor:
    return (torch.randint(-20, 20, (P, VOCAB), generator=torch.Generator().manual_seed(2)) / 4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("mask", "limit"), [(0, VOCAB), (45, VOCAB), (22, 40), (23, 24), (3, 11)])
def test_ranks_find_the_likeliest_token_of_all(size: int, mask: int, limit: int, dtype: torch.dtype) -> None:
    """Ties across ranks, the mask in any rank's part, and ranks whose part is padding alone; 46 ids do not divide
    among 3 or 4 ranks."""
    logits = tying_logits(dtype)
    logits[::2, mask] = 9.0
    if limit < VOCAB:
        logits[::3, limit:] = 9.0
    wanted_token, wanted_confidence = Vocab(mask, limit).likeliest(logits)
    ranks = ThreadRanks(size)

    def work(rank: int) -> list[Tensor]:
        shard = Shard(rank=rank, size=size)
        part = shard.part(VOCAB)
        vocab = PartVocab(mask, limit, part=part, shard=shard, reduce=ranks.reduce(rank), fused=False)
        return [*vocab.likeliest(logits[:, part.start : part.stop]), *vocab.likeliest(logits)]

    found = ranks.run(work)
    for token, confidence, token_of_whole, confidence_of_whole in found:
        assert torch.equal(token, wanted_token) and torch.equal(token_of_whole, token)
        assert token.dtype == wanted_token.dtype and confidence.dtype == torch.float32
        torch.testing.assert_close(confidence, wanted_confidence, rtol=1e-5, atol=0)
        assert torch.equal(confidence, found[0][1]) and torch.equal(confidence_of_whole, confidence)


def test_the_parts_are_the_vocabulary() -> None:
    for size in (1, 2, 3, 4, 7):
        parts = [Shard(rank=rank, size=size).part(VOCAB) for rank in range(size)]
        assert [i for part in parts for i in part] == list(range(VOCAB))
        assert [len(part) for part in parts] == [len(chunk) for chunk in torch.arange(VOCAB).chunk(size)]


def test_logits_that_are_not_numbers_give_an_id_in_range() -> None:
    shard = Shard(rank=0, size=2)
    vocab = PartVocab(0, 40, part=shard.part(VOCAB), shard=shard, reduce=lambda x: x.fill_(torch.nan), fused=False)
    token, _ = vocab.likeliest(torch.full((2, 23), torch.nan))
    assert ((token >= 0) & (token < 40)).all()


@pytest.mark.parametrize(
    ("sampling", "more", "crosses"),
    [
        (Sampling(), {}, False),
        (Sampling(temperature=0.5), {}, True),
        (Sampling(), {"fallback": "margin"}, True),
    ],
    ids=["greedy", "drawn", "scored"],
)
@pytest.mark.parametrize("static", [False, True])
def test_logits_cross_only_where_more_than_the_likeliest_is_asked(
    sampling: Sampling, more: dict[str, Any], crosses: bool, static: bool
) -> None:
    shapes: list[tuple[int, ...]] = []

    def noted(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x

    model = Decoder(DENSE, shard=Shard(rank=1, size=2), reduce=noted)
    init_weights(model, seed=0)
    engine = Engine(model.eval(), replace(SIZES, static_shapes=static))
    decoding = DecodingConfig(block_size=B, **{**METHODS[1], **more})
    engine.generate([Request(request_id="r", prompt=(2, 3), max_tokens=12, decoding=decoding, sampling=sampling)])
    assert ((DENSE.vocab_size in {shape[-1] for shape in shapes}) is crosses) and shapes
    assert any(shape[:2] == (2, 3) for shape in shapes), "three numbers of each rank for a position"
