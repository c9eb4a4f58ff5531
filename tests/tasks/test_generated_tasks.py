"""The generated tasks: answers are right; splits repeat, without repetitions, and no problem is in two of them."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.tasks import code_mini, gsm_mini
from mbd_core.tasks.split import distinct, split_of

Generate = Callable[..., Iterator[dict[str, str]]]


@pytest.mark.parametrize(
    ("task", "generate", "answer"),
    [("code-mini", code_mini.generate, "canonical_solution"), ("gsm-mini", gsm_mini.generate, "answer")],
)
def test_every_generated_answer_is_right_and_another_problem_s_is_not(
    task: str, generate: Generate, answer: str
) -> None:
    rows = itertools.islice(generate(split="test", seed=1), 6)
    drawn = load_problems(find_task(task), seed=1, limit=6)
    for problem, row in zip(drawn.problems, rows, strict=True):
        assert drawn.task.grade(problem, row[answer]).correct
        assert not drawn.task.grade(problem, "    return None\n").correct


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
