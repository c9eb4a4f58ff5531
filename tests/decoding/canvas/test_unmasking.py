"""Acceptance rules against their equations."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mbd_core.decoding.blocks.canvas_config import Leap
from mbd_core.decoding.canvas.unmasking import Guesses, accept_by_factor, accept_over_threshold


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_factor_acceptance_is_its_equation(ticks: list[int], factor: float) -> None:
    confidence = torch.tensor(ticks, dtype=torch.float64) / 20
    places = torch.arange(len(ticks))
    chosen = accept_by_factor(Guesses(places, places, confidence, confidence), factor)
    best_first = sorted(range(len(ticks)), key=lambda i: (-ticks[i], i))
    count = 1
    while count < len(ticks) and (count + 2) * (1 - ticks[best_first[count]] / 20) <= factor:
        count += 1
    assert chosen.nonzero()[:, 0].tolist() == sorted(best_first[:count])


def test_leap_relaxes_only_near_anchors() -> None:
    confidence = torch.tensor([0.8, 0.95, 0.8, 0.7, 0.8, 0.8], dtype=torch.float64)
    g = Guesses(torch.tensor([10, 11, 12, 13, 14, 15]), torch.zeros(6), confidence, confidence)
    assert accept_over_threshold(g, 0.9, Leap(tau_relaxed=0.75, radius=3)).tolist() == [
        True,
        True,
        True,
        False,
        True,
        False,
    ]
    assert accept_over_threshold(g, 0.96, Leap(tau_relaxed=0.75, radius=3)).sum() == 0
