"""One branch: what it remembers, and with whom it may merge."""

import torch
from fake_canvas_model import MASK, VOCAB

from mbd_core.decoding.canvas.branch import ProbabilityMap, compatible, likeliest_tokens
from mbd_core.decoding.canvas.plan import Lane


def test_incompatible_lanes_do_not_merge() -> None:
    def lane(*tokens: int) -> Lane:
        values = torch.tensor(tokens)
        return Lane(values, values == MASK, torch.zeros(len(tokens), dtype=torch.float64), torch.zeros(len(tokens)))

    assert compatible(lane(5, 0, 7), lane(5, 6, 0))
    assert not compatible(lane(5, 0, 7), lane(5, 6, 8))


def test_a_branch_remembers_every_token_over_its_threshold() -> None:
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(0))
    for tau in (0.05, 0.2, 0.5, 1.0):
        likely = ProbabilityMap(20, tau)
        likely.replace(torch.arange(20), *likeliest_tokens(logits, tau))
        p = logits.softmax(-1).double()
        for token in range(VOCAB):
            got = likely.probability(torch.full((1, 20), token))[0]
            over = p[:, token] > tau
            torch.testing.assert_close(got[over], p[:, token][over], rtol=0, atol=1e-12)
