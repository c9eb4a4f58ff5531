"""Solved problems for few-shot prompts: read in the tasks' own formats, and chosen as lm-eval chooses them."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.prompts import FewShotExample, choose_examples, load_examples


def examples(folder: Path, task: str, *rows: dict[str, Any]) -> list[FewShotExample]:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_examples(find_task(task), str(path))


@pytest.mark.parametrize(
    ("task", "row", "answer"),
    [
        ("gsm8k", {"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}, "1 + 1 = 2\n#### 2"),
        ("gsm8k-cot", {"question": "1 + 1?", "target": "It is 2. The answer is 2."}, "It is 2. The answer is 2."),
        ("math", {"problem": "1 + 1?", "solution": r"\boxed{2}", "answer": "2"}, r"\boxed{2}"),
        (
            "mbpp",
            {"text": "1 + 1?", "code": "def f():\r\n  return 2 ", "test_list": ["a", "b"]},
            "def f():\n  return 2",
        ),
        ("mbpp", {"prompt": "1 + 1?", "code": "x = 2", "test_list": ["a", "b"]}, "x = 2"),
    ],
)
def test_an_example_is_a_row_of_the_task_s_own_file(
    tmp_path: Path, task: str, row: dict[str, Any], answer: str
) -> None:
    tests = "a\nb" if "test_list" in row else ""
    assert examples(tmp_path, task, row) == [FewShotExample(question="1 + 1?", answer=answer, tests=tests)]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"answer": "The answer is 2."}, "an example needs its question in one of the columns question, problem"),
        ({"question": "1 + 1?"}, "an example needs its answer in one of the columns target, solution"),
        ({"question": "1 + 1?", "answer": "#### 2"}, "lacks 'The answer is', from which gsm8k-cot reads a number"),
    ],
)
def test_a_row_that_is_no_example_is_named(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    good = {"question": "1?", "answer": "The answer is 1."}
    with pytest.raises(ValueError, match="line 2") as caught:
        examples(tmp_path, "gsm8k-cot", good, row)
    assert sentence in str(caught.value)


def test_the_first_stay_and_drawn_ones_differ_from_problem_to_problem() -> None:
    pool = [FewShotExample(question=str(n), answer="") for n in range(50)]
    first = list(itertools.islice(choose_examples(pool, count=3, choice="first"), 4))
    assert first == [pool[:3]] * 4
    drawn = list(itertools.islice(choose_examples(pool, count=3, choice="drawn"), 4))
    generator = random.Random(1234)
    assert drawn == [generator.sample(pool, 3) for _ in range(4)]
    assert len({tuple(e.question for e in some) for some in drawn}) == 4
