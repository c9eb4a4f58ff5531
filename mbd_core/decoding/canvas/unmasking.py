"""Acceptance on a canvas: the guess at each open position, the number filled in a step, and the accepted positions.

Each rule returns a boolean mask (P,) of the positions it accepts. Offsets count from the prompt's end.

Shape legend: P open positions, ascending, V vocabulary.
"""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.adjustments import Adjust, Adjustments
from mbd_core.decoding.blocks.canvas_config import Canvas, Leap
from mbd_core.decoding.blocks.sampling import (
    Draw,
    choose,
    gumbel,
    log_probability,
    margin,
    neg_entropy,
    uniform,
)
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.verification import judge
from mbd_core.decoding.canvas.lane import Lane
from mbd_core.decoding.canvas.plan import CanvasTask, CanvasUpdate, Guesses, OpenLogits

READ_AT_ONCE = 2**26
"""Logits that are read together, or those of one request if it has more: 256 MiB in float32, of which reading makes
several copies."""
# Noise of a position is drawn with one of these ids, which no token has.
RANDOM_SCORE, RANDOM_RANK, RANDOM_TURN = -1, -2, -3


def noise_source(position_P: Tensor, sampling: Sampling, forward: int) -> Draw:
    """The request's own noise at `position_P` in forward number `forward`, independent of the rest of the batch."""

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


class LaneAdjustments:
    """A request's changes of its logits (`Adjustments`), computed from the tokens of a lane."""

    def __init__(self, task: CanvasTask) -> None:
        self._task, self._adjusts = task, task.adjusts
        self._memory: Adjustments | None = None

    def at(self, lane: Lane, position_P: Tensor, logits_PV: Tensor) -> Adjust | None:
        """The changes at these positions; `None` if the request makes no changes."""
        if not self._adjusts:
            return None
        task, device = self._task, logits_PV.device
        if self._memory is None:
            sizes = {"length": len(lane.tokens), "vocab_size": logits_PV.shape[-1], "num_eos": len(task.eos_token_ids)}
            self._memory = Adjustments(1, **sizes, device=device)
            free = len(task.prompt) + task.min_tokens
            self._memory.write(
                0, task.prompt, task.sampling, prompt_length=len(task.prompt), ends=task.ends, free=free
            )
        return self._memory.at(
            torch.zeros_like(position_P).to(device),
            position_P.to(device),
            tokens_RS=torch.from_numpy(lane.tokens[None]).to(device),
            masked_RS=torch.from_numpy(lane.masked[None]).to(device),
            positions_RS=torch.arange(len(lane.tokens), device=device)[None],
        )


class GuessingDecoder:
    """A decoder whose forward is read in two halves, so that the first half is one operation for many requests."""

    num_stored = 0
    draft_length = 1

    @property
    def tokens(self) -> list[int]:
        return list(self.answer_from(0).tokens)

    @property
    def log_probs(self) -> list[float]:
        return list(self.answer_from(0).logprobs or ())

    @property
    def steps(self) -> list[int]:
        return list(self.answer_from(0).steps or ())

    def answer_from(self, number: int) -> Piece:
        """The answer after its first `number` tokens."""
        raise NotImplementedError

    def hold_to(self, num_blocks: int) -> None:
        """Does nothing: how a canvas is filled does not depend on the engine's load."""

    def open_logits(self, logits: list[Tensor]) -> OpenLogits:
        """The logits at the positions that this forward may fill. `logits` has (len(logits_at), V) for each query."""
        raise NotImplementedError

    def accept(self, opened: OpenLogits, guesses: Guesses) -> CanvasUpdate:
        """Accept tokens from the guesses at these positions."""
        raise NotImplementedError

    def update(self, logits: list[Tensor]) -> CanvasUpdate:
        """Both halves of reading a forward, for a single request."""
        opened = self.open_logits(logits)
        return self.accept(opened, *guess([opened]))


def guess(parts: Sequence[OpenLogits]) -> list[Guesses]:
    """The guesses at the open positions of several requests of one vocabulary, in one copy to the host.

    Margin and negative entropy are of the model's own distribution, whatever the temperature.
    """
    groups: dict[tuple[str | int, int], list[int]] = {}
    num_logits = Counter[str | int]()
    for number, part in enumerate(parts):
        kind = part.kind or number
        groups.setdefault((kind, num_logits[kind] // READ_AT_ONCE), []).append(number)
        num_logits[kind] += part.logits_PV.numel()
    read = [_read([parts[number] for number in group]) for group in groups.values()]
    host = torch.cat(read, dim=-1).cpu()
    tokens, confidence, score = host[0].long().numpy(), host[1].numpy(), host[2].numpy()
    log_probs = log_probability(host[1]).numpy()
    guesses: dict[int, Guesses] = {}
    start = 0
    for number in itertools.chain.from_iterable(groups.values()):
        position_P = parts[number].position_P.numpy()
        own = slice(start, start := start + len(position_P))
        guesses[number] = Guesses(position_P, tokens[own], confidence[own], log_probs[own], score[own])
    return [guesses[number] for number in range(len(parts))]


def _read(parts: Sequence[OpenLogits]) -> Tensor:
    """Tokens, probabilities and scores (3, P) of parts that are read together, float64 on their device."""
    first = parts[0]
    logits_PV = first.logits_PV if len(parts) == 1 else torch.cat([part.logits_PV for part in parts])
    draw = None
    if first.draft is not None:
        half_P = first.position_P[: len(first.position_P) // 2].to(logits_PV.device)
        draw = noise_source(half_P, first.sampling, first.forward)
        return judge(logits_PV, first.draft, draw, first.vocab, greedy=not first.sampling.draws)
    if first.sampling.draws or first.score == "random":
        draw = noise_source(first.position_P.to(logits_PV.device), first.sampling, first.forward)
    token_P, confidence_P = choose(logits_PV, first.vocab, draw if first.sampling.draws else None, first.adjust)
    score_P = confidence_P
    match first.score:
        case "margin":
            score_P = margin(logits_PV, first.vocab)
        case "neg_entropy":
            score_P = neg_entropy(logits_PV)
        case "random":
            assert draw is not None
            score_P = uniform(draw, torch.full_like(draw.position_P, RANDOM_SCORE)[:, None])[:, 0]
    return torch.stack((token_P.double(), confidence_P.double(), score_P.double()))


def accept_best(score_P: np.ndarray, count: int) -> np.ndarray:
    """The `count` positions of highest score, or all if there are fewer; ties go to the lowest position."""
    accepted_P = np.zeros(len(score_P), dtype=bool)
    if count == 1 and len(score_P):
        accepted_P[score_P.argmax()] = True
    else:
        accepted_P[best_first(score_P)[:count]] = True
    return accepted_P


def best_first(score_P: np.ndarray) -> np.ndarray:
    """The places by falling score. Ties go to the lowest place, and NaN to the end."""
    return (-score_P).argsort(kind="stable")


def noisy_scores(guesses: Guesses, canvas: Canvas, sampling: Sampling, forward: int) -> np.ndarray:
    """Scores (P,) with Gumbel noise: the positions of the n highest are n draws without replacement.

    The odds of a position are exp(score / score_temperature). With `score_temperature` 0 they are the scores without
    noise.
    """
    if canvas.score_temperature == 0:
        return guesses.score_P
    draw = noise_source(torch.from_numpy(guesses.position_P), sampling, forward)
    noise_P = gumbel(draw, torch.full_like(draw.position_P, RANDOM_RANK)[:, None])[:, 0]
    return guesses.score_P / canvas.score_temperature + noise_P.double().numpy()


def accept_over_threshold(guesses: Guesses, tau: float, leap: Leap | None) -> np.ndarray:
    """Positions with confidence >= tau; with `leap` also positions >= tau_relaxed near one of them (LocalLeap).

    Only positions with confidence >= `tau` are anchors: a position that the relaxed threshold accepts does not relax
    others.
    """
    sure_P = guesses.confidence_P >= tau
    if leap is None:
        return sure_P
    anchors = guesses.position_P[sure_P]
    near_P = (np.abs(guesses.position_P[:, None] - anchors) <= leap.radius).any(-1)
    return sure_P | (near_P & (guesses.confidence_P >= leap.tau_relaxed))


def accept_by_factor(guesses: Guesses, factor: float) -> np.ndarray:
    """The positions of ranks 1 to n, by falling confidence c, where (i + 1)(1 - c_i) <= factor holds up to rank n. The
    first rank is always accepted (Fast-dLLM, Sec. 3).

    The released code also accepts the last rank if all ranks before it pass; the paper's rule does not.
    """
    order = best_first(guesses.confidence_P)
    rank = np.arange(1, len(order) + 1)
    passes = (rank + 1) * (1.0 - guesses.confidence_P[order]) <= factor
    passes[:1] = True
    accepted_P = np.zeros_like(passes)
    accepted_P[order[np.logical_and.accumulate(passes)]] = True
    return accepted_P


def accept_by_chance(guesses: Guesses, share: float, sampling: Sampling, forward: int) -> np.ndarray:
    """Each position independently with probability `share` (Dream's `origin`)."""
    draw = noise_source(torch.from_numpy(guesses.position_P), sampling, forward)
    return (uniform(draw, torch.full_like(draw.position_P, RANDOM_TURN)[:, None])[:, 0] < share).numpy()


def steps_of_block(steps: int, max_tokens: int, start: int, stop: int) -> int:
    """The number of the canvas's `steps` for the block [start, stop), in proportion to its length."""
    return steps * stop // max_tokens - steps * start // max_tokens


def quota(num_masked: int, num_steps: int, step: int) -> int:
    """The number of masks of a block that step `step` fills: equal parts, the remainder first; 0 after the last
    step."""
    if step >= num_steps:
        return 0
    return num_masked // num_steps + (step < num_masked % num_steps)


def unmasking_share(num_steps: int, step: int, eps: float) -> float:
    """1 - s / t in the step from time t to time s; `num_steps + 1` times fall from 1 to `eps`. 1 in the last (Dream).

    In float32, as in the released code, because rounding can change the floor of a product by one.
    """
    if step >= num_steps - 1:
        return 1.0
    times = torch.linspace(1, eps, num_steps + 1)
    return float(1 - times[step + 1] / times[step])


def scheduled_quota(num_masked: int, num_steps: int, step: int, eps: float) -> int:
    """The number of the `num_masked` masked positions that step `step` fills; all at the last step (Dream)."""
    if step >= num_steps - 1:
        return num_masked
    times = torch.linspace(1, eps, num_steps + 1)
    return int(num_masked * (1 - times[step + 1] / times[step]))
