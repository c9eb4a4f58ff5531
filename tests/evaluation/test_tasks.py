"""The tasks by name."""

import pytest

from mbd_core.evaluation.tasks import TASKS, find_task


def test_a_task_is_found_by_its_name_and_an_unknown_one_lists_the_known() -> None:
    assert all(find_task(name).name == name for name in TASKS)
    with pytest.raises(ValueError, match="unknown task 'gsm'; known: gsm-mini, code-mini, gsm8k, humaneval"):
        find_task("gsm")


def test_a_row_becomes_a_problem_whose_reference_is_the_answer() -> None:
    problem = find_task("gsm8k").problem("p", {"question": "2 + 2?", "answer": "2 + 2 = 4\n#### 4"})
    assert (problem.problem_id, problem.prompt, problem.reference) == ("p", "2 + 2?", "4")
    with pytest.raises(ValueError, match="must end in '#### ' and a number"):
        find_task("gsm8k").problem("p", {"question": "2 + 2?", "answer": "four"})
