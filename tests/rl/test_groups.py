"""Groups: which are kept and why not, and advantages against numpy's own z-scores."""

import numpy as np
import pytest

from mbd_core.rl.groups import GroupConfig, ScoredAnswer, advantages, drop_reason, z_scores

WEIGHTS = {"correct": 1.0, "tpf": 0.5}


def answers_of(group: int, *pairs: tuple[bool, float]) -> list[ScoredAnswer]:
    return [
        ScoredAnswer(group=group, correct=right, tpf=tpf, rewards={"correct": float(right), "tpf": tpf})
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
    assert [drop_reason(group, trace_rl) for group in (MIXED, RIGHT, WRONG, EVEN, ALONE)] == [
        None,
        "too_many_right",
        "too_few_right",
        None,
        "undecoded",
    ]
    every = GroupConfig(least_right=0.0, least_tpf_range=0.0)
    assert drop_reason(WRONG, every) is None
    with pytest.raises(ValueError, match="must be at most most_right"):
        GroupConfig(least_right=0.8, most_right=0.2)


def test_equal_values_have_no_score_and_no_division_by_zero() -> None:
    assert z_scores([2.0, 2.0, 2.0]) == [0.0] * 3 and z_scores([]) == []
    assert z_scores([1.0, 3.0]) == [-1.0, 1.0]
