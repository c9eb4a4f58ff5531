"""How a sweep is cut: every row once, whole problems, the longest prompts first, and shards that share nothing."""

from collections import Counter

import pytest
from written_sweeps import planned_rows

from mbd_core.batch.parts import cut, in_turns, part_size
from mbd_core.evaluation.sweep.shard import SweepShard


def test_every_row_is_in_one_part_with_the_others_of_its_problem_and_model() -> None:
    rows = planned_rows(models=("m", "n"), problems=7)
    parts = cut(rows, rows_per_part=5)
    assert Counter(row["sample"] for part in parts for row in part.rows) == Counter(range(len(rows)))
    assert [part.number for part in parts] == list(range(len(parts)))
    for part in parts:
        assert len({row["model"] for row in part.rows}) == 1
        assert len(part.rows) == 4 or part.number in (6, 13)
    homes = {(row["model"], row["problem_id"], part.number) for part in parts for row in part.rows}
    assert len(homes) == 2 * 14, "a problem's configurations share its prefix"
    for model in ("m", "n"):
        lengths = [len(row["prompt"]) for part in parts for row in part.rows if row["model"] == model]
        assert lengths == sorted(lengths, reverse=True)


def test_the_rows_of_a_prompt_take_turns_with_those_of_others() -> None:
    prompts = "aaabbbbc"
    taken = in_turns([{"input": prompt, "sample": number} for number, prompt in enumerate(prompts)])
    assert "".join(row["input"] for row in taken) == "abcababb"
    assert [row["sample"] for row in taken if row["input"] == "b"] == [3, 4, 5, 6]


def test_a_part_is_four_batches_fewer_in_a_small_sweep_and_never_less_than_one() -> None:
    assert [part_size(rows, max_rows=8) for rows in (1, 128, 129, 400, 10_000)] == [8, 8, 9, 25, 32]


def test_a_problem_with_more_configurations_than_a_part_has_rows_is_a_part() -> None:
    assert [len(part.rows) for part in cut(planned_rows(problems=2), rows_per_part=1)] == [2] * 4


def test_shards_share_nothing_and_lack_nothing() -> None:
    for count in (1, 2, 3, 5):
        held = Counter(
            n for index in range(1, count + 1) for n in range(11) if SweepShard(index=index, count=count).holds(n)
        )
        assert held == Counter(range(11))
    assert str(SweepShard.parse("2/3")) == "2/3"


@pytest.mark.parametrize("text", ["", "2", "0/2", "3/2", "a/b", "-1/2", "1/2/3", "1/0"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="i/n"):
        SweepShard.parse(text)
