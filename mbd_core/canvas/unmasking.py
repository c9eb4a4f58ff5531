"""Acceptance on a canvas: how sure the model is of each open position, and which of them become tokens.

Shape legend: P open positions, ascending, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mbd_core.decoding.canvas_config import Canvas, Leap
from mbd_core.decoding.sampling import Draw, Sampling, Vocab, choose, gumbel, margin, neg_entropy, uniform

# noise that is no token's: the ids under which a position draws its score, its place, and its turn
RANDOM_SCORE, RANDOM_PLACE, RANDOM_TURN = -1, -2, -3


@dataclass(frozen=True)
class Guess:
    """What the model would put at each open position, on the host: token, its probability, and its score (P,)."""

    position_P: Tensor
    token_P: Tensor
    confidence_P: Tensor
    score_P: Tensor

    def at(self, where: Tensor | slice) -> "Guess":
        """The guess of some of its positions."""
        return Guess(self.position_P[where], self.token_P[where], self.confidence_P[where], self.score_P[where])


def noise_source(position_P: Tensor, sampling: Sampling, forward: int) -> Draw:
    """The request's own noise at `position_P` in its `forward`-th forward: nothing else of a batch enters."""

    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full(position_P.shape, value, dtype=dtype, device=position_P.device)

    return Draw(
        temperature_P=full(sampling.temperature, torch.float32),
        top_p_P=full(sampling.top_p, torch.float32),
        top_k_P=full(sampling.top_k, torch.int64),
        seed_P=torch.full_like(position_P, sampling.seed),
        position_P=position_P,
        forward_P=torch.full_like(position_P, forward),
        truncates=sampling.truncates,
    )


def guess(
    logits_PV: Tensor, position_P: Tensor, forward: int, canvas: Canvas, sampling: Sampling, vocab: Vocab
) -> Guess:
    """Token, confidence and score of each open position, in one copy to the host.

    Margin and negative entropy are those of the model's own distribution, whatever the temperature.
    """
    where = position_P.to(logits_PV.device)
    draw = noise_source(where, sampling, forward)
    token_P, confidence_P = choose(logits_PV, vocab, draw if sampling.draws else None)
    match canvas.score:
        case "confidence":
            score_P = confidence_P
        case "margin":
            score_P = margin(logits_PV, vocab)
        case "neg_entropy":
            score_P = neg_entropy(logits_PV)
        case "random":
            score_P = uniform(draw, torch.full_like(where, RANDOM_SCORE)[:, None])[:, 0]
    host = torch.stack((token_P.double(), confidence_P.double(), score_P.double())).cpu()
    return Guess(position_P, host[0].long(), host[1], host[2])


def best(score_P: Tensor, count: int) -> Tensor:
    """The `count` (or all) positions of highest score as a mask (P,); ties go to the lowest position."""
    chosen = torch.zeros(score_P.shape, dtype=torch.bool)
    chosen[score_P.argsort(descending=True, stable=True)[:count]] = True
    return chosen


def drawn_places(g: Guess, canvas: Canvas, sampling: Sampling, forward: int) -> Tensor:
    """Scores whose top n is a draw of n positions without replacement, odds exp(score / score_temperature)."""
    if canvas.score_temperature == 0:
        return g.score_P
    draw = noise_source(g.position_P, sampling, forward)
    noise = gumbel(draw, torch.full_like(g.position_P, RANDOM_PLACE)[:, None])[:, 0]
    return g.score_P / canvas.score_temperature + noise.double()


def over_threshold(g: Guess, tau: float, leap: Leap | None) -> Tensor:
    """Positions with confidence >= tau; with `leap` also those >= tau_relaxed near one of them (LocalLeap).

    Only positions over `tau` are anchors: what was relaxed in this forward relaxes nothing itself.
    """
    sure = g.confidence_P >= tau
    if leap is None:
        return sure
    anchors = g.position_P[sure]
    near = ((g.position_P[:, None] - anchors).abs() <= leap.radius).any(-1)
    return sure | (near & (g.confidence_P >= leap.tau_relaxed))


def by_factor(g: Guess, factor: float) -> Tensor:
    """The longest run of ranks n with (n + 1)(1 - c_n) <= factor, the first rank always (Fast-dLLM).

    The released code takes the last rank too when it is the first to fail; that is no part of the rule.
    """
    confidence, order = g.confidence_P.sort(descending=True, stable=True)
    rank = torch.arange(1, len(order) + 1)
    passes = (rank + 1) * (1.0 - confidence) <= factor
    passes[:1] = True
    chosen = torch.zeros_like(passes)
    chosen[order[passes.long().cumprod(0).bool()]] = True
    return chosen


def by_chance(g: Guess, share: float, sampling: Sampling, forward: int) -> Tensor:
    """Each position by itself with chance `share` (Dream's `origin`)."""
    draw = noise_source(g.position_P, sampling, forward)
    return uniform(draw, torch.full_like(g.position_P, RANDOM_TURN)[:, None])[:, 0] < share
