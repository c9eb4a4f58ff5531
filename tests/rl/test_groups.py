"""Groups: which are kept and why not, and advantages against numpy's own z-scores."""

from dataclasses import replace

import numpy as np
import pytest

from mbd_core.rl.groups import GroupConfig, RewardedAnswer, advantages, drop_reason, num_even, why_idle, z_scores

WEIGHTS = {"correct": 1.0, "tpf": 0.5}


def answers_of(group: int, *pairs: tuple[bool, float]) -> list[RewardedAnswer]:
    return [
        RewardedAnswer(group=group, correct=right, tpf=tpf, rewards={"correct": float(right), "tpf": tpf})
        for right, tpf in pairs
    ]


MIXED = answers_of(0, (True, 4.0), (False, 6.0), (True, 2.0), (False, 2.0))
RIGHT = answers_of(1, (True, 3.0), (True, 5.0), (True, 4.0))
WRONG = answers_of(2, (False, 3.0), (False, 5.0))
EVEN = answers_of(3, (True, 3.0), (False, 3.005))
ALONE = answers_of(4, (True, 3.0))


def test_advantages_are_those_of_lightning_rl() -> None:
    """Each part z-scored in its group alone, the sums over the batch; groups that were dropped have no part in it."""
    found, dropped = advantages([*MIXED, *WRONG, *RIGHT, *EVEN, *ALONE], WEIGHTS, GroupConfig(), seed=0)

    def z(values: list[float]) -> np.ndarray:
        column = np.array(values)
        return np.zeros(len(column)) if column.std() == 0 else (column - column.mean()) / column.std()

    sums = [z([float(a.correct) for a in group]) + 0.5 * z([a.tpf for a in group]) for group in (MIXED, RIGHT)]
    wanted = z(np.concatenate(sums).tolist())
    assert list(found) == [0, 1, 2, 3, 6, 7, 8]
    assert np.allclose(list(found.values()), wanted, atol=1e-12)
    assert dropped == {"too_few_right": 1, "even_tpf": 1, "undecoded": 1}


def test_joint_advantages_are_z_scored_sums_of_a_group() -> None:
    found, _ = advantages([*MIXED, *RIGHT], WEIGHTS, GroupConfig(advantages="joint"), seed=0)
    sums = np.array([a.correct + 0.5 * a.tpf for a in MIXED])
    assert np.allclose(list(found.values())[:4], (sums - sums.mean()) / sums.std())


def test_the_control_permutes_within_groups_and_the_imitator_keeps_right_answers() -> None:
    batch = [*MIXED, *RIGHT]
    plain, _ = advantages(batch, WEIGHTS, GroupConfig(), seed=0)
    shuffled = [advantages(batch, WEIGHTS, GroupConfig(advantages="shuffled"), seed=n)[0] for n in range(5)]
    for values in shuffled:
        for places in (range(4), range(4, 7)):
            assert sorted(values[n] for n in places) == sorted(plain[n] for n in places)
    assert any(values != plain for values in shuffled)
    assert advantages(batch, WEIGHTS, GroupConfig(advantages="shuffled"), seed=3)[0] == shuffled[3]
    right, _ = advantages(batch, WEIGHTS, GroupConfig(advantages="correct"), seed=0)
    assert right == {0: 1.0, 2: 1.0, 4: 1.0, 5: 1.0, 6: 1.0}


def test_a_group_is_dropped_for_a_reason() -> None:
    trace_rl = GroupConfig(least_right=0.2, most_right=0.8, least_tpf_range=0.0)
    assert [drop_reason(group, WEIGHTS, trace_rl) for group in (MIXED, RIGHT, WRONG, EVEN, ALONE)] == [
        None,
        "too_many_right",
        "too_few_right",
        None,
        "undecoded",
    ]
    every = GroupConfig(least_right=0.0, least_tpf_range=0.0)
    assert drop_reason(WRONG, WEIGHTS, every) is None
    with pytest.raises(ValueError, match="most_right"):
        GroupConfig(least_right=0.8, most_right=0.2)


def own_group(*values: float | None) -> list[RewardedAnswer]:
    """Wrong answers of one TPF that a part of the user's own rewards."""
    return [
        RewardedAnswer(group=0, correct=False, tpf=1.0, rewards={"correct": 0.0, "mine:f": value}) for value in values
    ]


@pytest.mark.parametrize(
    ("group", "weights", "config", "reason"),
    [
        (own_group(1, 2), {"mine:f": 1.0}, GroupConfig(), None),
        (own_group(1, 2), {"mine:f": 1.0, "correct": 1.0}, GroupConfig(), None),
        (own_group(1, 1), {"mine:f": 1.0, "correct": 1.0}, GroupConfig(), None),
        (own_group(1, 2), {"mine:f": 1.0, "correct": 1.0}, GroupConfig(least_right=0.2), "too_few_right"),
        (own_group(1, 2), {"mine:f": 1.0}, GroupConfig(least_tpf_range=0.1), "even_tpf"),
        (own_group(1, 2), {"correct": 1.0}, GroupConfig(), "too_few_right"),
        (answers_of(0, (True, 1.0), (False, 1.0)), {"correct": 1.0}, GroupConfig(), None),
        (answers_of(0, (True, 1.0), (False, 1.0)), WEIGHTS, GroupConfig(), "even_tpf"),
        (answers_of(0, (False, 1.0), (False, 2.0)), {"tpf": 1.0}, GroupConfig(), None),
        (WRONG, WEIGHTS, GroupConfig(), "too_few_right"),
        (WRONG, {"tpf": 1.0}, GroupConfig(advantages="correct"), "too_few_right"),
        (answers_of(0, (True, 1.0), (True, 1.0)), {"correct": 1.0}, GroupConfig(advantages="correct"), None),
        (own_group(1, None), {"mine:f": 1.0, "correct": 1.0}, GroupConfig(), None),
        (own_group(1, None), {"mine:f": 1.0, "correct": 1.0}, GroupConfig(advantages="joint"), None),
        (
            [RewardedAnswer(group=0, correct=True, tpf=1.0, rewards={}), *MIXED[:1]],
            WEIGHTS,
            GroupConfig(),
            "unrewarded",
        ),
    ],
)
def test_a_group_is_judged_by_what_is_rewarded(
    group: list[RewardedAnswer], weights: dict[str, float], config: GroupConfig, reason: str | None
) -> None:
    assert drop_reason(group, weights, config) == reason


def test_a_part_that_does_not_apply_is_neutral() -> None:
    found, _ = advantages(own_group(1, 3, None), {"correct": 1.0, "mine:f": 2.0}, GroupConfig(), seed=0)
    assert found[2] == 0.0 and found[0] == -found[1] < 0
    joint = GroupConfig(advantages="joint")
    found, _ = advantages(own_group(1, 3, None), {"correct": 1.0, "mine:f": 2.0}, joint, seed=0)
    assert list(found.values()) == z_scores([2.0, 6.0, 0.0])


def test_answers_without_a_reward_have_no_part_in_their_group() -> None:
    failed = RewardedAnswer(group=0, correct=True, tpf=9.0, rewards={})
    plain, _ = advantages([*MIXED, *RIGHT], WEIGHTS, GroupConfig(), seed=0)
    found, _ = advantages([failed, *MIXED, *RIGHT], WEIGHTS, GroupConfig(), seed=0)
    assert found == {place + 1: value for place, value in plain.items()}


def test_groups_without_a_better_answer_are_counted() -> None:
    even = [replace(answer, group=7) for answer in own_group(1, 1, None)]
    for rule in ("decoupled", "joint"):
        weights, config = {"correct": 1.0, "mine:f": 1.0}, GroupConfig(advantages=rule)
        both = [*own_group(1, 2, None), *even[:2]]
        assert num_even(both, advantages(both, weights, config, seed=0)[0]) == 1
    assert num_even(even, advantages(even, weights, GroupConfig(), seed=0)[0]) == 1


def test_why_groups_taught_nothing_names_the_option_that_changes_it() -> None:
    text = why_idle({"too_few_right": 3, "even_tpf": 1}, 2, WEIGHTS, GroupConfig())
    first, second, third = text.split(", 2 had the same ")[0], *text.split(", 2 had the same ")[1].split(", 1 were ")
    assert first == "3 were dropped, since their share of right answers is below 0.01 (--least-right 0 keeps them)"
    assert second.startswith("correct and tpf in all answers (other problems, a larger --group")
    assert third == "dropped, since their TPF differs by less than 0.01 (--least-tpf-range 0 keeps them)"
    assert "--least-right" not in why_idle({"too_few_right": 3}, 0, {"correct": 1.0}, GroupConfig())


def test_equal_values_have_no_score_and_no_division_by_zero() -> None:
    assert z_scores([2.0, 2.0, 2.0]) == [0.0] * 3 and z_scores([]) == []
    assert z_scores([1.0, 3.0]) == [-1.0, 1.0]


def test_rounding_makes_no_answer_better() -> None:
    """Parts that cancel, sums that are equal, and an even group beside another: a z-score would enlarge the noise."""
    faster_but_wrong = answers_of(0, (True, 9 / 11), (False, 46 / 21))
    found, _ = advantages(faster_but_wrong, {"correct": 1.0, "tpf": 1.0}, GroupConfig(), seed=0)
    assert list(found.values()) == [0.0, 0.0]
    own = own_group(0.1 + 0.2, 0.3, 0.3)
    for rule in ("decoupled", "joint"):
        config = GroupConfig(advantages=rule, least_right=0, least_tpf_range=0)
        found, _ = advantages(own, {"mine:f": 1.0}, config, seed=0)
        assert list(found.values()) == [0.0] * 3 and num_even(own, found) == 1
    even = answers_of(0, *[(True, 2.0)] * 4)
    for seed in range(20):
        draws = np.random.default_rng(seed)
        beside = answers_of(1, *[(right, draws.uniform(1, 3)) for right in (True, True, False, False)])
        config = GroupConfig(least_tpf_range=0)
        assert num_even([*even, *beside], advantages([*even, *beside], WEIGHTS, config, seed=0)[0]) == 1
