"""The tasks by name."""

import pytest

from mbd_core.evaluation.tasks.benchmarks import TASKS, find_task


def test_a_task_is_found_by_its_name_and_an_unknown_one_lists_the_known() -> None:
    assert all(find_task(name).name == name for name in TASKS)
    with pytest.raises(ValueError, match="known: gsm-mini, code-mini"):
        find_task("gsm")


def test_a_row_becomes_a_problem_whose_reference_is_the_answer() -> None:
    problem = find_task("gsm8k").problem("p", {"question": "2 + 2?", "answer": "2 + 2 = 4\n#### 4"})
    assert (problem.problem_id, problem.prompt, problem.reference) == ("p", "2 + 2?", "4")
    with pytest.raises(ValueError):
        find_task("gsm8k").problem("p", {"question": "2 + 2?", "answer": "four"})


def test_humaneval_refuses_a_row_whose_plus_inputs_it_would_leave_out() -> None:
    row = {"task_id": "x", "prompt": "def f():\n", "test": "", "entry_point": "f", "plus_input": [[1]]}
    with pytest.raises(ValueError, match="use task 'humaneval-plus'"):
        find_task("humaneval").problem("p", row)


def test_both_files_of_mbpp_give_a_problem_with_the_function_that_its_tests_call() -> None:
    full = {"task_id": 7, "text": "Add.", "test_list": ["assert set(add((1, 2))) == {3}"], "test_setup_code": "n = 1"}
    clean = {"task_id": 7, "prompt": "Add.", "test_list": full["test_list"], "test_imports": ["import math"]}
    for row, setup in ((full, "n = 1"), (clean, "import math")):
        problem = find_task("mbpp").problem("p", row)
        assert (problem.problem_id, problem.entry_point) == ("Mbpp/7", "add")
        assert setup in problem.reference and "Add." in problem.prompt
    with pytest.raises(ValueError, match="test_list"):
        find_task("mbpp").problem("p", {**full, "test_list": ["assert 1 == 1"]})


def test_math_takes_the_boxed_answer_of_a_solution() -> None:
    problem = find_task("math").problem("p", {"problem": "?", "solution": r"So \boxed{\frac{1}{2}}."})
    assert problem.reference == r"\frac{1}{2}"
    with pytest.raises(ValueError):
        find_task("math").problem("p", {"problem": "?", "solution": "none"})
