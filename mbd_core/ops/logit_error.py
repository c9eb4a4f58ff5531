"""How far the logits of a model with rounded weights are from the original's."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LogitError:
    """What rounding weights did to logits.

    max_abs, mean_abs  absolute differences
    top1_agreement     the share of positions whose likeliest token is the same
    mean_kl            mean divergence KL(wide || rounded) of the predicted distributions, in nats
    """

    max_abs: float
    mean_abs: float
    top1_agreement: float
    mean_kl: float
    positions: int


def logit_error(wide: Tensor, rounded: Tensor) -> LogitError:
    """Compare two sets of logits (..., V) of the same positions. Raises `ValueError` if their shapes differ."""
    if wide.shape != rounded.shape:
        raise ValueError(
            f"logits of shapes {tuple(wide.shape)} and {tuple(rounded.shape)} are not of the same positions"
        )
    difference = (wide.float() - rounded.float()).abs()
    log_wide, log_rounded = wide.float().log_softmax(-1), rounded.float().log_softmax(-1)
    divergence = (log_wide.exp() * (log_wide - log_rounded)).sum(-1)
    same = (wide.argmax(-1) == rounded.argmax(-1)).float()
    return LogitError(
        max_abs=float(difference.max()),
        mean_abs=float(difference.mean()),
        top1_agreement=float(same.mean()),
        mean_kl=float(divergence.mean()),
        positions=same.numel(),
    )
