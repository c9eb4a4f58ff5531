"""MultiTF training sequences: noisy streams of one sample over its one clean stream, ready for the model.

The paper batches every layout as its own `[x_t; x_0]` (Eq. B.5). Here the n layouts of a sample share its clean
half, `[x_t^1; ...; x_t^n; x_0]`: the same losses and gradients, the clean half computed once
(tests/multitf/test_multitf.py).

Shape legend: S samples, L tokens of the longest training sequence.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from mbd_core.multitf.layout import GroupLayout, layout_set
from mbd_core.multitf.noise import SCHEDULES, NoiseBounds, Rounding, ScheduleName, num_masked

IGNORE = -100
Weighting = Literal["masked_mean", "block_ratio"]


@dataclass(frozen=True)
class Example:
    """One tokenised sample, its response padded with EOS to a whole block; `prompt_length` tokens are never masked."""

    tokens: tuple[int, ...]
    prompt_length: int


def encode_example(
    prompt: Sequence[int], response: Sequence[int], *, eos_token_id: int, block_size: int, max_length: int
) -> Example | None:
    """Prompt + response + EOS, filled with EOS to a block boundary; `None` if that exceeds `max_length` tokens."""
    tokens = [*prompt, *response, eos_token_id]
    tokens += [eos_token_id] * (-len(tokens) % block_size)
    return Example(tuple(tokens), len(prompt)) if len(tokens) <= max_length else None


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """How training states are drawn: layouts, noise and the weight of each masked token.

    `max_group=1` is teacher forcing. `num_layouts` draws that many of the layout set anew for each sample, an unbiased
    estimate of Alg. 1's mean over all of it; `None` takes them all. `span` says whether layouts partition the whole
    content (the paper's App. B.1) or begin at the first block with a response token, where decoding begins.
    `weighting` is Eq. B.11 (`masked_mean`) or Eq. B.13 (`block_ratio`).
    """

    block_size: int
    max_group: int
    num_random: int = 0
    num_layouts: int | None = None
    span: Literal["content", "response"] = "content"
    schedule: ScheduleName = "chain_uniform"
    bounds: NoiseBounds = NoiseBounds()
    rounding: Rounding = "floor"
    weighting: Weighting = "masked_mean"

    def __post_init__(self) -> None:
        if self.max_group < 1 or self.block_size < 1 or self.num_random < 0:
            raise ValueError(
                f"max_group={self.max_group}, block_size={self.block_size} must be >= 1 and "
                f"num_random={self.num_random} >= 0"
            )
        if self.num_layouts is not None and self.num_layouts < 1:
            raise ValueError(f"num_layouts={self.num_layouts} must be at least 1, or None for the whole layout set")


@dataclass(frozen=True)
class NoisyStream:
    """One layout's corrupted blocks: `tokens`, `masked` and the sampled `ratio` of each token's block."""

    tokens: list[int]
    masked: list[bool]
    ratio: list[float]


Columns = dict[str, list]
"""One training sequence as lists, named as the fields of `MultiTFBatch`."""


@dataclass(frozen=True)
class MultiTFBatch:
    """Padded training sequences, all (S, L): ids and positions in, the mask's three numbers, labels and weights out.

    `weights` sum to 1 per sample under `masked_mean`, so the batch loss is `sum(weights * CE) / S`.
    """

    input_ids: Tensor
    positions: Tensor
    stream: Tensor
    block: Tensor
    first: Tensor
    labels: Tensor
    weights: Tensor

    @property
    def num_samples(self) -> int:
        return self.input_ids.shape[0]

    def to(self, device: torch.device) -> "MultiTFBatch":
        return MultiTFBatch(*(t.to(device) for t in vars(self).values()))


def choose_layouts(num_blocks: int, config: StateConfig, rng: random.Random) -> list[GroupLayout]:
    """The layouts of one sample: all of `Lambda`, or `num_layouts` of it (teacher forcing repeats its only one)."""
    layouts = layout_set(num_blocks, max_group=config.max_group, num_random=config.num_random, rng=rng)
    if config.num_layouts is None:
        return layouts
    if config.num_layouts <= len(layouts):
        return rng.sample(layouts, config.num_layouts)
    return rng.choices(layouts, k=config.num_layouts)


def corrupt(
    example: Example, layout: GroupLayout, *, start: int, config: StateConfig, mask_token_id: int, rng: random.Random
) -> NoisyStream:
    """Alg. 1 lines 8 to 15 on the blocks from token `start` on; only response tokens are ever masked."""
    size = config.block_size
    schedule = SCHEDULES[config.schedule]
    ratios = [t for group in layout.sizes for t in schedule(group, config.bounds, rng)]
    tokens = list(example.tokens[start:])
    masked = [False] * len(tokens)
    for block, ratio in enumerate(ratios):
        low = max(start + block * size, example.prompt_length) - start
        maskable = range(low, (block + 1) * size)
        if maskable:
            for i in rng.sample(maskable, num_masked(ratio, len(maskable), config.rounding)):
                tokens[i] = mask_token_id
                masked[i] = True
    return NoisyStream(tokens, masked, [t for t in ratios for _ in range(size)])


def build_batch(
    examples: Sequence[Example], config: StateConfig, *, mask_token_id: int, rngs: Sequence[random.Random]
) -> MultiTFBatch:
    """Draw layouts and noise for each example and lay out its noisy streams before its clean one.

    Each example has a generator of its own in `rngs`, so its draws do not depend on its neighbours in the batch.
    """
    size = config.block_size
    rows = []
    for example, rng in zip(examples, rngs, strict=True):
        first_block = example.prompt_length // size if config.span == "response" else 0
        draw = partial(corrupt, example, start=first_block * size, config=config, mask_token_id=mask_token_id, rng=rng)
        layouts = choose_layouts(len(example.tokens) // size - first_block, config, rng)
        rows.append(lay_out(example, [(layout, draw(layout)) for layout in layouts], config, first_block=first_block))
    return collate(rows)


def lay_out(
    example: Example, streams: Sequence[tuple[GroupLayout, NoisyStream]], config: StateConfig, *, first_block: int
) -> Columns:
    """One training sequence: the noisy streams, which begin at block `first_block`, before the clean one."""
    size, length = config.block_size, len(example.tokens)
    num_blocks, start = length // size, first_block * size
    row: Columns = {f.name: [] for f in fields(MultiTFBatch)}
    for number, (layout, noisy) in enumerate(streams, start=1):
        weights = _weights(noisy, config, num_blocks=num_blocks - first_block)
        row["input_ids"] += noisy.tokens
        row["positions"] += range(start, length)
        row["stream"] += [number] * len(noisy.tokens)
        row["block"] += [b for b in range(first_block, num_blocks) for _ in range(size)]
        row["first"] += [first_block + a for a in layout.first_blocks() for _ in range(size)]
        row["labels"] += [t if m else IGNORE for t, m in zip(example.tokens[start:], noisy.masked, strict=True)]
        row["weights"] += [w / len(streams) for w in weights]
    row["input_ids"] += example.tokens
    row["positions"] += range(length)
    row["stream"] += [0] * length
    row["block"] += [b for b in range(num_blocks) for _ in range(size)]
    row["first"] += [b + 1 for b in range(num_blocks) for _ in range(size)]
    row["labels"] += [IGNORE] * length
    row["weights"] += [0.0] * length
    return row


def collate(rows: Sequence[Columns]) -> MultiTFBatch:
    """Pad training sequences to the longest."""
    length = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "positions": 0, "stream": -1, "block": 0, "first": 0, "labels": IGNORE, "weights": 0.0}
    return MultiTFBatch(
        **{
            name: torch.tensor([row[name] + [pad] * (length - len(row[name])) for row in rows])
            for name, pad in fill.items()
        }
    )


def _weights(noisy: NoisyStream, config: StateConfig, *, num_blocks: int) -> list[float]:
    """Each masked token's share of the layout's loss: 1/|M| (Eq. B.11) or 1/(K max(t, eps)) (Eq. B.13)."""
    if config.weighting == "masked_mean":
        count = max(1, sum(noisy.masked))
        return [1.0 / count if m else 0.0 for m in noisy.masked]
    return [1.0 / (num_blocks * max(t, 1e-6)) if m else 0.0 for m, t in zip(noisy.masked, noisy.ratio, strict=True)]
