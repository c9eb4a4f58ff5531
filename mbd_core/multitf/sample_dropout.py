"""Dropout whose draws belong to the sample: the same whichever worker computes it, beside which others, how padded.

torch's own draws depend on the order in which a process asks for them, and so on who computes what. Here a layer's
draws for a sample come from a generator of their own, seeded by the run's seed, the step, the sample, and the layer.
A layer that is computed again in the backward pass draws the same again.

Shape legend: S training sequences, N samples in them, L tokens of the longest sequence, D channels.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SampleDraws:
    """What a sample's draws depend on, and its tokens."""

    seed: int
    tokens: int

    @classmethod
    def of(cls, sample: int, *, tokens: int, seed: int, step: int) -> "SampleDraws":
        """The draws of sample number `sample` in the update numbered `step` of a run."""
        return cls(random.Random(f"{seed}/{step}/{sample}/dropout").getrandbits(62), tokens)


class CurrentDraws:
    """The samples that are computed at present, which all dropout layers of a model share."""

    def __init__(self, rows: Sequence[Sequence[SampleDraws]] = ()) -> None:
        self.rows = rows

    @property
    def rows(self) -> Sequence[Sequence[SampleDraws]]:
        """The samples of each training sequence, in their order."""
        return self._rows

    @rows.setter
    def rows(self, rows: Sequence[Sequence[SampleDraws]]) -> None:
        self._rows = rows
        numbers = [(row, one.seed, one.tokens) for row, samples in enumerate(rows) for one in samples]
        # a compiled layer takes numbers of a tensor as its input, and those of Python as its own constants
        self.table_N3 = torch.tensor(numbers, dtype=torch.int64).reshape(-1, 3)


class SampleDropout(nn.Module):
    """`nn.Dropout(p)` on (S, L, D), layer number `layer` of those of its model; padding is not drawn for."""

    def __init__(self, p: float, layer: int, draws: CurrentDraws) -> None:
        super().__init__()
        self.p, self.draws = p, draws
        self.layer = torch.tensor(layer, device="cpu")  # no buffer: it stays where generators are seeded

    def forward(self, x_SLD: Tensor) -> Tensor:
        if not self.training:
            return x_SLD
        dropped_SLD = draw_dropped(x_SLD.detach(), self.draws.table_N3, self.layer, self.p)
        return x_SLD.masked_fill(dropped_SLD, 0.0) / (1.0 - self.p)


@torch.library.custom_op("mbd::draw_dropped", mutates_args=())
def draw_dropped(x_SLD: Tensor, table_N3: Tensor, layer: Tensor, p: float) -> Tensor:
    """Which numbers are dropped. One operation to `torch.compile`, which cannot trace generators."""
    samples, device, ends = table_N3.tolist(), x_SLD.device, [0] * len(x_SLD)
    announced = len({row for row, _, _ in samples})
    assert announced == len(x_SLD), f"{len(x_SLD)} sequences are computed, and {announced} were announced"
    dropped_SLD = torch.zeros(x_SLD.shape, dtype=torch.bool, device=device)
    for row, seed, tokens in samples:
        generator = torch.Generator(device).manual_seed(seed + int(layer))
        drawn = torch.rand(tokens, x_SLD.shape[-1], generator=generator, device=device)
        dropped_SLD[row, ends[row] : ends[row] + tokens] = drawn < p
        ends[row] += tokens
    return dropped_SLD


@draw_dropped.register_fake
def _(x_SLD: Tensor, table_N3: Tensor, layer: Tensor, p: float) -> Tensor:
    return torch.empty(x_SLD.shape, dtype=torch.bool, device=x_SLD.device)
