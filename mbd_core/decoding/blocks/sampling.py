"""The predicted token of a position and the model's probability of it: greedy, or drawn with the request's own noise.

The noise of a drawn token is a hash of (seed, position, forward, token id), computed in integers on the logits'
device. There is no generator, so a request's tokens do not depend on the other requests of the batch.

Shape legend: P positions with logits, K token ids, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

    from mbd_core.decoding.blocks.adjustments import Adjust

_MASK32 = 0xFFFFFFFF
FORBIDDEN = -1e30
"""A finite logit whose probability is 0."""
CACHED = 2**18
"""Probabilities that are computed and searched at once on a CPU: a megabyte, which stays in its caches."""
GROUP = 64
"""On a CPU the best of each group of so many ids is found first, then its place: torch is slow at finding places."""


def allowed_alone(logits_PV: Tensor, allowed_V: np.ndarray) -> Tensor:
    """The logits in float32, `FORBIDDEN` at each id that is not allowed or lies past the end of `allowed_V`."""
    mask_V = torch.from_numpy(allowed_V).to(logits_PV.device)
    masked_PV = torch.full_like(logits_PV, FORBIDDEN, dtype=torch.float32)
    masked_PV[..., : len(mask_V)] = torch.where(mask_V, logits_PV[..., : len(mask_V)].float(), FORBIDDEN)
    return masked_PV


@dataclass(frozen=True)
class Vocab:
    """The ids that may be predicted: all below `size` (the rest is padding) except the mask's, if it is not -1."""

    mask_token_id: int
    size: int

    def exclude_(self, x_PV: Tensor, value: float) -> Tensor:
        """`x_PV` with `value` at every id that may not be predicted, in place."""
        if self.mask_token_id >= 0:
            x_PV[..., self.mask_token_id] = value
        if self.size < x_PV.shape[-1]:
            x_PV[..., self.size :] = value
        return x_PV

    def likeliest(self, logits_PV: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest id (P,) that may be predicted and its probability (P,) in float32; ties go to the lowest id.

        The probability is the model's own, over its whole vocabulary: ids that may not be predicted keep their share.
        """
        num_at_once = max(1, CACHED // logits_PV.shape[-1]) if logits_PV.is_cpu else max(1, len(logits_PV))
        found = [self._likeliest(part_PV) for part_PV in logits_PV.split(num_at_once)]
        token_P, confidence_P = (torch.cat(parts) for parts in zip(*found, strict=True))
        return token_P, confidence_P

    def _likeliest(self, logits_PV: Tensor) -> tuple[Tensor, Tensor]:
        p_PV = self.exclude_(logits_PV.float().softmax(dim=-1), -1.0)
        if not p_PV.is_cpu or p_PV.shape[-1] % GROUP:
            confidence_P, token_P = p_PV.max(dim=-1)
            return token_P, confidence_P
        p_PNG = p_PV.unflatten(-1, (-1, GROUP))
        confidence_P, group_P = p_PNG.amax(-1).max(dim=-1)
        place_P = p_PNG[torch.arange(len(p_PNG)), group_P].argmax(dim=-1)
        return group_P * GROUP + place_P, confidence_P


@dataclass(frozen=True)
class Draw:
    """The inputs of drawing beside the logits, one value a position. A position of temperature 0 is not drawn.

    truncates  whether some position may have top_k or top_p set. The host must know it before the step; `True` is
               always correct, `False` saves the sort of the vocabulary.
    """

    temperature_P: Tensor
    top_p_P: Tensor
    top_k_P: Tensor
    seed_P: Tensor
    position_P: Tensor
    forward_P: Tensor
    truncates: bool = True

    def select(self, index: slice | Tensor) -> Draw:
        """The draw of some of the positions."""
        return replace(
            self,
            temperature_P=self.temperature_P[index],
            top_p_P=self.top_p_P[index],
            top_k_P=self.top_k_P[index],
            seed_P=self.seed_P[index],
            position_P=self.position_P[index],
            forward_P=self.forward_P[index],
        )


def choose(
    logits_PV: Tensor, vocab: Vocab, draw: Draw | None = None, adjust: Adjust | None = None
) -> tuple[Tensor, Tensor]:
    """The token (P,) of each position and its probability (P,) in float32.

    The probability is the model's own, also where the token is drawn (with temperature, then min-p, then top-k, then
    top-p) or chosen from adjusted logits: thresholds mean the same at every temperature, and top_k = 1 is greedy.
    """
    token_P, confidence_P = vocab.likeliest(logits_PV)
    if draw is None and adjust is None:
        return token_P, confidence_P
    lse_P = logits_PV.float().logsumexp(-1)
    chosen_P, changed_PV = token_P, logits_PV
    if adjust is not None:
        changed_PV = vocab.exclude_(adjust.apply(logits_PV), -torch.inf)
        chosen_P = torch.where(adjust.active_P, changed_PV.argmax(-1), token_P)
    if draw is not None:
        min_p_P = None if adjust is None else adjust.min_p_P
        chosen_P = torch.where(draw.temperature_P > 0, _draw(changed_PV.float(), vocab, draw, min_p_P), chosen_P)
    own_P = (logits_PV.gather(-1, chosen_P[:, None])[:, 0].float() - lse_P).exp()
    return chosen_P, torch.where(chosen_P == token_P, confidence_P, own_P)


def top_tokens(logits_PV: Tensor, vocab: Vocab, number: int) -> Tensor:
    """The `number` likeliest tokens that may be predicted at each position, followed by their natural
    log-probabilities under the model: (P, 2 `number`) in float32, where ids are exact."""
    log_p_PV = vocab.exclude_(logits_PV.float().log_softmax(-1), -torch.inf)
    best = log_p_PV.topk(number, dim=-1)
    return torch.cat((best.indices.float(), best.values), dim=-1)


def log_probability(confidence: Tensor) -> Tensor:
    """Natural logarithm, finite also for a probability that is 0 in float32."""
    return confidence.clamp(min=torch.finfo(torch.float32).tiny).log()


def margin(logits_PV: Tensor, vocab: Vocab) -> Tensor:
    """The lead (P,) of the likeliest token over the second, in probability, among the tokens that may be predicted."""
    best = vocab.exclude_(logits_PV.float().softmax(-1), 0.0).topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def neg_entropy(logits_PV: Tensor) -> Tensor:
    """sum p log p (P,) of the model's own distribution."""
    log_p = logits_PV.float().log_softmax(-1)
    return torch.special.xlogy(log_p.exp(), log_p.exp()).sum(-1)


def _draw(logits_PV: Tensor, vocab: Vocab, draw: Draw, min_p_P: Tensor | None = None) -> Tensor:
    """A drawn token (P,) of each position: the token with the largest log-probability plus Gumbel noise.

    Only truncation sorts the vocabulary. A position's token does not depend on whether other positions truncate.
    """
    temperature_P = torch.where(draw.temperature_P > 0, draw.temperature_P, 1.0).float()
    scaled_PV = vocab.exclude_(logits_PV / temperature_P[:, None], -torch.inf)
    if min_p_P is not None:
        least_P1 = scaled_PV.amax(-1, keepdim=True) + min_p_P[:, None].log()
        scaled_PV = scaled_PV.masked_fill(scaled_PV < least_P1, -torch.inf)
    ids_1V = torch.arange(scaled_PV.shape[-1], device=scaled_PV.device)[None]
    token_P = (scaled_PV.log_softmax(dim=-1) + gumbel(draw, ids_1V)).argmax(dim=-1)
    if not draw.truncates:
        return token_P
    truncates_P = (draw.temperature_P > 0) & ((draw.top_k_P > 0) | (draw.top_p_P < 1))
    if truncates_P.device.type != "cpu":  # selecting the positions would make the host wait for the device
        return torch.where(truncates_P, _draw_truncated(scaled_PV, draw), token_P)
    index = truncates_P.nonzero()[:, 0]
    if len(index):
        token_P[index] = _draw_truncated(scaled_PV[index], draw.select(index))
    return token_P


def _draw_truncated(scaled_PV: Tensor, draw: Draw) -> Tensor:
    """A drawn token (P,) of each position, among the `top_k` likeliest, then among the likeliest up to `top_p`."""
    ranked_PV, order_PV = _truncated(scaled_PV, draw)
    rank_P1 = (ranked_PV.log() + gumbel(draw, order_PV)).argmax(dim=-1, keepdim=True)
    return order_PV.gather(-1, rank_P1)[:, 0]


def distribution(logits_PV: Tensor, vocab: Vocab, draw: Draw) -> Tensor:
    """The probabilities (P, V) with which `choose` draws a token, of positions whose temperature is above 0."""
    scaled_PV = vocab.exclude_(logits_PV.float() / draw.temperature_P[:, None].float(), -torch.inf)
    if not draw.truncates:
        return scaled_PV.softmax(-1)
    ranked_PV, order_PV = _truncated(scaled_PV, draw)
    return torch.zeros_like(ranked_PV).scatter_(-1, order_PV, ranked_PV)


def _truncated(scaled_PV: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """The probabilities (P, V) after top-k and top-p by falling rank, and the id of each rank."""
    order_PV = scaled_PV.argsort(dim=-1, descending=True, stable=True)
    ranked_PV = scaled_PV.gather(-1, order_PV).softmax(dim=-1)
    rank_V = torch.arange(ranked_PV.shape[-1], device=ranked_PV.device)
    limit_P = torch.where(draw.top_k_P > 0, draw.top_k_P, ranked_PV.shape[-1])
    kept_PV = rank_V < limit_P[:, None]
    ranked_PV = ranked_PV.masked_fill(~kept_PV, 0.0)
    ranked_PV = ranked_PV / ranked_PV.sum(-1, keepdim=True)
    kept_PV &= (_running_sum(ranked_PV) - ranked_PV) < draw.top_p_P[:, None]  # the token that reaches top_p stays in
    ranked_PV = ranked_PV.masked_fill(~kept_PV, 0.0)
    return ranked_PV / ranked_PV.sum(-1, keepdim=True), order_PV


def _running_sum(x_PV: Tensor) -> Tensor:
    """The sums (P, V) up to each number. A GPU scans a single row in parts, in an order that changes from call to
    call, so that ranks could draw different tokens. It scans each of several rows in a fixed order."""
    return x_PV.cumsum(-1) if len(x_PV) > 1 else x_PV.repeat(2, 1).cumsum(-1)[: len(x_PV)]


def gumbel(draw: Draw, ids_PK: Tensor) -> Tensor:
    """Standard Gumbel noise (P, K) float32 of token ids `ids_PK`, a hash of (seed, position, forward, id)."""
    return -torch.log(-torch.log(uniform(draw, ids_PK)))


def uniform(draw: Draw, ids_PK: Tensor) -> Tensor:
    """Numbers (P, K) in (0, 1), float32: (23 hashed bits + 0.5) / 2^23, exact in float32, so none is 0 or 1."""
    key = _mix(_mix(_mix(draw.seed_P & _MASK32) ^ ((draw.seed_P >> 32) & _MASK32)) ^ (draw.position_P & _MASK32))
    key = _mix(key ^ (draw.forward_P & _MASK32))
    bits = _mix(key[:, None] ^ _mix(ids_PK & _MASK32)) >> 9
    return (bits.float() + 0.5) / float(1 << 23)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser (xor-shift and multiply) on int64 tensors that hold 32-bit values.

    It works in place on tensors of its own, because a new one of a whole vocabulary costs more than its arithmetic.
    """
    x = (x >> 16).bitwise_xor_(x).add_(0x9E3779B9).bitwise_and_(_MASK32).mul_(0x21F0AAAD).bitwise_and_(_MASK32)
    x = (x >> 15).bitwise_xor_(x).mul_(0x735A2D97).bitwise_and_(_MASK32)
    return (x >> 15).bitwise_xor_(x)
