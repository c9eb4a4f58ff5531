"""The choice of the best configuration: on one half of the problems, by definitions computed by hand."""

import json
from dataclasses import replace

import pytest
from sweep_rows import graded_sample
from written_sweeps import timed_table

from mbd_core.evaluation.measures.speed import MeasuredSpeed, speeds
from mbd_core.evaluation.measures.summary import ReportKey
from mbd_core.evaluation.sweep.choice.best import By, SamplesByKey, check_halves, choose_best, is_for_choice, knee

IDS = [f"p{number}" for number in range(40)]
CHOICE, OTHER = [p for p in IDS if is_for_choice(p)], [p for p in IDS if not is_for_choice(p)]


def key(tau: float) -> ReportKey:
    config = {"block_size": 4, "buffer_size": 1 + (tau < 0.5), "tau_m2t": tau, "t2t": None}
    return ReportKey("m", "MBD", "a", json.dumps(config))


def samples_of(**right: tuple[float, float, int]) -> SamplesByKey:
    """By a threshold's decimals the shares that are right of the choosing half and of the other, and the TPF."""
    return {
        key(float(f"0.{name[1:]}")): [
            graded_sample(tokens=10 * tpf, forwards=10, problem=p, correct=number < share * len(half))
            for half, share in ((CHOICE, chosen), (OTHER, other))
            for number, p in enumerate(half)
        ]
        for name, (chosen, other, tpf) in right.items()
    }


def times_of(**tps: float) -> list[MeasuredSpeed]:
    rows = [timed_table({**vars(key(float(f"0.{name[1:]}"))), "problem_id": "p"}) for name in tps]
    found = [speeds(table.to_pylist())[0] for table in rows]
    return [replace(speed, tps_batch_1=value) for speed, value in zip(found, tps.values(), strict=True)]


def chosen(samples: SamplesByKey, by: By, times: list[MeasuredSpeed] | None = None) -> float:
    return float(choose_best(samples, times or [], model="m", by=by).best.config["tau_m2t"])


def test_halves_are_of_ids_alone_and_of_about_one_size() -> None:
    assert [is_for_choice(p) for p in ("gsm8k/0", "gsm8k/1", "gsm8k/2", "HumanEval/0", "Mbpp/2")] == [
        *(False, True, False, True, False),
    ]
    assert abs(sum(is_for_choice(f"gsm8k/{n}") for n in range(1319)) - 1319 / 2) < 60
    with pytest.raises(ValueError):
        check_halves({"b": IDS, "a": CHOICE[:1]})


def test_what_is_reported_played_no_part_in_the_choice() -> None:
    samples = samples_of(t9=(1.0, 0.0, 2), t7=(0.5, 1.0, 2))
    point = choose_best(samples, [], model="m", by="accuracy")
    assert (point.best.config["tau_m2t"], point.best.accuracy) == (0.9, 100)
    assert point.record["tasks"]["a"]["accuracy"] == 0.0 and point.record["tasks"]["a"]["n"] == len(OTHER)
    assert f"on {len(OTHER)} answers to the other problems: accuracy 0.00 [0.0, " in point.text
    assert f"chosen on {len(CHOICE)} answers: " in point.text
    assert '"t2t"' not in point.text
    turned = {k: [s for s in graded if is_for_choice(s.problem)] for k, graded in samples.items()}
    with pytest.raises(ValueError):
        choose_best(turned, [], model="m", by="accuracy")


def test_ties_go_to_the_faster_and_other_models_do_not_matter() -> None:
    samples = samples_of(t9=(0.5, 0.5, 2), t7=(0.5, 0.5, 4), t5=(0.4, 1.0, 6))
    assert chosen(samples, "accuracy") == 0.7
    other = {ReportKey("n", "MBD", "b", k.config): graded for k, graded in samples_of(t9=(1.0, 1.0, 9)).items()}
    assert chosen({**other, **samples}, "accuracy") == 0.7


def test_the_fastest_is_of_those_near_the_most_accurate() -> None:
    half = 1 / len(CHOICE)  # a problem: more than 5 points
    samples = samples_of(t9=(1.0, 1.0, 2), t7=(1.0, 1.0, 4), t5=(1.0 - half, 1.0, 8))
    times = times_of(t9=20.0, t7=10.0, t5=90.0)
    assert chosen(samples, "tps", times) == 0.9, "by measured TPS, not by TPF"
    assert chosen(samples, "tps", times[1:]) == 0.7, "without a time it is no candidate"
    assert "3 configurations, 2 of them timed" in choose_best(samples, times[1:], model="m", by="tps").text
    for few in ([], times[2:]):
        with pytest.raises(ValueError, match="tps"):
            choose_best(samples, few, model="m", by="tps")


def test_the_knee_is_farthest_above_the_chord_of_the_front() -> None:
    """From (100, 1) to (0, 5): 90 at 3 is 0.9 + 0.5, 50 at 4 is 0.5 + 0.75, the ends are 1; 40 at 3.5 is dominated."""
    points = [(100.0, 1.0), (90.0, 3.0), (50.0, 4.0), (0.0, 5.0), (40.0, 3.5)]
    assert knee(points) == (90.0, 3.0)
    assert knee([(100.0, 1.0), (20.0, 3.0), (0.0, 5.0)]) == (100.0, 1.0), "below the chord: the ends, the accurate one"
    assert knee([(80.0, 1.0), (70.0, 9.0)]) == (80.0, 1.0)
    assert knee([(80.0, 1.0), (90.0, 9.0)]) == (90.0, 9.0), "one point beats all"
    samples = samples_of(t9=(1.0, 0.0, 1), t7=(0.9, 0.0, 3), t5=(0.0, 1.0, 5))
    assert chosen(samples, "knee") == 0.7


def test_one_configuration_of_two_methods_is_one_and_tasks_are_means() -> None:
    first, second = samples_of(t9=(1.0, 1.0, 2), t7=(0.9, 0.9, 2)).items()
    samples = {
        first[0]: first[1],
        second[0]: second[1],
        replace(first[0], method="again"): first[1],
        replace(first[0], task="b"): samples_of(t9=(0.0, 0.0, 2))[first[0]],
        replace(second[0], task="b"): samples_of(t9=(0.9, 0.9, 2))[first[0]],
    }
    point = choose_best(samples, [], model="m", by="accuracy")
    assert (point.num_candidates, point.best.config["tau_m2t"]) == (2, 0.7)
    assert list(point.record["tasks"]) == ["a", "b"]


def test_configurations_measured_on_different_problems_are_not_compared() -> None:
    (hard, answers), (easy, _) = samples_of(t9=(0.5, 0.5, 2), t7=(1.0, 1.0, 2)).items()
    both = {hard: answers, replace(hard, task="b"): answers, easy: answers}
    with pytest.raises(ValueError, match="lacks 40"):
        choose_best(both, [], model="m", by="accuracy")
    with pytest.raises(ValueError, match="lacks 4"):
        choose_best({hard: answers, easy: answers[2:-2]}, [], model="m", by="accuracy")
