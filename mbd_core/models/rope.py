"""Rotary positions: the frequencies of a head's channels, possibly scaled for longer contexts, and the rotation.

Shape legend: ... any leading shape, C head channels.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mbd_core.models.model_config import ModelConfig
from mbd_core.models.rope_scaling import LinearScaling, Llama3Scaling, ProportionalRotation, YarnScaling


class Rope(NamedTuple):
    """Cosines and sines (..., 1, rotated channels) of the half-split rotation at positions (...), in float32.

    `query_scale` (..., 1, 1) multiplies the queries at these positions; `None` leaves them.
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates the leading channels of `x` (..., heads, C), as many as `cos` has. The other channels stay."""
        leading, rest = x[..., : self.cos.shape[-1]], x[..., self.cos.shape[-1] :]
        first, second = leading.chunk(2, dim=-1)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        rotated = leading * cos + torch.cat((-second, first), dim=-1) * sin
        return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)

    def rotate_queries(self, q: Tensor) -> Tensor:
        """Queries (..., heads, C), rotated and scaled."""
        q = self.rotate(q)
        return q if self.query_scale is None else q * self.query_scale.to(q.dtype)


def rotary(positions: Tensor, config: ModelConfig) -> Rope:
    """The rotation at `positions` (...).

    With `llama_4_scaling_beta` b, the query at position p is multiplied by 1 + b ln(1 + floor(p / N)), where N is the
    number of positions in training.
    """
    frequencies, attention_factor = rope_frequencies(config, device=positions.device)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)[..., None, :]
    cos, sin = angles.cos(), angles.sin()
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    return Rope(cos, sin, query_scale(positions, config))


def query_scale(positions: Tensor, config: ModelConfig) -> Tensor | None:
    """The factors (..., 1, 1) of queries at `positions` (...), in float32; `None` if queries are not scaled."""
    scaling = config.rope_scaling
    if not isinstance(scaling, YarnScaling) or scaling.llama_4_scaling_beta is None:
        return None
    lengths = (positions // scaling.original_max_position_embeddings).float()
    return (1 + scaling.llama_4_scaling_beta * torch.log1p(lengths))[..., None, None]


def rope_frequencies(config: ModelConfig, *, device: torch.device | None = None) -> tuple[Tensor, float]:
    """The angle of a position in each pair of rotated channels, float32, and the factor of cosines and sines.

    Scaled frequencies are those of transformers' `modeling_rope_utils`, bit for bit on a CPU.
    """
    half, scaling = torch.arange(0, config.num_rotated, 2, device=device, dtype=torch.float32), config.rope_scaling
    if scaling is None:
        return config.rope_theta ** (-half / config.num_rotated), 1.0
    periods = config.rope_theta ** (half / config.num_rotated)  # of a radian, in positions
    match scaling:
        case LinearScaling(factor=factor):
            return 1.0 / periods / factor, 1.0
        case YarnScaling():
            return _yarn(periods, scaling, config), scaling.magnitude
        case Llama3Scaling():
            return _llama3(1.0 / periods, scaling), 1.0
        case ProportionalRotation(share=share):
            num_turning = int(share * config.num_rotated / 2)
            return torch.where(torch.arange(len(periods), device=device) < num_turning, 1.0 / periods, 0.0), 1.0


def _yarn(periods: Tensor, scaling: YarnScaling, config: ModelConfig) -> Tensor:
    """YaRN (arXiv 2309.00071, Eq. 17 to 23). Fast channels keep their frequency, slow ones are divided by the factor,
    and channels between are mixed along a ramp."""
    width, num_pairs = config.num_rotated, len(periods)

    def channel(turns: float) -> float:
        """The pair that makes this number of turns over the positions of training."""
        ratio = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return (width * math.log(ratio)) / (2 * math.log(config.rope_theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0.0
    pairs = torch.arange(num_pairs, device=periods.device, dtype=torch.float32)
    kept = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1's scaling: short waves keep their frequency, the frequency of long waves is divided by the factor, and
    waves between are mixed."""
    length, low, high = (
        scaling.original_max_position_embeddings,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    waves = 2 * math.pi / frequencies
    scaled = torch.where(waves > length / low, frequencies / scaling.factor, frequencies)
    share = (length / waves - low) / (high - low)
    mixed = (1 - share) * scaled / scaling.factor + share * scaled
    between = ~(waves < length / high) & ~(waves > length / low)
    return torch.where(between, mixed, scaled)
