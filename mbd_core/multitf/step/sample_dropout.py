"""Dropout whose draws belong to the sample: independent of the worker, of neighbouring samples, and of padding.

torch's own draws depend on the order in which a process asks for them, and so on the distribution of the work. Here a
layer's draws for a sample come from their own generator, seeded by the run's seed, the step, the sample, and the
layer. A layer that the backward pass computes again draws the same numbers.

Shape legend: S training sequences, N samples in them, L tokens of the longest sequence, D channels.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SampleDraws:
    """The seed of a sample's draws, and the sample's number of tokens."""

    seed: int
    tokens: int

    @classmethod
    def of(cls, sample: int, *, tokens: int, seed: int, step: int) -> "SampleDraws":
        """The draws of sample number `sample` in the update numbered `step` of a run."""
        return cls(random.Random(f"{seed}/{step}/{sample}/dropout").getrandbits(62), tokens)


class CurrentDraws:
    """The samples in the current computation, shared by all dropout layers of a model."""

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
        # a compiled layer takes a tensor as an input, but Python numbers as constants, and would be compiled again
        self.table_N3 = torch.tensor(numbers, dtype=torch.int64).reshape(-1, 3)


class SampleDropout(nn.Module):
    """`nn.Dropout(p)` on (S, L, D), of layer number `layer` of its model; padding gets no draws."""

    def __init__(self, p: float, layer: int, draws: CurrentDraws) -> None:
        super().__init__()
        self.p, self.draws = p, draws
        self.layer = torch.tensor(layer, device="cpu")  # not a buffer: it stays on the host, which seeds generators

    def forward(self, x_SLD: Tensor) -> Tensor:
        if not self.training:
            return x_SLD
        dropped_SLD = draw_dropped(x_SLD.detach(), self.draws.table_N3, self.layer, self.p)
        return x_SLD.masked_fill(dropped_SLD, 0.0) / (1.0 - self.p)


@torch.library.custom_op("mbd::draw_dropped", mutates_args=())
def draw_dropped(x_SLD: Tensor, table_N3: Tensor, layer: Tensor, p: float) -> Tensor:
    """The mask of dropped numbers. It is one operation to `torch.compile`, which cannot trace generators."""
    samples, device, ends = table_N3.tolist(), x_SLD.device, [0] * len(x_SLD)
    num_announced = len({row for row, _, _ in samples})
    assert num_announced == len(x_SLD), f"{len(x_SLD)} sequences are computed, and {num_announced} were announced"
    dropped_SLD = torch.zeros(x_SLD.shape, dtype=torch.bool, device=device)
    for row, seed, tokens in samples:
        generator = torch.Generator(device).manual_seed(seed + int(layer))
        draws = torch.rand(tokens, x_SLD.shape[-1], generator=generator, device=device)
        dropped_SLD[row, ends[row] : ends[row] + tokens] = draws < p
        ends[row] += tokens
    return dropped_SLD


@draw_dropped.register_fake
def _(x_SLD: Tensor, table_N3: Tensor, layer: Tensor, p: float) -> Tensor:
    return torch.empty(x_SLD.shape, dtype=torch.bool, device=x_SLD.device)
