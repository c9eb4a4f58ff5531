"""Which positions become tokens, and which tokens change: pure functions of predictions and open positions.

Shape legend: R rows, N slots, B block size, P positions with logits, A their places in the flattened buffer, V
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from mbd_core.decoding.blocks.adjustments import Adjust
from mbd_core.decoding.blocks.config import EntropyRule, Fallback
from mbd_core.decoding.blocks.sampling import Draw, Vocab, choose, margin, neg_entropy, top_tokens

# The number of each fallback, for integer tensors.
FALLBACKS: dict[Fallback, int] = {name: number for number, name in enumerate(get_args(Fallback))}
LEFTMOST, MARGIN, NEG_ENTROPY = (FALLBACKS[name] for name in get_args(Fallback)[1:])
# The number of each rule on entropies; 0 for none.
ENTROPY_RULES: dict[EntropyRule, int] = {name: number for number, name in enumerate(get_args(EntropyRule), start=1)}
JETENGINE = ENTROPY_RULES["jetengine"]
# Entropies are summed as whole numbers of 2^-16 nats, so that a sum is the same in any order.
ENTROPY_UNITS, MOST_ENTROPY = 65536.0, 16 * 65536.0


@dataclass(frozen=True)
class Prediction:
    """Each position's token, its confidence, and its score in the fallback; all 0 at positions without logits.

    tops_A2K  where a request asks for them, `top_tokens` of the positions with logits
    """

    token_RNB: Tensor
    confidence_RNB: Tensor
    score_RNB: Tensor
    tops_A2K: Tensor | None = None


def predict(
    logits_of: Callable[[slice], Tensor],
    num_asked: int,
    at_A: Tensor | None,
    vocab: Vocab,
    *,
    shape: torch.Size,
    chunk: int,
    draw: Draw | None = None,
    adjust: Adjust | None = None,
    fallback_P: Tensor | None = None,
    num_tops: int = 0,
) -> Prediction:
    """Chooses tokens at `num_asked` positions, and writes them to the places `at_A` of the flat `shape` (`None`: all).

    `logits_of` returns the logits (P, V) of a range of at most `chunk` positions, so that the logits of a large batch
    are never in memory together. `fallback_P` (a `FALLBACKS` number a position) is needed if some request ranks by
    margin or entropy. `at_A` can have a fixed length: the sentinel `shape.numel()` marks padding. With `num_tops`, the
    result has the `num_tops` likeliest tokens of each position too.
    """
    parts = []
    for start in range(0, max(num_asked, 1), chunk):
        part = slice(start, min(start + chunk, num_asked))
        logits_PV = logits_of(part)
        token_P, confidence_P = choose(
            logits_PV,
            vocab,
            None if draw is None else draw.select(part),
            None if adjust is None else adjust.select(part),
        )
        score_P = confidence_P
        if fallback_P is not None:
            score_P = torch.where(fallback_P[part] == MARGIN, margin(logits_PV, vocab), score_P)
            score_P = torch.where(fallback_P[part] == NEG_ENTROPY, neg_entropy(logits_PV), score_P)
        tops = [top_tokens(logits_PV, vocab, num_tops)] if num_tops else []
        parts.append((token_P, confidence_P, score_P, *tops))
    columns = [*parts[0]] if len(parts) == 1 else [torch.cat(column) for column in zip(*parts, strict=True)]
    values, tops_A2K = columns[:3], columns[3] if num_tops else None
    if at_A is not None:
        values = [value.new_zeros(shape.numel() + 1).scatter_(0, at_A, value)[:-1] for value in values]
    token, confidence, score = (value.view(shape) for value in values)
    return Prediction(token, confidence, score, tops_A2K)


def placed_tops(tops_A2K: Tensor, at_A: Tensor | None, *, num_places: int) -> Tensor:
    """`top_tokens` at places `at_A` (`None`: all) of a flat buffer (`num_places`, 2K); -1 at the other places."""
    if at_A is None:
        return tops_A2K
    buffer = tops_A2K.new_full((num_places + 1, tops_A2K.shape[1]), -1.0)
    return buffer.index_copy_(0, at_A, tops_A2K)[:-1]


def leftmost_part(open_RNB: Tensor, size_R: Tensor) -> Tensor:
    """The open positions (R, N, B) in each slot's leftmost sub-block (of `size_R` positions) with an open position."""
    size_R1 = size_R.clamp(min=1)[:, None]
    part_RB = torch.arange(open_RNB.shape[-1], device=open_RNB.device) // size_R1
    first_RN = open_RNB.int().argmax(-1) // size_R1
    return open_RNB & (part_RB[:, None] == first_RN[..., None])


def accept_m2t(
    prediction: Prediction,
    open_RNB: Tensor,
    *,
    gate_RN: Tensor,
    tau_R: Tensor,
    leftmost_R: Tensor,
    quota_R: Tensor | None = None,
) -> Tensor:
    """Mask-to-token acceptance (Alg. 5 lines 11 to 14) -> (R, N, B) bool.

    Open positions with confidence > `tau_R` are accepted. A slot with fewer of them than `quota_R` (`None`: 1 in every
    row) falls back, if `gate_RN` allows, to its best `quota_R` open positions: the positions of highest score, or the
    leftmost positions if `leftmost_R`. Ties go to the left.
    """
    confident = open_RNB & (prediction.confidence_RNB > tau_R[:, None, None])
    places_B = torch.arange(open_RNB.shape[-1], device=open_RNB.device)
    score_RNB = torch.where(leftmost_R[:, None, None], -places_B.float(), prediction.score_RNB)
    score_RNB = score_RNB.masked_fill(~open_RNB, -torch.inf)
    if quota_R is None:  # the best position needs no sort
        short = ~confident.any(-1)
        best = open_RNB & (places_B == score_RNB.argmax(-1)[..., None])
    else:
        short = confident.sum(-1) < quota_R[:, None]
        order = score_RNB.argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(-1, order, places_B.expand_as(order))
        best = open_RNB & (rank < quota_R[:, None, None])
    return torch.where((short & gate_RN)[..., None], best, confident)


def accept_by_entropy(
    score_RNB: Tensor, open_RNB: Tensor, *, gate_RN: Tensor, gamma_R: Tensor, jetengine_R: Tensor
) -> Tensor:
    """The EB sampler's acceptance -> (R, N, B) bool; `score_RNB` is the negative entropy of each position.

    The open positions of a slot are taken in the order of their entropies, H_1 <= H_2 <= ..., ties from the left. Let
    S_k = H_1 + ... + H_k. The paper (arXiv 2505.24857) accepts position k if S_k - H_k <= `gamma_R`. JetEngine accepts
    it if k = 1 or S_k < `gamma_R`. So both accept position 1 whatever its entropy is, which is a fallback. Where
    `gate_RN` forbids the fallback, the paper's rule becomes S_k <= `gamma_R`, and JetEngine's S_k < `gamma_R`.
    """
    entropy_RNB = (score_RNB * -ENTROPY_UNITS).nan_to_num(0.0).clamp(0.0, MOST_ENTROPY).long()
    ordered, order = entropy_RNB.masked_fill(~open_RNB, int(MOST_ENTROPY) + 1).sort(dim=-1, stable=True)
    sums = ordered.cumsum(-1)
    earlier = sums - ordered
    gamma, gate = gamma_R[:, None, None] * ENTROPY_UNITS, gate_RN[..., None]
    fits = torch.where(jetengine_R[:, None, None], sums < gamma, torch.where(gate, earlier, sums) <= gamma)
    fits[..., :1] |= gate
    return torch.zeros_like(open_RNB).scatter_(-1, order, fits) & open_RNB


def accept_from_left(confidence_RNB: Tensor, open_RNB: Tensor, *, gate_RN: Tensor, tau_R: Tensor) -> Tensor:
    """DMax's acceptance -> (R, N, B) bool: the open positions left of the first position whose confidence does not
    exceed `tau_R`. If `gate_RN` allows, the leftmost open position is always accepted."""
    confident = confidence_RNB > tau_R[:, None, None]
    prefix = leading(confident | ~open_RNB) & open_RNB
    first = open_RNB & (open_RNB.long().cumsum(-1) == 1)
    return prefix | (first & gate_RN[..., None])


def leading(mask: Tensor) -> Tensor:
    """The run of true values with which each line of the mask's last dimension begins."""
    return mask.long().cumprod(-1).bool()


def revise(prediction: Prediction, tokens_RNB: Tensor, filled_RNB: Tensor, *, tau_R: Tensor) -> Tensor:
    """Token-to-token revision (Alg. 5 line 15) -> (R, N, B) bool: the filled positions at which another token is
    predicted with confidence > `tau_R`."""
    differs = prediction.token_RNB != tokens_RNB
    return filled_RNB & differs & (prediction.confidence_RNB > tau_R[:, None, None])
