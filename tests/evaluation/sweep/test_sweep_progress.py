"""Progress: the problems that each configuration has done, and the time until its model has ended."""

from written_sweeps import planned_rows

from mbd_core.batch.parts import cut
from mbd_core.evaluation.sweep.run import SECONDS, SweepProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_says_how_far_each_model_and_task_is_and_when_the_model_ends() -> None:
    """Two models, ten problems by two configurations, two problems a part: five parts a model."""
    parts, clock = cut(planned_rows(models=("m", "n"), tasks=("a",)), rows_per_part=4), Clock()
    progress = SweepProgress(parts, range(1, 10), clock=clock)  # the first part was there before
    clock.now += SECONDS / 2
    assert progress.done(1) == [], "too soon"
    clock.now += SECONDS / 2
    assert progress.done(2) == [
        "m on a: 6 of 10 problems by each of 2 configurations, about 30 s left",
        "n on a: 0 of 10 problems by each of 2 configurations, about 2 min left",
    ]
    clock.now += 1
    assert progress.done(3) == []
    assert progress.done(4) == ["m on a: 10 of 10 problems by each of 2 configurations"]
    clock.now += 100 * SECONDS
    (line,) = progress.done(5)
    assert line == "n on a: 2 of 10 problems by each of 2 configurations, about 50 min left"
    clock.now += 10000
    assert progress.done(6)[0].endswith("about 2 h 10 min left")


def test_what_was_there_counts_as_done() -> None:
    parts, clock = cut(planned_rows(tasks=("a", "b"), problems=2), rows_per_part=4), Clock()
    progress = SweepProgress(parts, [1], clock=clock)
    clock.now += SECONDS
    assert all(line.endswith("2 of 2 problems by each of 2 configurations") for line in progress.done(1))


def test_the_time_that_engines_take_to_start_is_no_part_of_the_rate() -> None:
    """Two engines are ready after seven minutes, and take a minute a part."""
    parts, clock = cut(planned_rows(tasks=("a",)), rows_per_part=4), Clock()
    progress = SweepProgress(parts, range(5), num_engines=2, clock=clock)
    clock.now += 420
    assert progress.done(0) == ["m on a: 2 of 10 problems by each of 2 configurations"]
    clock.now += SECONDS / 2
    assert progress.done(1) == []
    clock.now += 60
    assert progress.done(2) == ["m on a: 6 of 10 problems by each of 2 configurations, about 2 min left"]
