"""Noise-schedules: their bounds, and what is drawn at a mask ratio. Their means are checked in tests/parity."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbd_core.multitf.data.example import Example
from mbd_core.multitf.states.fitted_noise import fit_noise
from mbd_core.multitf.states.layout import GroupLayout, StateConfig
from mbd_core.multitf.states.noise import SCHEDULES, SLACK, NoiseBounds, choose_masked, num_masked
from mbd_core.multitf.states.sample import corrupt

RANGES = ((0.1, 0.2), (0.8, 0.9))


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 9), st.integers(0, 10**6))
def test_every_schedule_gives_each_block_a_ratio_within_its_bounds(name: str, size: int, seed: int) -> None:
    measured = fit_noise([(0.2,) * 9, (0.5,) * 4], source="a test")
    bounds = NoiseBounds(t_low=0.1, t_high=0.9, margin=0.1, slots=RANGES, fitted=measured)
    ratios = SCHEDULES[name](size, bounds, random.Random(seed))
    assert len(ratios) == size
    assert all(0.1 <= t <= (1.0 if name == "ascending" else 0.9) + 1e-12 for t in ratios)
    if name not in ("independent_uniform", "slot_ranges"):
        assert ratios == sorted(ratios)


def test_ranges_are_each_slots_own_and_the_last_serves_the_rest() -> None:
    rng, bounds = random.Random(0), NoiseBounds(slots=RANGES)
    for _ in range(50):
        first, second, third = SCHEDULES["slot_ranges"](3, bounds, rng)
        assert 0.1 <= first <= 0.2 and 0.8 <= second <= 0.9 and 0.8 <= third <= 0.9


def test_single_blocks_of_the_ramps_are_drawn() -> None:
    """D2F's released generator divides by zero there."""
    rng, bounds = random.Random(0), NoiseBounds(t_low=0.2, t_high=0.7, margin=0.0)
    for name in ("linear", "d2f_monotonic"):
        drawn = {SCHEDULES[name](1, bounds, rng)[0] for _ in range(20)}
        assert len(drawn) == 20 and min(drawn) >= 0.2 and max(drawn) <= 0.7


def test_bernoulli_masks_each_position_by_itself() -> None:
    rng = random.Random(0)
    counts = [len(choose_masked(range(3, 19), 0.5, "bernoulli", rng)) for _ in range(2000)]
    assert len(set(counts)) > 8 and sum(counts) / 2000 == pytest.approx(8.0, abs=0.2)
    assert len(choose_masked(range(3, 19), 0.5, "floor", rng)) == 8


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [({"gamma": 0.0}, "gamma=0.0"), ({"slots": ((0.5, 0.2),)}, "low <= high"), ({"t_low": 1.0}, "t_low < t_high")],
)
def test_bounds_that_mean_nothing_are_refused(fields: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        NoiseBounds(**fields)


def test_a_measured_ratio_masks_as_many_positions_as_were_measured() -> None:
    for size in range(1, 65):
        for masked in range(size + 1):
            ratio = round(masked / size, 6)
            assert [num_masked(ratio, size, how, slack=SLACK) for how in ("floor", "ceil")] == [masked] * 2
    assert (num_masked(0.333333, 3, "floor"), num_masked(0.666667, 3, "ceil")) == (0, 3)


def test_fitted_noise_has_slack_and_no_other_schedule() -> None:
    example, layout = Example(tuple(range(2, 8)), 0), GroupLayout((2,))
    fitted = fit_noise([(0.333333, 0.666667)], source="a test")
    for rounding in ("floor", "ceil"):
        config = StateConfig(block_size=3, schedule="fitted", bounds=NoiseBounds(fitted=fitted), rounding=rounding)
        drawn = corrupt(example, layout, start=0, config=config, mask_token_id=1, rng=random.Random(0))
        assert [sum(drawn.masked[:3]), sum(drawn.masked[3:])] == [1, 2]
