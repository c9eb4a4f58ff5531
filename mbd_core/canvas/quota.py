"""The number of masks that each step of a block fills: LLaDA's even quota, Dream's schedule of times.

Offsets count from the prompt's end.
"""

import torch


def steps_of_block(steps: int, max_tokens: int, start: int, stop: int) -> int:
    """The number of the canvas's `steps` that the block [start, stop) gets, in proportion to its length."""
    return steps * stop // max_tokens - steps * start // max_tokens


def quota(num_masked: int, num_steps: int, step: int) -> int:
    """How many masks of a block step `step` fills: equal parts, the remainder to the first steps; 0 after the last."""
    if step >= num_steps:
        return 0
    return num_masked // num_steps + (step < num_masked % num_steps)


def unmasking_share(num_steps: int, step: int, eps: float) -> float:
    """1 - s / t between two of the `num_steps + 1` times from 1 to `eps`; 1 at the last step (Dream).

    In float32, as in the released code, because rounding can change the floor of a product by one.
    """
    if step >= num_steps - 1:
        return 1.0
    times = torch.linspace(1, eps, num_steps + 1)
    return float(1 - times[step + 1] / times[step])


def scheduled_quota(num_masked: int, num_steps: int, step: int, eps: float) -> int:
    """How many of the `num_masked` masked positions step `step` fills; all at the last step (Dream)."""
    if step >= num_steps - 1:
        return num_masked
    times = torch.linspace(1, eps, num_steps + 1)
    return int(num_masked * (1 - times[step + 1] / times[step]))
