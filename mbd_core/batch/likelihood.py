"""The log-likelihood of a text under a diffusion model, estimated by Monte Carlo.

A masked diffusion model gives a lower bound of log p(target | prefix). For n positions that are filled together the
bound is

    E over k uniform in 1..n, over k masked positions of them:   n / k * sum over these of log p(token | the rest)

This is the estimate of LLaDA's own evaluation (exactly k masked positions; it takes 128 draws). A full-attention model
fills the whole target together. A model that attends in blocks fills block after block: the bound is the sum over the
target's blocks, each given its clean predecessors. One forward over a noisy and a clean stream (the mask of
`multitf.states.mask`) then computes a draw of all blocks at once. The k of the draws are spread evenly over 1..n, from
a random start. Draws with the same mask are computed once: a target of one token, as the letter of a choice, takes one
forward, and its estimate is exact.

A model that stores its keys by causal rows gives the next token's probability itself: the sum along the text is its
exact log-likelihood, from one forward without a draw.

Shape legend: D draws, U different masks of them, N noisy positions, L clean positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.states.mask import dual_stream_mask
from mbd_core.ops.attention.whole import DenseAttention


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The number of draws of an estimate, the number of draws that share a forward, and the seed of each text."""

    number: int
    per_forward: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.number < 1 or self.per_forward < 1:
            raise ValueError(f"{self} must have at least one draw, and at least one draw a forward")


@torch.inference_mode()
def log_likelihood(
    model: Decoder, prefix: Sequence[int], target: Sequence[int], *, block_size: int, draws: Draws
) -> float:
    """The estimate for `target` after `prefix`, in nats; the same for the same seed. 0 for an empty target.

    Raises `ValueError` if the model does not hold both, or is one rank of several.
    """
    if model.shard.size != 1:
        raise ValueError("log-likelihoods need a model that is not cut among tensor-parallel ranks")
    is_causal = "ar" in model.config.prefix_methods
    if not model.config.has_mask and not is_causal:
        raise ValueError(f"{model.config.architecture} has no mask token, by which log-likelihoods are estimated")
    length = len(prefix) + len(target)
    if length > model.config.max_positions:
        raise ValueError(f"a text of {length} tokens exceeds the model's {model.config.max_positions} positions")
    if (model.config.shift_logits or is_causal) and not prefix:
        raise ValueError("the model predicts each token at the position before it, and the text has none before it")
    if not target:
        return 0.0
    device = next(model.parameters()).device
    tokens_L = torch.tensor([*prefix, *target], device=device)
    if is_causal:
        return _chain(model, tokens_L, len(prefix))
    full = model.config.attention == "full"
    groups = _groups(len(prefix), length, length if full else block_size)
    masked_UL, count_U = _draw_masks(groups, length, draws).unique(dim=0, return_counts=True)
    masked_UL, count_U = masked_UL.to(device), count_U.to(device)
    total = 0.0
    for start in range(0, len(masked_UL), draws.per_forward):
        part_UL, count = masked_UL[start : start + draws.per_forward], count_U[start : start + draws.per_forward]
        logits_of = _full_logits if full else _block_logits
        first = 0 if full else groups[0][0] - groups[0][0] % block_size
        logits_UNV = logits_of(model, tokens_L, part_UL, first, block_size)
        weights_UN = _weights(groups, part_UL)[:, first:] * count[:, None]
        nats_UN = -F.cross_entropy(
            logits_UNV.float().transpose(1, 2), tokens_L[first:].expand(len(part_UL), -1), reduction="none"
        )
        total += float((nats_UN.double() * weights_UN).sum())
    return total / draws.number


def _chain(model: Decoder, tokens_L: Tensor, begin: int) -> float:
    """The sum of log p(token | earlier tokens) from position `begin` on."""
    length = len(tokens_L)
    causal = DenseAttention(torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens_L.device).tril())
    hidden_LD = model(tokens_L[None], torch.arange(length, device=tokens_L.device)[None], causal)[0]
    logits_NV = model.logits(hidden_LD[begin - 1 : -1]).float()
    return -float(F.cross_entropy(logits_NV, tokens_L[begin:], reduction="sum"))


def _groups(begin: int, end: int, size: int) -> list[tuple[int, int]]:
    """The positions that are filled together: the target's part of every block of `size`."""
    starts = [begin, *range(begin - begin % size + size, end, size)]
    return list(zip(starts, [*starts[1:], end], strict=True))


def _draw_masks(groups: Sequence[tuple[int, int]], length: int, draws: Draws) -> Tensor:
    """The positions that each draw masks (D, L)."""
    generator = torch.Generator().manual_seed(draws.seed)
    masked_DL = torch.zeros(draws.number, length, dtype=torch.bool)
    for begin, end in groups:
        size = end - begin
        start = torch.rand((), generator=generator, dtype=torch.float64)
        share_D = (start + torch.arange(draws.number, dtype=torch.float64) / draws.number) % 1
        number_D = 1 + (share_D * size).long().clamp(max=size - 1)
        rank_DS = torch.rand(draws.number, size, generator=generator).argsort(1).argsort(1)
        masked_DL[:, begin:end] = rank_DS < number_D[:, None]
    return masked_DL


def _weights(groups: Sequence[tuple[int, int]], masked_DL: Tensor) -> Tensor:
    """n / k at masked positions, 0 elsewhere."""
    weights_DL = torch.zeros(masked_DL.shape, dtype=torch.float64, device=masked_DL.device)
    for begin, end in groups:
        part = masked_DL[:, begin:end]
        weights_DL[:, begin:end] = part * ((end - begin) / part.sum(1, keepdim=True))
    return weights_DL


def _full_logits(model: Decoder, tokens_L: Tensor, masked_DL: Tensor, _first: int, _block_size: int) -> Tensor:
    """Logits (D, L, V) of every position's token where all positions see each other."""
    input_DL = tokens_L.masked_fill(masked_DL, model.config.mask_token_id)
    positions_DL = torch.arange(len(tokens_L), device=tokens_L.device).expand_as(input_DL)
    see = torch.ones(1, 1, len(tokens_L), len(tokens_L), dtype=torch.bool, device=tokens_L.device)
    logits_DLV = model.logits(model(input_DL, positions_DL, DenseAttention(see)))
    # a shift gives the first position wrong logits, which nothing reads: after a prefix it is never masked
    return logits_DLV.roll(1, dims=1) if model.config.shift_logits else logits_DLV


def _block_logits(model: Decoder, tokens_L: Tensor, masked_DL: Tensor, first: int, block_size: int) -> Tensor:
    """Logits (D, N, V) of the positions from `first` on; `first` begins a block. Each block sees its
    clean predecessors and itself."""
    if model.config.shift_logits:
        raise ValueError("log-likelihoods of a model that attends in blocks and shifts its logits are not offered")
    count, device = len(masked_DL), tokens_L.device
    noisy_DN = tokens_L.masked_fill(masked_DL, model.config.mask_token_id)[:, first:]
    clean_L = torch.arange(len(tokens_L), device=device)
    positions = torch.cat((clean_L[first:], clean_L))
    is_clean = torch.arange(len(positions), device=device) >= noisy_DN.shape[1]
    block = positions // block_size
    see = dual_stream_mask((~is_clean).long(), block, block + is_clean.long())[None, None]
    input_ids = torch.cat((noisy_DN, tokens_L.expand(count, -1)), dim=1)
    hidden = model(input_ids, positions.expand_as(input_ids), DenseAttention(see))
    return model.logits(hidden[:, : noisy_DN.shape[1]])
