"""The splits of the generated tasks: repeatable, without repetitions, and without a problem in two of them."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from mbd_core.tasks import code_mini, gsm_mini
from mbd_core.tasks.split import distinct, split_of

Generate = Callable[..., Iterator[dict[str, str]]]


@pytest.mark.parametrize("generate", [gsm_mini.generate, code_mini.generate])
def test_a_seed_gives_the_same_problems_and_no_split_another_s(generate: Generate) -> None:
    def prompts(split: str, seed: int) -> list[tuple[str, ...]]:
        rows = itertools.islice(generate(split=split, seed=seed), 60)
        return [(row.get("question") or row["prompt"],) for row in rows]

    assert prompts("test", 3) == prompts("test", 3)
    assert prompts("test", 3) != prompts("test", 4)
    for one, other in itertools.combinations(("train", "valid", "test"), 2):
        assert not set(prompts(one, 3)) & set(prompts(other, 3))


def test_a_tenth_of_the_keys_is_test_and_a_tenth_valid() -> None:
    shares = Counter(split_of(f"key {number}") for number in range(5000))
    assert shares["test"] / 5000 == pytest.approx(0.1, abs=0.02)
    assert shares["valid"] / 5000 == pytest.approx(0.1, abs=0.02)


def test_problems_are_numbered_without_repetitions_until_nothing_new_is_drawn() -> None:
    draws = itertools.cycle(f"key {number}" for number in range(40))
    drawn = list(distinct(lambda: (next(draws), None), "train"))
    assert [number for number, _, _ in drawn] == list(range(len(drawn)))
    assert {key for _, key, _ in drawn} == {k for k in (f"key {n}" for n in range(40)) if split_of(k) == "train"}
