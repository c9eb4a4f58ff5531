"""code-mini: every answer that it draws is right, and an answer to another question is not."""

import itertools

from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.graders import grade
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.tasks import code_mini


def test_every_generated_answer_is_right_and_another_problem_s_is_not() -> None:
    rows = itertools.islice(code_mini.generate(split="test", seed=1), 6)
    drawn = load_problems(find_task("code-mini"), seed=1, limit=6)
    for problem, row in zip(drawn.problems, rows, strict=True):
        assert grade(drawn.task, problem, row["canonical_solution"]).correct
        assert not grade(drawn.task, problem, "    return None\n").correct
