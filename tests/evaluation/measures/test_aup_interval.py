"""Intervals of the AUPs: cases that are enumerated by hand, and what their draws share."""

import json
from dataclasses import replace

import numpy as np
from sweep_rows import graded_sample, report_samples

from mbd_core.evaluation.measures.aup import aup_d3llm, aup_eq41
from mbd_core.evaluation.measures.rates import GradedSample
from mbd_core.evaluation.measures.summary import (
    AupMean,
    AupRow,
    ReportKey,
    SamplesByKey,
    build_aup,
    build_rows,
    drawn_points,
    with_intervals,
)


def found(samples: SamplesByKey) -> dict[tuple[str, str], AupRow]:
    rows, _ = with_intervals(build_aup(build_rows(samples)), samples)
    return {(aup.model, aup.task): aup for aup in rows}


def means(samples: SamplesByKey) -> dict[str, AupMean]:
    _, found = with_intervals(build_aup(build_rows(samples)), samples)
    return {one.model: one for one in found}


def samples_of(
    curves: dict[str, list[list[tuple[int, bool | int]]]], task: str = "a"
) -> dict[ReportKey, list[GradedSample]]:
    """Of each model the (TPF, whether right) of every problem under every configuration."""
    return {
        ReportKey(model, "MBD", task, json.dumps({"block_size": 4, "tau_m2t": number / 10})): [
            graded_sample(tokens=10 * tpf, forwards=10, correct=bool(right), problem=f"{task}/{problem}")
            for problem, (tpf, right) in enumerate(config)
        ]
        for model, configs in curves.items()
        for number, config in enumerate(configs)
    }


def test_problems_that_are_all_alike_leave_no_width() -> None:
    aup = found(samples_of({"m": [[(2, True)] * 5, [(4, True)] * 5]}))["m", "a"]
    assert aup.eq41.bounds == (aup.eq41.value, aup.eq41.value) == (200, 200)
    assert aup.d3llm.bounds == (aup.d3llm.value, aup.d3llm.value) == (400, 400)


def test_two_problems_are_drawn_as_enumerated_by_hand() -> None:
    """The draws are (0, 0), (0, 1) and (1, 1), with a quarter, a half and a quarter of the probability."""
    curves = {"m": [[(2, True), (4, True)], [(6, True), (4, False)]], "best": [[(1, True), (1, True)]]}
    samples = samples_of(curves)
    aup = found(samples)["m", "a"]
    enumerated = {
        (0, 0): ([(2, 100), (6, 100)], 100.0),
        (0, 1): ([(3, 100), (5, 50)], 100.0),
        (1, 1): ([(4, 100), (4, 0)], 100.0),
    }
    plain = [aup_eq41(points) for points, _ in enumerated.values()]
    weighted = [aup_d3llm(points, y_max=y_max) for points, y_max in enumerated.values()]
    assert plain == [400, 150, 0] and weighted == [600, 300, 400], "in (0, 1) the second point is dropped"
    assert aup.eq41.bounds == (0, 400) and aup.eq41.value == 150
    assert aup.d3llm.bounds == (300, 600) and aup.d3llm.value == 300


def test_y_max_is_drawn_with_the_points_it_weighs() -> None:
    """Each problem has two samples, of one both are right, of the other one is: draws have 100, 75 or 50 percent.

    Alone, a model is the best of its pool in each draw, so that the weight is always 1.
    """
    samples = {
        key: [replace(sample, problem=f"p{number // 2}") for number, sample in enumerate(graded)]
        for key, graded in samples_of({"m": [[(tpf, right) for right in (1, 1, 1, 0)] for tpf in (1, 3)]}).items()
    }
    alone = found(samples)["m", "a"]
    assert alone.d3llm.value == 225 and alone.d3llm.bounds == (150, 300)
    better = {replace(key, model="other"): graded[:1] * 2 + [graded[2]] * 2 for key, graded in samples.items()}
    beside = found({**samples, **better})["m", "a"]
    low = aup_d3llm([(1, 50), (3, 50)], y_max=100)
    assert beside.y_max == 100 and beside.d3llm.bounds == (round(low, 6), 300)


def test_an_interval_holds_its_value_and_shrinks_with_the_problems() -> None:
    generator = np.random.default_rng(5)
    widths = []
    for num_problems in (20, 320):
        right = generator.random((2, num_problems)) < 0.8
        tpf = generator.integers(1, 4, (2, num_problems)) + np.array([[0], [3]])
        configs = [list(zip(tpf[n].tolist(), right[n].tolist(), strict=True)) for n in range(2)]
        aup = found(samples_of({"m": configs}))["m", "a"]
        for value, bounds in ((aup.eq41.value, aup.eq41.bounds), (aup.d3llm.value, aup.d3llm.bounds)):
            assert bounds is not None and bounds[0] < value < bounds[1]
        assert aup.eq41.low is not None
        widths.append(aup.eq41.bounds[1] - aup.eq41.bounds[0])
    assert 2 < widths[0] / widths[1] < 8, "as the square root of the problems, about 4"


def test_draws_depend_on_the_task_s_own_samples_and_not_on_their_order() -> None:
    samples = report_samples()
    together, alone = found(samples), found({key: s for key, s in samples.items() if key.task == "b"})
    assert all(aup == together[name] for name, aup in alone.items())
    turned = {key: list(reversed(graded)) for key, graded in samples.items()}
    assert found(turned) == together == found(samples)


def test_configurations_share_their_draws_and_an_error_is_wrong_but_no_rate() -> None:
    samples = samples_of({"m": [[(2, True), (4, False)], [(2, True), (4, False)]]})
    tpf, accuracy = drawn_points(samples, seed=1, num_draws=50).transpose(1, 0, 2)
    assert (tpf[0] == tpf[1]).all() and len(set(tpf[0])) == 3
    assert set(zip(tpf[0], accuracy[0], strict=True)) == {(2, 100), (3, 50), (4, 0)}
    first = next(iter(samples))
    samples[first][1] = GradedSample(problem="a/1", correct=False, counts=None)
    tpf, accuracy = drawn_points(samples, seed=1, num_draws=50).transpose(1, 0, 2)
    assert set(zip(tpf[0], accuracy[0], strict=True)) == {(2, 100), (2, 50), (0, 0)}


def test_draws_without_a_configuration_of_an_unfinished_sweep_are_left_out() -> None:
    samples = samples_of({"m": [[(2, True), (2, True)], [(4, True), (4, True)]]})
    del samples[list(samples)[1]][1]
    assert found(samples)["m", "a"].eq41.bounds == (200, 200)


def test_a_mean_over_tasks_is_drawn_as_the_mean_of_independent_draws() -> None:
    """A task's draws are those enumerated above. Of three tasks each extreme has 1/64 of the probability, less than
    the 2.5 % of a tail, but for d3LLM's lowest, which has 1/8."""
    curves = {"m": [[(2, True), (4, True)], [(6, True), (4, False)]], "best": [[(1, True), (1, True)]]}
    one, three = samples_of(curves, "a"), {}
    for task in ("a", "b", "c"):
        three |= samples_of(curves, task)
    assert means(one)["m"].eq41.bounds == found(one)["m", "a"].eq41.bounds == (0, 400)
    mean = means(three)["m"]
    assert (mean.tasks, mean.eq41.value, mean.d3llm.value) == (("a", "b", "c"), 150, 300)
    assert mean.eq41.bounds == ((0 + 0 + 150) / 3, round((400 + 400 + 150) / 3, 6))
    assert mean.d3llm.bounds == ((300 + 300 + 300) / 3, round((600 + 600 + 400) / 3, 6))
    best = means(three)["best"]
    assert (best.eq41.bounds, best.d3llm.bounds) == ((0, 0), (100, 100))


def test_tasks_of_the_same_problems_share_their_draws() -> None:
    """The mean of a task and its copies is as uncertain as the task, not less, as that of three tasks above is."""
    one = samples_of({"m": [[(2, True), (4, True)], [(6, True), (4, False)]], "best": [[(1, True), (1, True)]]})
    three = {replace(key, task=task): graded for task in ("a", "b", "c") for key, graded in one.items()}
    assert means(three)["m"].eq41.bounds == means(one)["m"].eq41.bounds == (0, 400)
    assert means(three)["m"].d3llm.bounds == means(one)["m"].d3llm.bounds == (300, 600)


def test_a_mean_has_no_interval_where_a_task_has_none() -> None:
    curves = {"m": [[(2, True), (4, True)], [(6, True), (4, False)]]}
    short = {"m": [[(2, True)], [(6, True)]]}
    mean = means({**samples_of(curves, "a"), **samples_of(short, "b")})["m"]
    assert mean.eq41.value == (150 + 400) / 2 and mean.eq41.low is None and mean.d3llm.low is None


def test_one_problem_has_no_interval() -> None:
    aup = found(samples_of({"m": [[(2, True)], [(4, True)]]}))["m", "a"]
    assert aup.eq41.value == 200 and aup.eq41.low is None and aup.d3llm.low is None


def test_the_aup_of_one_buffer_size_is_that_of_a_sweep_with_no_other_in_the_same_pool() -> None:
    samples = {
        ReportKey("m", "multi", "t", json.dumps({"buffer_size": size, "tau_m2t": tau})): [
            graded_sample(
                tokens=40,
                forwards=8 // size + problem % 2 + round(4 * tau),
                correct=(problem * size) % 3 > 0,
                problem=f"t/{problem}",
            )
            for problem in range(12)
        ]
        for size in (2, 4)
        for tau in (0.5, 0.9)
    }
    rows = build_rows(samples)
    mixed, *by_slots = [*build_aup(rows), *build_aup(rows, by_slots=True)]
    assert mixed.slots is None and [one.slots for one in by_slots] == [2, 4]
    drawn, of_tasks = with_intervals([mixed, *by_slots], samples)
    assert drawn[0] == with_intervals([mixed], samples)[0][0] and len(of_tasks) == 1
    for size, one in zip((2, 4), drawn[1:], strict=True):
        alone = [(row.summary.tpf, row.summary.accuracy) for row in rows if row.config["buffer_size"] == size]
        assert one.eq41.value == float(aup_eq41(alone)) and one.points == tuple(sorted(alone))
        assert one.d3llm.value == float(aup_d3llm(alone, y_max=mixed.y_max))
        assert one.d3llm.low is not None
    assert build_aup([row for row in rows if row.config["buffer_size"] == 2], by_slots=True) == []
