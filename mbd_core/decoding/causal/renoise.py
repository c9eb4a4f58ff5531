"""DiffusionGemma's decoding: every forward draws a token at each position and keeps the draws of lowest entropy; the
others become uniform noise. The last forward's likeliest tokens are the answer.

    canvas = uniform tokens
    for n = N, N - 1, ..., 1:                       # N = steps
        l = logits of the canvas / T                # T = t_min + (t_max - t_min) n / N
        drawn ~ softmax(l), best = argmax l, H = entropy of softmax(l), per position
        accept the lowest H while the sum of the lower ones is at most `entropy_bound`
        canvas = drawn where accepted, uniform tokens elsewhere
        stop if the last `stability` bests equal this best and the mean of H is below `tau_entropy`
    the answer goes on with the last best

Nothing is accepted for good, and no token is masked. A canvas's positions see the stored prefix and each other. The
first forward of a canvas also stores the finished one before it, by a causal row. The embeddings that a forward
expects condition the next forward (`models/gemma.py`).

All noise is a hash of the request's seed, the position and the canvas's step, so a canvas that begins anew after a
preemption, or on another replica, comes out the same.

Shape legend: L positions of a canvas, P positions of a piece, V vocabulary, D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mbd_core.decoding.blocks.causal_config import Renoise
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Draw, Vocab, gumbel, log_probability, uniform
from mbd_core.decoding.canvas.plan import CanvasPlan, CanvasUpdate, Query
from mbd_core.decoding.causal.prefix import PrefixDecoder

PIECE_BYTES = 2**28
"""The memory limit of one piece of logits and everything made of it: 256 MiB. A canvas of 256 positions over 262,144
ids is 268 MB in float32 alone; its pieces have 25 positions."""
COPIES = 10
"""The most bytes held at once for each byte of a float32 piece; a test counts them. The noise is made of
64-bit integers."""


def temperature(rule: Renoise, step: int) -> float:
    """The temperature of a canvas's step, counted from 0: `t_max` first, and never quite `t_min`."""
    return rule.t_min + (rule.t_max - rule.t_min) * (rule.steps - step) / rule.steps


def accept_within(entropy_L: Tensor, bound: float) -> Tensor:
    """The positions (L,) with the lowest entropies, as long as the entropies before a position sum to at most `bound`.

    The lowest position is always accepted (EB sampler, arXiv 2505.24857).
    """
    sorted_L, order_L = entropy_L.sort(stable=True)
    within_L = sorted_L.cumsum(0) - sorted_L <= bound
    return torch.zeros_like(within_L).scatter(0, order_L, within_L)


class Noise(Protocol):
    """The source of drawn tokens, for positions (P,) of a canvas. A canvas's steps are counted from 0."""

    def fresh(self, position_P: Tensor, step: int) -> Tensor:
        """Uniform tokens (P,); step -1 gives those of the first forward."""

    def drawn(self, log_p_PV: Tensor, position_P: Tensor, step: int) -> Tensor:
        """A token (P,) of each distribution."""


@dataclass(frozen=True)
class PositionNoise:
    """The request's own noise, the same in any batch."""

    seed: int
    size: int

    def fresh(self, position_P: Tensor, step: int) -> Tensor:
        no_token_P1 = torch.full_like(position_P, self.size)[:, None]  # the hash of an id that is never drawn
        return (uniform(self._key(position_P, step), no_token_P1)[:, 0] * self.size).long().clamp(max=self.size - 1)

    def drawn(self, log_p_PV: Tensor, position_P: Tensor, step: int) -> Tensor:
        ids_1V = torch.arange(log_p_PV.shape[-1], device=log_p_PV.device)[None]
        key = self._key(position_P.to(log_p_PV.device), step)
        return (gumbel(key, ids_1V).add_(log_p_PV)).argmax(-1)

    def _key(self, position_P: Tensor, step: int) -> Draw:
        ones_P = torch.ones_like(position_P)
        return Draw(
            temperature_P=ones_P.float(),
            top_p_P=ones_P.float(),
            top_k_P=torch.zeros_like(ones_P),
            seed_P=ones_P * self.seed,
            position_P=position_P,
            forward_P=ones_P * (step + 1),
            truncates=False,
        )


@dataclass(frozen=True)
class CanvasReading:
    """One forward's results at a canvas's positions (L,), and the embeddings (L, D) that it expects there.

    log_p_L  the log-probability of `best_L` under the model itself, at temperature 1
    """

    drawn_L: Tensor
    best_L: Tensor
    entropy_L: Tensor
    log_p_L: Tensor
    expected_LD: Tensor


def piece_length(vocab_size: int) -> int:
    """The number of positions whose logits are read at once."""
    return max(1, PIECE_BYTES // (4 * COPIES * vocab_size))


def read_canvas(
    logits_of: Callable[[slice], Tensor],
    position_L: Tensor,
    *,
    temperature: float,
    step: int,
    noise: Noise,
    vocab: Vocab,
    expect: Callable[[Tensor], Tensor],
    length: int | None = None,
) -> CanvasReading:
    """Reads the logits of a canvas in pieces of `length` positions (`None`: `piece_length`), never all at once.

    `logits_of` gives the logits (P, V) of a range of its positions; `expect` makes embeddings (P, D) of probabilities.
    """
    pieces = []
    for start in range(0, len(position_L), length or piece_length(vocab.size)):
        part = slice(start, min(start + (length or piece_length(vocab.size)), len(position_L)))
        logits_PV = logits_of(part).float()
        lse_P = logits_PV.logsumexp(-1)
        log_p_PV = vocab.exclude_(logits_PV / temperature, -torch.inf).log_softmax(-1)
        best_P = log_p_PV.argmax(-1)
        own_P = logits_PV.gather(-1, best_P[:, None])[:, 0] - lse_P
        del logits_PV
        drawn_P = noise.drawn(log_p_PV, position_L[part], step)
        p_PV = log_p_PV.exp_()
        pieces.append((drawn_P, best_P, torch.special.entr(p_PV).sum(-1), own_P, expect(p_PV)))
    return CanvasReading(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


class RenoisingDecoder(PrefixDecoder):
    """One request: canvas after canvas, after its stored prefix. `noise` may be given, to decode with known draws.

    canvas_L     the tokens of the next forward's canvas
    expected_LD  the embeddings that the last forward expects there; `None` before a canvas's first forward
    """

    def __init__(
        self, request: Request, *, eos_token_ids: tuple[int, ...], vocab: Vocab, noise: Noise | None = None
    ) -> None:
        super().__init__(request, eos_token_ids=eos_token_ids, vocab=vocab)
        assert request.decoding.renoise is not None
        self._row_length = request.decoding.block_size
        self._rule = request.decoding.renoise
        self._noise: Noise = noise or PositionNoise(request.sampling.seed, vocab.size)
        self._positions_L = self.canvas_L = self._changed_L = torch.zeros(0, dtype=torch.int64)
        self.expected_LD: Tensor | None = None
        self._bests: list[Tensor] = []
        self._step = self._num_accepted = 0
        self._begin_canvas()

    def plan(self) -> CanvasPlan:
        start, none = len(self._all), torch.zeros(0, dtype=torch.int64)
        queries = []
        if self.num_stored < start:
            tokens = torch.tensor(self._all[self.num_stored :])
            queries.append(Query(0, self.num_stored, start, tokens, none, num_keys=start, causal=True))
        stop = start + len(self.canvas_L)
        canvas = Query(
            0, start, stop, self.canvas_L, self._positions_L, num_keys=stop, denoises=True, expected=self.expected_LD
        )
        return CanvasPlan([], [*queries, canvas])

    def read(self, logits_of: Callable[[slice], Tensor], expect: Callable[[Tensor], Tensor]) -> CanvasReading:
        """The first half of a forward's reading, on the device: `read_canvas` of this step."""
        return read_canvas(
            logits_of,
            self._positions_L,
            temperature=temperature(self._rule, self._step),
            step=self._step,
            noise=self._noise,
            vocab=self._vocab,
            expect=expect,
        )

    def take(self, reading: CanvasReading) -> CanvasUpdate:
        """The second half of a forward's reading, on the host."""
        start, self.num_stored = len(self._all), len(self._all)
        self.num_forwards += 1
        tokens_2L = torch.stack((reading.drawn_L, reading.best_L)).cpu()
        entropy_L, log_p_L = torch.stack((reading.entropy_L, reading.log_p_L)).cpu()
        drawn_L, best_L = tokens_2L
        accepted_L = accept_within(entropy_L, self._rule.entropy_bound)
        share = 1.0 - self._num_accepted / len(best_L)
        self._num_accepted = int(accepted_L.sum())
        fresh_L = self._noise.fresh(self._positions_L, self._step)
        self.canvas_L, self.expected_LD = torch.where(accepted_L, drawn_L, fresh_L), reading.expected_LD
        self._changed_L[best_L != self._bests[-1]] = self.num_forwards
        stable = all(torch.equal(best_L, earlier) for earlier in self._bests[::-1][: self._rule.stability])
        self._bests = [*self._bests, best_L][-max(1, self._rule.stability) :]
        self._step += 1
        update = self._update(start, self._num_accepted, share)
        if self._step == self._rule.steps or (stable and float(entropy_L.mean()) < self._rule.tau_entropy):
            steps = self._changed_L.tolist()
            log_probs = log_probability(log_p_L.exp()).tolist()
            self._append(best_L.tolist(), log_probs, steps, num_stored=self.num_stored)
            if not self.done:
                self._begin_canvas()
        return update

    def _begin_canvas(self) -> None:
        """Begins a canvas: uniform tokens after the known tokens, without any forward's results."""
        start, length = len(self._all), self._request.decoding.block_size
        self._positions_L = torch.arange(start, start + length)
        self.canvas_L = self._noise.fresh(self._positions_L, -1)
        self.expected_LD = None
        self._bests = [torch.full((length,), -1)] * max(1, self._rule.stability)
        self._changed_L = torch.zeros(length, dtype=torch.int64)
        self._step = self._num_accepted = 0
