"""What is accepted on a canvas, and how many masks each step of a block fills."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mbd_core.decoding.blocks.canvas_config import Leap
from mbd_core.decoding.canvas.plan import Guesses
from mbd_core.decoding.canvas.unmasking import (
    accept_by_factor,
    accept_over_threshold,
    quota,
    scheduled_quota,
    steps_of_block,
)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_factor_acceptance_is_its_equation(ticks: list[int], factor: float) -> None:
    confidence, places = np.array(ticks) / 20, np.arange(len(ticks))
    chosen = accept_by_factor(Guesses(places, places, confidence, confidence, confidence), factor)
    best_first = sorted(range(len(ticks)), key=lambda i: (-ticks[i], i))
    count = 1
    while count < len(ticks) and (count + 2) * (1 - ticks[best_first[count]] / 20) <= factor:
        count += 1
    assert chosen.nonzero()[0].tolist() == sorted(best_first[:count])


def test_leap_relaxes_only_near_anchors() -> None:
    confidence = np.array([0.8, 0.95, 0.8, 0.7, 0.8, 0.8])
    g = Guesses(np.arange(10, 16), np.zeros(6), confidence, confidence, confidence)
    assert accept_over_threshold(g, 0.9, Leap(tau_relaxed=0.75, radius=3)).tolist() == [
        True,
        True,
        True,
        False,
        True,
        False,
    ]
    assert accept_over_threshold(g, 0.96, Leap(tau_relaxed=0.75, radius=3)).sum() == 0


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_steps_are_spread_without_loss(max_tokens: int, size: int, steps: int) -> None:
    starts = range(0, max_tokens, size)
    shares = [steps_of_block(steps, max_tokens, s, min(s + size, max_tokens)) for s in starts]
    assert sum(shares) == steps
    for share, start in zip(shares, starts, strict=True):
        length = min(size, max_tokens - start)
        if 1 <= share <= length:
            counts = [quota(length, share, i) for i in range(share)]
            assert sum(counts) == length and max(counts) - min(counts) <= 1 and min(counts) >= 1


def test_the_schedule_floors_in_float32() -> None:
    left, counts = 48, []
    for step in range(48):
        counts.append(scheduled_quota(left, 48, step, 1e-3))
        left -= counts[-1]
    assert left == 0 and counts[0] == 0 and counts[-1] == 2 and set(counts[1:-1]) == {1}
