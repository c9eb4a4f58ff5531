"""How a request draws its tokens."""

from dataclasses import dataclass

LEAST = 1e-6  # the least temperature above 0 and the least top_p; float32 is not exact enough for smaller values


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request draws its tokens.

    temperature  0 is greedy; otherwise logits are divided by it and a token is drawn
    top_p        draw among the likeliest tokens that together reach this probability (1: all)
    top_k        draw among the `top_k` likeliest tokens (0: all)
    seed         the same seed gives the same tokens in any batch
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int | float):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number")
        if self.temperature != 0 and not LEAST <= self.temperature <= 10.0:
            raise ValueError(f"temperature={self.temperature} must be 0 or a number from {LEAST} to 10")
        if not LEAST <= self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must be a number from {LEAST} to 1")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k={self.top_k!r} must be a whole number of at least 0 (0: no limit)")
        if self.top_k >= 2**31:
            raise ValueError(f"top_k={self.top_k} must be less than {2**31}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed!r} must be a whole number of 64 bits")

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn; otherwise the likeliest token is taken."""
        return self.temperature > 0

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary, for which it must be sorted."""
        return self.draws and (self.top_k > 0 or self.top_p < 1)
