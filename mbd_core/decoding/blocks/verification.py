"""The rules of verified decoding: which run of a draft is judged, whether to judge it, and which tokens result.

The forward that drafted x gives it the probabilities p; the same weights at block size 1 give the probabilities q:

    block        a  M  M  b  M
    span            ^  ^           the first run of masks
    draft        a  x1 x2 b  x3    p: all positions see the whole block
    judgement    a  x1 x2          q: each position sees the tokens before it, and itself as a mask

Position i is accepted with probability min(1, (q(x_i) / p(x_i))^temper), from left to right. At the first refusal a
token is drawn from the surplus of q over p, (q - p)+ over the whole vocabulary. If x is drawn from p, and
`temper` is 1, each decided token has the distribution q (Leviathan et al., arXiv 2211.17192).

Shape legend: P positions of the span, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.blocks.sampling import Draw, Vocab, distribution, gumbel, uniform
from mbd_core.decoding.blocks.verify_config import Verify

ACCEPT = -4  # the id of a position's noise that decides whether its draft is accepted; no token has it


class VerifyNoise(Protocol):
    """The source of chance in a judgement; `draw` has the request's own noise of each position."""

    def uniforms(self, draw: Draw) -> Tensor:
        """Numbers (P,) in (0, 1), below which a ratio accepts."""

    def tokens(self, weight_PV: Tensor, draw: Draw) -> Tensor:
        """A token (P,) for each row of `weight_PV`, which holds its odds; a row need not sum to 1."""


class HashedNoise:
    """The request's own noise, the same in any batch."""

    def uniforms(self, draw: Draw) -> Tensor:
        return uniform(draw, torch.full_like(draw.position_P, ACCEPT)[:, None])[:, 0]

    def tokens(self, weight_PV: Tensor, draw: Draw) -> Tensor:
        ids_1V = torch.arange(weight_PV.shape[-1], device=weight_PV.device)[None]
        return (weight_PV.log() + gumbel(draw, ids_1V)).argmax(-1)


@dataclass(frozen=True)
class Draft:
    """A draft under judgement: its tokens, the logits that it was read from, and how it is judged."""

    token_P: Tensor
    logits_PV: Tensor
    rule: Verify
    noise: VerifyNoise


def judge(logits_PV: Tensor, draft: Draft, draw: Draw, vocab: Vocab, *, greedy: bool) -> Tensor:
    """The judgement of a draft by a verification's logits: (3, 2 P) in float64.

    The rows are tokens, their probabilities under the model, and acceptance. The first P columns hold the draft's
    tokens, the last P the tokens that replace them at a refusal.
    """
    if not greedy:
        q_PV, p_PV = (distribution(of, vocab, draw) for of in (logits_PV, draft.logits_PV))
    elif draft.rule.exact:
        q_PV, p_PV = (_likeliest_alone(of, vocab) for of in (logits_PV, draft.logits_PV))
    else:  # the draft's own probabilities say how sure it is
        q_PV, p_PV = logits_PV.float().softmax(-1), draft.logits_PV.float().softmax(-1)
    token_P1 = draft.token_P[:, None]
    ratio_P = (q_PV.gather(-1, token_P1) / p_PV.gather(-1, token_P1).clamp(min=1e-12))[:, 0].pow(draft.rule.temper)
    accepted_P = draft.noise.uniforms(draw) < ratio_P.clamp(max=1.0)
    surplus_PV = vocab.exclude_((q_PV - p_PV).clamp_(min=0.0), 0.0)
    has_none_P1 = surplus_PV.sum(-1, keepdim=True) <= 0
    surplus_PV = torch.where(has_none_P1, vocab.exclude_(q_PV, 0.0), surplus_PV)
    other_P = draft.noise.tokens(surplus_PV, draw)
    token_2P = torch.cat((draft.token_P, other_P))
    own_PV = logits_PV.float().log_softmax(-1)
    own_2P = torch.cat((own_PV, own_PV)).gather(-1, token_2P[:, None])[:, 0].exp()
    return torch.stack((token_2P.double(), own_2P.double(), torch.cat((accepted_P, accepted_P)).double()))


def _likeliest_alone(logits_PV: Tensor, vocab: Vocab) -> Tensor:
    zeros_PV = torch.zeros_like(logits_PV, dtype=torch.float32)
    return zeros_PV.scatter_(-1, vocab.likeliest(logits_PV)[0][:, None], 1.0)


def number_accepted(accepted_P: Sequence[bool]) -> int:
    """The tokens of a draft before the first refusal."""
    return next((i for i, accepted in enumerate(accepted_P) if not accepted), len(accepted_P))


def first_run(open_at: Sequence[int]) -> int:
    """The length of the first run of neighbouring positions, among ascending positions."""
    return next((i for i in range(1, len(open_at)) if open_at[i] != open_at[i - 1] + 1), len(open_at))


class VerifyRouter:
    """Whether each draft of one answer is verified."""

    def __init__(self, rule: Verify, vocab_size: int) -> None:
        self._rule, self._log_size = rule, float(np.log(vocab_size))
        self._is_on = False

    def verifies(self, score_P: np.ndarray, num_confident: int) -> bool:
        """Whether a draft is verified. `score_P` are the negative entropies, or leads (`Verify.estimate`), of its
        first run; `num_confident` is its number of masks above the threshold."""
        rule = self._rule
        if rule.route == "span":
            return len(score_P) >= rule.min_span
        expected = float(np.cumprod(self._chances(score_P)).sum())
        score = expected - rule.cost * (1 if rule.cost_of == "verification" else num_confident)
        if rule.route == "score":
            return score >= rule.tau_score
        self._is_on = score >= rule.tau_off if self._is_on else score > rule.tau_on
        return self._is_on

    def skip(self) -> None:
        """A forward without masks ends a state of verification."""
        self._is_on = False

    def _chances(self, score_P: np.ndarray) -> np.ndarray:
        """The estimated chance that each token is accepted."""
        if self._rule.estimate == "margin":
            return (score_P > self._rule.tau_margin).astype(float)
        return np.exp(score_P / self._log_size)
