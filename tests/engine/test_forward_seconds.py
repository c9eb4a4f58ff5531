"""Expected seconds of forwards, from given seconds: of loads that were measured, and of others."""

import random

import pytest

from mbd_core.engine.schedule.forward_seconds import CARRIED, KEPT_FORWARDS, ForwardSeconds, StepLoad


def by_load(load: StepLoad) -> float:
    return 0.5 + 0.01 * load.rows + 0.02 * load.positions + 0.003 * load.prompt_tokens


def measured(loads: list[StepLoad], *, noise: float = 0.0) -> ForwardSeconds:
    seconds, rng = ForwardSeconds(), random.Random(1)
    for load in loads:
        seconds.observe(load, by_load(load) * rng.uniform(1 - noise, 1 + noise))
    return seconds


LOADS = [StepLoad(rows, rows * n, tokens) for rows in (4, 5, 7) for n in (1, 8) for tokens in (0, 64)]


@pytest.mark.parametrize(("noise", "error"), [(0.0, 1e-6), (0.2, 0.05)])
def test_each_quantity_has_its_cost(noise: float, error: float) -> None:
    seconds = measured(40 * LOADS, noise=noise)
    assert seconds.num_measured == 40 * len(LOADS)
    for load in (StepLoad(4, 4), StepLoad(6, 36), StepLoad(4, 64), StepLoad(7, 7, 512)):
        assert seconds.of(load) == pytest.approx(by_load(load), rel=error)


def test_a_slow_forward_changes_nothing_and_a_new_cost_is_learnt() -> None:
    seconds = measured(4 * LOADS)
    seconds.observe(LOADS[0], 1e4)
    for load in LOADS:
        assert seconds.of(load) == pytest.approx(by_load(load), rel=0.01)
    for load in (8 * KEPT_FORWARDS // len(LOADS) + 1) * LOADS:
        seconds.observe(load, 3 * by_load(load))
    for load in LOADS:
        assert seconds.of(load) == pytest.approx(3 * by_load(load), rel=0.05)


def test_other_numbers_of_rows_begin_with_the_nearest_and_have_their_own_line() -> None:
    """Many rows cost more than the line of few rows says; each line keeps to its own measures."""
    seconds = measured(4 * LOADS)
    many = [StepLoad(60, 60), StepLoad(60, 480)]
    for load in many:
        assert seconds.of(load) == pytest.approx(by_load(load), rel=1e-6)
    for load in round(2 / CARRIED) * many:
        seconds.observe(load, 5 + 0.02 * load.positions)
    for load in many:
        assert seconds.of(load) == pytest.approx(5 + 0.02 * load.positions, rel=0.05)
    assert seconds.of(LOADS[0]) == pytest.approx(by_load(LOADS[0]), rel=1e-6)


def test_a_load_that_never_varied_has_its_mean() -> None:
    seconds = measured(8 * [StepLoad(1, 16)])
    assert seconds.of(StepLoad(1, 16)) == pytest.approx(by_load(StepLoad(1, 16)))
    assert 0 < seconds.of(StepLoad(1, 8)) <= seconds.of(StepLoad(1, 32))
