"""The changes that requests make to logits before a token is chosen: biases, bans and penalties, row by row.

They change the choice alone. Confidences, scores and log-probabilities keep the model's own distribution, so
thresholds mean the same, and a step map can be run again. In one forward all positions of a sequence see the same
counts: the counts of its prompt, and of the answer's tokens that earlier forwards have filled, in stored blocks and in
slots. So the order of positions within a forward does not matter. The changes come in this order: `logit_bias` and
bans, the repetition penalty, then frequency and presence penalty.

Shape legend: R rows, L positions of a sequence, K entries, P positions with logits, V vocabulary.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mbd_core.decoding.blocks.sampling_config import MAX_BIASES, MAX_STOP_IDS, Sampling

_ALWAYS = 2**62  # a position that no answer reaches


@dataclass(frozen=True)
class Adjust:
    """The changes of P positions' logits; `rows_P` tells which batch row each belongs to.

    answer_RV  how often each row's answer has each token
    seen_RV    whether its prompt or its answer has the token
    """

    memory: "Adjustments"
    answer_RV: Tensor
    seen_RV: Tensor
    rows_P: Tensor
    position_P: Tensor

    def select(self, index: slice | Tensor) -> "Adjust":
        """The changes of some of the positions."""
        return replace(self, rows_P=self.rows_P[index], position_P=self.position_P[index])

    @property
    def active_P(self) -> Tensor:
        """Whether the position's request changes any logit."""
        return self.memory.active_R[self.rows_P]

    @property
    def min_p_P(self) -> Tensor:
        return self.memory.min_p_R[self.rows_P]

    def apply(self, logits_PV: Tensor) -> Tensor:
        """The changed logits in float32; the logits of a row without changes are equal to the bit."""
        memory, rows_P = self.memory, self.rows_P
        holds_PK = self.position_P[:, None] < memory.until_RK[rows_P]
        bias_PK = torch.where(holds_PK, memory.bias_RK[rows_P], 0.0)
        x_PV = logits_PV.float().scatter_add(1, memory.ids_RK[rows_P], bias_PK)
        repetition_P1, frequency_P1, presence_P1 = memory.penalties_R3[rows_P].split(1, dim=1)
        repeated_PV = torch.where(x_PV > 0, x_PV / repetition_P1, x_PV * repetition_P1)
        x_PV = torch.where(self.seen_RV[rows_P], repeated_PV, x_PV)
        count_PV = self.answer_RV[rows_P]
        return x_PV - frequency_P1 * count_PV - presence_P1 * (count_PV > 0)


class Adjustments:
    """The changes of each batch row's request, and its tokens by position; memory that never moves.

    history_RL    the tokens of the row's sequence, `vocab_size` at positions without a token
    prompt_R      the length of its prompt
    ids_RK        tokens whose logits change by `bias_RK` at positions below `until_RK`; minus infinity is a ban
    penalties_R3  repetition, frequency and presence penalty
    min_p_R       least share of the likeliest token's probability, for drawn tokens
    active_R      whether the request changes anything
    """

    def __init__(self, num_rows: int, *, length: int, vocab_size: int, num_eos: int, device: torch.device) -> None:
        """`length` is one past the last position that a slot of a row can have."""
        self._vocab_size = vocab_size
        entries = (num_rows, MAX_BIASES + MAX_STOP_IDS + num_eos)
        self.history_RL = torch.full((num_rows, length), vocab_size, dtype=torch.int32, device=device)
        self.prompt_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.ids_RK = torch.zeros(entries, dtype=torch.int64, device=device)
        self.bias_RK = torch.zeros(entries, device=device)
        self.until_RK = torch.zeros(entries, dtype=torch.int64, device=device)
        self.penalties_R3 = torch.zeros((num_rows, 3), device=device)
        self.penalties_R3[:, 0] = 1.0
        self.min_p_R = torch.zeros(num_rows, device=device)
        self.active_R = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._in_use = [False] * num_rows

    _NAMES = ("history_RL", "prompt_R", "ids_RK", "bias_RK", "until_RK", "penalties_R3", "min_p_R", "active_R")

    @property
    def state(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self._NAMES)

    def head(self, num_rows: int) -> "Adjustments":
        """The first `num_rows` rows over the same memory."""
        view = copy.copy(self)
        for name in self._NAMES:
            setattr(view, name, getattr(self, name)[:num_rows])
        return view

    def write(
        self,
        row: int,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        prompt_length: int,
        ends: Sequence[int],
        free: int,
    ) -> None:
        """Writes a request's changes into a row. `tokens` are its prompt and the committed tokens after it. At
        positions below `free` none of `ends` is chosen."""
        bans = [(token, -math.inf, free) for token in ends]
        entries = [*((token, bias, _ALWAYS) for token, bias in sampling.logit_bias), *bans]
        self._in_use[row] = True
        self.history_RL[row] = self._vocab_size
        self.history_RL[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.prompt_R[row] = prompt_length
        if entries:
            ids, biases, untils = zip(*entries, strict=True)
            self.ids_RK[row, : len(ids)] = torch.tensor(ids)
            self.bias_RK[row, : len(ids)] = torch.tensor(biases, dtype=torch.float32)
            self.until_RK[row, : len(ids)] = torch.tensor(untils)
        self.penalties_R3[row] = torch.tensor(
            [sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty]
        )
        self.min_p_R[row], self.active_R[row] = sampling.min_p, True

    def clear(self, row: int) -> None:
        """Removes a row's changes."""
        if not self._in_use[row]:
            return
        self._in_use[row] = False
        for values in (self.ids_RK, self.bias_RK, self.until_RK, self.penalties_R3, self.min_p_R, self.active_R):
            values[row] = 0
        self.penalties_R3[row, 0] = 1.0

    def mark(self, row: int) -> None:
        """Note that saved state was written into a row."""
        self._in_use[row] = True

    def at(
        self, rows_P: Tensor, position_P: Tensor, *, tokens_RS: Tensor, masked_RS: Tensor, positions_RS: Tensor
    ) -> Adjust:
        """The changes at `position_P` of rows `rows_P`, before a forward's results are taken.

        The tokens in slots enter the history first, and masks leave it.
        """
        slots_RS = torch.where(masked_RS, self._vocab_size, tokens_RS).to(torch.int32)
        self.history_RL.scatter_(1, positions_RS, slots_RS)
        ids_RL = self.history_RL.long()
        counts_RV = torch.zeros((len(ids_RL), self._vocab_size + 1), dtype=torch.int32, device=ids_RL.device)
        seen_RV = counts_RV.scatter_add(1, ids_RL, torch.ones_like(self.history_RL)) > 0
        of_answer_RL = torch.arange(ids_RL.shape[1], device=ids_RL.device) >= self.prompt_R[:, None]
        counts_RV.scatter_add_(1, ids_RL, of_answer_RL.int())
        return Adjust(self, counts_RV[:, :-1], seen_RV[:, :-1], rows_P, position_P)
