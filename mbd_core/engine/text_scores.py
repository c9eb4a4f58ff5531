"""The log-probabilities of a text that is given: each token's in the forward before it is put in, from left to right.

Forward k has seen the text before the k-th token, and masks in the rest of its block. So the sum over a text is
exactly the log-likelihood of decoding that fills one position a forward, the leftmost: the chain rule over
distributions that each sum to 1. Another order of filling gives another number.
"""

import numpy as np
from torch import Tensor

from mbd_core.decoding.guide import Pick
from mbd_core.decoding.request import Request, TokenScore
from mbd_core.decoding.sampling import Vocab


class TextScores:
    """The scores of one request's template so far, one for each token that is decided."""

    def __init__(self, request: Request) -> None:
        self._template, self._number = request.template, len(request.committed)
        self.scores: list[TokenScore] = []

    def decide(self, logits_V: Tensor, pick: Pick, vocab: Vocab) -> tuple[int, float]:
        """The next token, the text's own or one that is picked for a hole, and its probability."""
        token = self._template[self._number + len(self.scores)]
        if token is None:
            token, _ = pick(0, np.ones(vocab.size, dtype=bool))
        log_p_V = logits_V.float().log_softmax(-1)
        likeliest = int(vocab.likeliest(logits_V[None])[0])
        self.scores.append(
            TokenScore(logprob=float(log_p_V[token]), likeliest=likeliest, likeliest_logprob=float(log_p_V[likeliest]))
        )
        return token, float(log_p_V[token].exp())
