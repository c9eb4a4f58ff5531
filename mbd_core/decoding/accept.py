"""Which positions become tokens: pure functions of confidence, what is open, and the request's thresholds.

Shape legend: R rows, N slots, B block size, P positions asked for, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prediction:
    """The likeliest token of each position and its probability; zero where the model was not asked."""

    token_RNB: Tensor
    confidence_RNB: Tensor


def predict(logits_PV: Tensor, where_RNB: Tensor, forbidden_V: Tensor) -> Prediction:
    """Argmax and its float32 softmax probability, scattered to the true positions of `where_RNB`.

    `forbidden_V` (the mask id and the padded vocabulary tail) is never predicted; ties go to the lowest id. The
    probability is the model's own, over its whole vocabulary.
    """
    probabilities = logits_PV.float().softmax(dim=-1).masked_fill(forbidden_V, -1.0)
    confidence_P, token_P = probabilities.max(dim=-1)
    token = torch.zeros(where_RNB.shape, dtype=torch.int64, device=logits_PV.device)
    confidence = torch.zeros(where_RNB.shape, dtype=torch.float32, device=logits_PV.device)
    token[where_RNB] = token_P
    confidence[where_RNB] = confidence_P
    return Prediction(token, confidence)


def accept_m2t(
    confidence_RNB: Tensor, open_RNB: Tensor, *, gate_RN: Tensor, tau_R: Tensor, quota_R: Tensor, leftmost_R: Tensor
) -> Tensor:
    """Mask-to-token acceptance (Alg. 5 lines 11 to 14) -> (R, N, B) bool.

    Open positions over `tau_R` are accepted. A slot where they are fewer than `quota_R` falls back, if `gate_RN`
    allows, to its best `quota_R` open positions: by confidence, or from the left where `leftmost_R`; ties go left.
    Otherwise it keeps what is over the threshold.
    """
    over = open_RNB & (confidence_RNB.double() > tau_R[:, None, None])
    short = over.sum(-1) < quota_R[:, None]
    by_place = -torch.arange(open_RNB.shape[-1], device=open_RNB.device, dtype=torch.float32)
    score = torch.where(leftmost_R[:, None, None], by_place, confidence_RNB).masked_fill(~open_RNB, -torch.inf)
    order = score.argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)
    best = open_RNB & (rank < quota_R[:, None, None])
    return torch.where((short & gate_RN)[..., None], best, over)
