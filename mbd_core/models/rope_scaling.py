"""Rotary frequencies for contexts longer than training's, one type for each `rope_type` of a config.json.

`models/rope.py` has the formulas. The field names are transformers'; `factor` says how many times longer contexts are.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN: channels that turn more often than `beta_fast` over the positions of training keep their frequency.

    The frequency of channels that turn less often than `beta_slow` is divided by `factor`. `truncate` rounds the
    bounds to whole channels. `llama_4_scaling_beta`, if given, also scales queries by their positions (`rope.rotary`).
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    llama_4_scaling_beta: float | None = None

    def __post_init__(self) -> None:
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast} must be at least beta_slow={self.beta_slow}")

    @property
    def magnitude(self) -> float:
        """The factor of cosines and sines: `attention_factor`, or a value that follows from the other fields."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    def _growth(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: waves that fit more than `high_freq_factor` times into the positions of training stay.

    Waves that fit less than `low_freq_factor` times are divided by `factor`.
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must exceed low_freq_factor={self.low_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class ProportionalRotation:
    """Gemma's global layers: the first `share` of the pairs rotate, each with the frequency that it has among all
    pairs; the other pairs stay."""

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"partial_rotary_factor={self.share} must lie above 0 and be at most 1")


RopeScaling = LinearScaling | YarnScaling | Llama3Scaling | ProportionalRotation
ROPE_SCALINGS: dict[str, type[RopeScaling]] = {"linear": LinearScaling, "yarn": YarnScaling, "llama3": Llama3Scaling}
