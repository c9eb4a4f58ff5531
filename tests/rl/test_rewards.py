"""Rewards: the graders' and TPF, a part that does not apply, a part that fails, names and weights."""

import re

import pytest
from scored_rows import scores

from mbd_core.fields import changed
from mbd_core.rl.parts import RewardFailed
from mbd_core.rl.rewards import RewardConfig


def test_right_answers_and_speed_are_rewarded_apart() -> None:
    right, wrong, cut, nothing = scores(
        [
            {"text": "so\n#### 5"},
            {"text": "#### 6", "num_forwards": 3},
            {"text": "#### 5", "finish_reason": "length"},
            {"text": None, "error": "too long"},
        ]
    )
    assert right == {"correct": True, "overlong": False, "reason": "passed"} | {
        "rewards": {"correct": 1.0, "tpf": 3.0},
        "failure": None,
    }
    assert wrong["rewards"] == {"correct": 0.0, "tpf": 4.0} and not wrong["correct"]
    assert cut["overlong"] and not cut["correct"] and cut["rewards"]["correct"] == 0.0
    assert nothing["rewards"] is None and nothing["reason"] == "undecoded"
    (lenient,) = scores([{"text": "#### 5", "finish_reason": "length"}], overlong_is_wrong=False)
    assert lenient["correct"] and lenient["overlong"]


def test_a_function_rewards_beside_the_grader_and_may_print() -> None:
    found = scores([{"text": "a1"}, {"text": "11"}], rewards={"correct": 1.0, "rl_rewards:digits": 2.0, "tpf": 0.0})
    assert [row["rewards"] for row in found] == [
        {"correct": 0.0, "rl_rewards:digits": 0.5},
        {"correct": 0.0, "rl_rewards:digits": 1.0},
    ]


def test_a_part_that_does_not_apply_leaves_the_other_parts() -> None:
    long, short = scores([{"text": "#### 5"}, {"text": "5"}], rewards={"correct": 1.0, "rl_rewards:only_long": 1.0})
    assert long["rewards"] == {"correct": 1.0, "rl_rewards:only_long": 6.0}
    assert short["rewards"] == {"correct": 0.0, "rl_rewards:only_long": None} and short["failure"] is None


def test_a_part_that_fails_for_an_answer_drops_that_answer_or_stops() -> None:
    parts = {"correct": 1.0, "rl_rewards:inverse": 1.0}
    first, empty, last = scores([{"text": "12"}, {"text": ""}, {"text": "1"}], rewards=parts)
    assert [row["rewards"] for row in (first, last)] == [
        {"correct": 0.0, "rl_rewards:inverse": 0.5},
        {"correct": 0.0, "rl_rewards:inverse": 1.0},
    ]
    assert empty["rewards"] is None
    says = "reward 'rl_rewards:inverse' raised ZeroDivisionError: division by zero, for an answer to p1"
    assert empty["failure"] == says
    with pytest.raises(RewardFailed, match=re.escape(says)):
        scores([{"text": "12"}, {"text": ""}], rewards=parts, on_reward_error="stop")


def test_a_reward_is_named_and_weighed() -> None:
    with pytest.raises(ValueError, match="correct"):
        changed(RewardConfig(), {"rewards": {"correct": "a"}})
    with pytest.raises(ValueError, match="known: correct, tpf"):
        RewardConfig(rewards={"speed": 1.0})
    with pytest.raises(ValueError, match="weight"):
        RewardConfig(rewards={"correct": 0.0})
    with pytest.raises(ValueError, match="tpf"):
        RewardConfig(rewards={"tpf": float("inf")})
    with pytest.raises(ValueError, match="tpf"):
        RewardConfig(rewards={"tpf": 10**400})
    for url in ("http://", "http://a b/", "http://host:port/", "http://[::1/"):
        with pytest.raises(ValueError):
            RewardConfig(rewards={url: 1.0})
    with pytest.raises(ValueError, match="judge_key"):
        RewardConfig(judge_key={"http://a/": "KEY"})
    assert RewardConfig(rewards={"correct": 1, "tpf": 0}).weights == {"correct": 1}
    assert RewardConfig(rewards={"correct": 1, "./my rewards.py:Judge.score": 1}).judges
