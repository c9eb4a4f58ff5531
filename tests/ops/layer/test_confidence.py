"""Confidence in one reading of the logits is `Vocab.likeliest`, the kernels being interpreted."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton_interpreter import run_interpreted

from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.ops.layer.confidence import _SPAN, confidence, num_stretches, part_confidence


def case(positions: int, vocabulary: int, dtype: torch.dtype, *, seed: int = 0) -> tuple[Tensor, dict[str, int]]:
    """Logits that tie often, whose likeliest id is often the mask's or lies in the padded tail; which ids may be."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-40, 40, (positions, vocabulary), generator=generator).to(dtype) / 4
    logits[::2, 3] = 12.0
    logits[::3, -1] = 13.0
    return logits, {"mask_token_id": 3, "size": vocabulary - 1 - vocabulary // 10}


def test_a_vocabulary_is_covered_and_a_block_of_it_fills_a_gpu() -> None:
    for vocabulary in (1, 4096, 4097, 151936, 157184):
        count = num_stretches(vocabulary)
        assert (count - 1) * _SPAN < vocabulary <= count * _SPAN
    assert 32 * num_stretches(157184) > 1000


def test_rows_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        confidence(torch.zeros(4, 30).T, mask_token_id=0, size=4)


INTERPRETED = """
import torch
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.engine.step.vocab import PartVocab
from mbd_core.models.shard import Shard
from mbd_core.ops.layer.confidence import confidence, part_confidence
from test_confidence import case
logits, may = case(9, 9000, torch.bfloat16)
whole = confidence(logits, **may)
for first, last in ((0, 1), (1, 4), (3, 9)):
    for found, wanted in zip(confidence(logits[first:last], **may), whole):
        assert torch.equal(found, wanted[first:last]), "a position has the same bits in every batch"
for positions, vocabulary in ((1, 9000), (3, 6), (2, 4096), (5, 4100)):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits, may = case(positions, vocabulary, dtype)
        token, probability = confidence(logits, **may)
        wanted = Vocab(**may).likeliest(logits)
        assert torch.equal(token, wanted[0]) and token.dtype == torch.int64, (positions, vocabulary, dtype)
        torch.testing.assert_close(probability, wanted[1], rtol=1e-5, atol=0)
        place, logit, lse = part_confidence(logits, **may)
        assert torch.equal(place, token) and torch.equal(logit, logits.gather(1, token[:, None])[:, 0].float())
        torch.testing.assert_close(lse, logits.float().logsumexp(-1), rtol=1e-6, atol=1e-6)
logits, may = case(6, 4100, torch.bfloat16)
shards = [Shard(rank=rank, size=3) for rank in range(3)]
sent = []
def keep(x):
    sent.append(x.clone())
    return x
for turn in range(2):  # every rank says its part, then hears all
    for shard in shards:
        reduce = keep if turn == 0 else lambda x: torch.stack(sent).sum(0)
        part = shard.part(4100)
        vocab = PartVocab(*may.values(), part=part, shard=shard, reduce=reduce, fused=True)
        token, probability = vocab.likeliest(logits[:, part.start : part.stop])
        if turn == 1:
            wanted = Vocab(**may).likeliest(logits)
            assert torch.equal(token, wanted[0])
            torch.testing.assert_close(probability, wanted[1], rtol=1e-5, atol=0)
place, logit, _ = part_confidence(torch.zeros(2, 30), mask_token_id=-9, size=-1)
assert logit.tolist() == [-torch.inf] * 2, "a part of padding alone"
wide = torch.randn(3, 6000).mul_(30)
for part in (wide[:, :5000], wide[:, :5000] - 1e4):
    token, probability = confidence(part, mask_token_id=7, size=5000)
    wanted = Vocab(7, 5000).likeliest(part)
    assert torch.equal(token, wanted[0])
    torch.testing.assert_close(probability, wanted[1], rtol=1e-4, atol=0)
flat = torch.zeros(2, 4100)
for mask in (0, 9):
    assert confidence(flat, mask_token_id=mask, size=4100)[0].tolist() == [int(mask == 0)] * 2
assert confidence(torch.full((1, 9), torch.nan), mask_token_id=0, size=9)[0].tolist() == [0]
print("all held")
"""


def test_the_kernels_are_the_definition_under_tritons_interpreter() -> None:
    run_interpreted(INTERPRETED, Path(__file__).parent)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_confidence_is_the_definition_and_is_captured(dtype: torch.dtype) -> None:
    logits, may = case(40, 157184, dtype)
    wanted = Vocab(**may).likeliest(logits)
    here = logits.cuda()
    confidence(here, **may)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token, probability = confidence(here, **may)
        place, logit, lse = part_confidence(here, **may)
    graph.replay()
    assert torch.equal(token.cpu(), wanted[0]) and torch.equal(place, token)
    assert torch.equal(logit, here.gather(1, token[:, None])[:, 0].float())
    torch.testing.assert_close(lse, here.float().logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(probability.cpu(), wanted[1], rtol=1e-4, atol=0)
