"""How one request is decoded: the thresholds of the papers, validated once, carried by the request."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """SingleBD (`buffer_size=1`) and MultiBD (`buffer_size >= 2`) with M2T acceptance (Alg. 4 and 5, Table 4).

    block_size       B, tokens of a diffusion block; the one the model was trained with
    buffer_size      N_buf, blocks of the request that may be resident at once
    tau_add          the next block is activated when the last active one has progress > tau_add
    tau_semi         a block may fall back to its best positions when its predecessor has progress >= tau_semi
    tau_m2t          a masked position becomes a token when its confidence > tau_m2t (1.0: only by fallback)
    tokens_per_step  the fallback's quota: with fewer positions over tau_m2t, the best `tokens_per_step` are taken
    fallback         what "best" means: highest confidence, or leftmost (SDAR's sequential remasking)

    Progress counts editable positions only: not the prompt's remainder in the boundary block, not positions past
    `max_tokens`. Raises `ValueError` naming the field.
    """

    block_size: int
    buffer_size: int = 1
    tau_add: float = 0.1
    tau_semi: float = 0.9
    tau_m2t: float = 0.95
    tokens_per_step: int = 1
    fallback: Literal["confidence", "leftmost"] = "confidence"

    def __post_init__(self) -> None:
        for name in ("block_size", "buffer_size", "tokens_per_step"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        for name in ("tau_add", "tau_semi", "tau_m2t"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}={value!r} must be a number from 0 to 1")
        if self.tokens_per_step > self.block_size:
            raise ValueError(f"tokens_per_step={self.tokens_per_step} exceeds block_size={self.block_size}")
        if self.fallback not in ("confidence", "leftmost"):
            raise ValueError(f"fallback={self.fallback!r} must be 'confidence' or 'leftmost'")


def decoding_config(defaults: Mapping[str, Any], overrides: Mapping[str, Any], *, block_size: int) -> DecodingConfig:
    """A request's config: the fields of `generation_config.json` that concern decoding, then the request's own.

    Foreign keys in `defaults` (Hugging Face keeps much there) are passed over; an unknown key in `overrides`, or in
    either a `block_size` the model was not trained with, is a `ValueError`.
    """
    names = [f.name for f in fields(DecodingConfig)]
    unknown = sorted(set(overrides) - set(names))
    if unknown:
        raise ValueError(f"unknown decoding field '{unknown[0]}'; known: {', '.join(names)}")
    for source in (defaults, overrides):
        if source.get("block_size", block_size) != block_size:
            raise ValueError(f"block_size={source['block_size']} cannot be honoured: the model has {block_size}")
    chosen = {k: v for k, v in defaults.items() if k in names} | dict(overrides) | {"block_size": block_size}
    return DecodingConfig(**chosen)
